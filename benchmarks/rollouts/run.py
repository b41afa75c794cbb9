"""Seconds of one rollout: captured graphs against Transformers' generate, same model, one run.

    python -m benchmarks.rollouts.run --out result.json

A Llama of SmolLM2-135M's shape with random weights: speed does not depend on what it says.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks._lib.results import write_json
from mesotron.sampling.graphs import GraphSampler, Sampling

SHAPES = ((256, 10), (256, 32), (1024, 32), (256, 128))  # completions, tokens of each
PROMPT = 60
EOS = 49151


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).cuda()


def seconds(rollout: Callable[[], object], repeats: int) -> float:
    """Mean time, after one that is not counted."""
    rollout()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        rollout()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


def measure(model: LlamaForCausalLM, rows: int, tokens: int) -> dict[str, float]:
    prompts = torch.randint(2, EOS, (rows, PROMPT))
    sampler = GraphSampler(model, [EOS], 0, Sampling(), dtype=torch.bfloat16)

    began = time.perf_counter()
    sampler.sample(prompts.tolist(), tokens)
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    graph = seconds(lambda: sampler.sample(prompts.tolist(), tokens), 5)

    ids = prompts.cuda()

    def by_generate() -> object:
        return sampler.copy.generate(  # the same bfloat16 weights
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=0,
            eos_token_id=EOS,
        )

    plain = seconds(by_generate, 2)
    return {"first_s": first, "graph_s": graph, "generate_s": plain, "ratio": plain / graph}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    arguments = parser.parse_args()

    found = {}
    model = make_model()
    for rows, tokens in SHAPES:
        found[f"{rows}x{tokens}"] = measure(model, rows, tokens)
        print(rows, tokens, found[f"{rows}x{tokens}"], flush=True)

    device = torch.cuda.get_device_name()
    record = {"device": device, "torch": torch.__version__, "shapes": found}
    write_json(record, arguments.out, indent=1)


if __name__ == "__main__":
    main()
