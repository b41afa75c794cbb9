"""Measured against planned: seconds per step and peak memory of real training steps on this GPU.

    python -m benchmarks.plan --out results

Models have published shapes and random weights, so nothing is downloaded; their completions never
end early. Each case is one line of JSON as soon as it is measured, and `result.json` holds all of
them. `--small` shrinks everything for a dry run on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
import trl
from transformers import AutoModelForCausalLM, TrainerCallback

from mesotron.answers.facts import Judge
from mesotron.answers.verify import Verifier
from mesotron.config import ModelConfig, ObjectiveConfig, OptimConfig, RolloutConfig, TrainConfig
from mesotron.models.load import load_model
from mesotron.optim.device import choose_device, name_device
from mesotron.rewards.call import make_reward
from mesotron.rlvr.lifecycle import quiet_libraries
from mesotron.rlvr.parts import Parts, build_trainer
from mesotron.rlvr.plan.estimate import predict
from mesotron.rlvr.plan.setup import Lengths
from mesotron.rlvr.plan.shapes import GIB, SHAPES, Shape, find_device
from mesotron.rlvr.trl_arguments import trl_arguments
from mesotron.runs import RunFolder
from mesotron.tasks.load import load_task
from mesotron.tasks.prompts import render_prompts

KINDS = {
    "smollm2": "llama",
    "qwen2.5": "qwen2",
    "qwen3": "qwen3",
}
MUON = OptimConfig(name="muon")
ADAMW = OptimConfig(name="adamw")
NO_KL = ObjectiveConfig(beta=0.0)
TINY = Shape(2, 64, 128, 4, 2, 16, 512)


def case(
    model: str,
    optim: OptimConfig,
    objective: ObjectiveConfig = NO_KL,
    tokens: int = 96,
    micro: int | None = None,
    fast: bool = False,
    dtype: str = "bfloat16",
    **more: Any,
) -> TrainConfig:
    rollout = RolloutConfig(
        prompts=16, generations=8, max_tokens=tokens, fast=fast, micro_batch=micro
    )
    chosen = ModelConfig(name=model, dtype=dtype, **more)  # type: ignore[arg-type]

    return TrainConfig(
        model=chosen,
        optim=optim,
        objective=objective,
        rollout=rollout,
    )


# The most wanted first: the rest is left out when the time is up.
CASES = {
    "smollm2 full": case("smollm2-135m", MUON),
    "qwen2.5-0.5b full": case("qwen2.5-0.5b", ADAMW),
    "qwen3-1.7b full": case("qwen3-1.7b", MUON),
    "smollm2 lora": case("smollm2-135m", MUON, lora=16),
    "qwen2.5-0.5b lora": case("qwen2.5-0.5b", ADAMW, lora=16, tokens=64),
    "qwen3-1.7b lora": case("qwen3-1.7b", ADAMW, lora=16, tokens=64),
    "smollm2 fast": case("smollm2-135m", MUON, fast=True),
    "qwen2.5-0.5b fast": case("qwen2.5-0.5b", MUON, fast=True, tokens=192),
    "qwen3-1.7b fast": case("qwen3-1.7b", ADAMW, fast=True, tokens=192),
    "qwen3-1.7b checkpointed": case(
        "qwen3-1.7b",
        ADAMW,
        ObjectiveConfig(beta=0.04),
        micro=32,
        tokens=64,
        gradient_checkpointing=True,
    ),
    "smollm2 float32": case("smollm2-135m", ADAMW, tokens=48, dtype="float32"),
    "smollm2 mixed fast": case("smollm2-135m", ADAMW, dtype="mixed", fast=True),
}


class Clock(TrainerCallback):
    """Seconds of each step, and of its phases with the GPU waited for."""

    def __init__(self, device: torch.device, deadline: float) -> None:
        self.device = device
        self.deadline = deadline
        self.ends: list[float] = []
        self.phases: list[dict[str, float]] = []
        self._now: dict[str, float] = defaultdict(float)

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self.now()
            result = call(*args, **kwargs)
            self._now[name] += self.now() - began

            return result

        return timed

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.ends.append(self.now())

    def on_step_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
        self.ends.append(self.now())
        self.phases.append(dict(self._now))
        self._now.clear()
        control.should_training_stop |= self.ends[-1] > self.deadline and len(self.ends) > 2


def build(shape: Shape, kind: str, dtype: torch.dtype, device: torch.device, ends: int) -> Any:
    settings = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": ends,
    }

    config = transformers.AutoConfig.for_model(kind, **settings)
    torch.manual_seed(0)

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)

    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, ends
    return model.to(device).eval()


def measure(
    name: str, config: TrainConfig, small: bool, seconds: float, verifier: Verifier
) -> dict[str, Any]:
    deadline = time.perf_counter() + seconds
    device = choose_device("auto")
    key = config.model.name
    kind = next(kind for prefix, kind in KINDS.items() if key.startswith(prefix))

    shape = SHAPES[key]
    if small:
        shape = TINY._replace(head_norms=shape.head_norms)
        rollout = replace(
            config.rollout,
            prompts=2,
            generations=2,
            max_tokens=8,
            micro_batch=None,
        )

        config = replace(config, rollout=rollout)
        if config.model.dtype == "mixed":
            config = replace(config, model=replace(config.model, dtype="float32"))

    warm, counted = (2, 3) if config.rollout.fast else (1, 2)
    config = replace(
        config,
        steps=warm + counted,
        save_every=0,
        guard="off",
    )

    wide = device.type == "cpu" or config.model.dtype in ("float32", "mixed")
    _, tokenizer = load_model(ModelConfig(name="tiny"))
    dtype = torch.float32 if wide else torch.bfloat16

    model = build(
        shape,
        kind,
        dtype,
        device,
        tokenizer.eos_token_id,
    )

    task = load_task(replace(config.task, num_train=200, num_eval=2))
    prompts = render_prompts(task.train, config.task, tokenizer)

    # A batch of prompts is padded to its longest.
    sizes = sorted(len(tokenizer.encode(text, add_special_tokens=False)) for text in prompts)
    tokens = config.rollout.max_tokens
    lengths = Lengths(
        prompt=sizes[int(0.95 * len(sizes))],
        completion=tokens,
        longest=tokens,
    )

    clock = Clock(device, deadline)
    weights = 0.0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        weights = torch.cuda.memory_allocated() / GIB  # with what an earlier case left

    judge = Judge(task.format, verifier)
    reward = make_reward(config.reward, judge, tokens)
    arguments = trl_arguments(config.objective, config.rollout, config.optim)

    parts = Parts(
        config,
        device,
        model,
        tokenizer,
        task,
        judge,
        reward,
        arguments,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(parts, RunFolder.create(Path(folder) / "run", config, {}))

        # Weights are not worth writing: a 1.7B model with its state has 17 GB.
        trainer._save_checkpoint = lambda *_, **__: None  # type: ignore
        for phase, method in (
            ("generate", "_generate_single_turn"),
            ("rollout", "_generate_and_score_completions"),
            ("optimizer", "_clip_grad_norm"),
        ):
            setattr(trainer, method, clock.around(phase, getattr(trainer, method)))

        trainer.add_callback(clock)
        create = trainer.create_optimizer

        def create_timed(*args: Any) -> Any:
            optimizer = create(*args)
            optimizer.step = clock.around("optimizer", optimizer.step)
            return optimizer

        trainer.create_optimizer = create_timed  # type: ignore
        trainer.train()

    steps = [b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)]
    kept = range(min(warm, len(steps) - 1), len(steps))
    phases = {
        phase: median(clock.phases[i].get(phase, 0.0) for i in kept)
        for phase in ("generate", "rollout", "optimizer")
    }

    step = median(steps[i] for i in kept)
    train = step - phases["rollout"] - phases["optimizer"]
    plan = predict(config, shape, find_device(name_device(device)), lengths)

    row: dict[str, Any] = {
        "case": name,
        "parameters": shape.parameters,
        "lengths": lengths._asdict(),
        "steps_s": [round(one, 3) for one in steps],
        "measured_step_s": step,
        "planned_step_s": plan.step,
        "step_ratio": plan.step / step,
        "measured_phases_s": phases | {"train and rest": train},
        "planned_phases_s": plan.seconds,
        "lengths_sampled": [
            row["completions/mean_length"]
            for row in trainer.state.log_history
            if "completions/mean_length" in row
        ],
        "fast": str(trainer.fast) if config.rollout.fast else None,
    }
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / GIB
        row |= {
            "measured_gib": peak,
            "start_gib": weights,
            "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
            "planned_gib": plan.allocated,
            "planned_parts_gib": plan.memory,
            "memory_ratio": plan.allocated / peak,
        }

    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument(
        "--seconds",
        type=float,
        default=225,
        help="start no case after this",
    )

    parser.add_argument(
        "--cases",
        nargs="+",
        default=list(CASES),
        choices=list(CASES),
    )

    parser.add_argument("--small", action="store_true", help="tiny shapes, for a CPU")
    given = parser.parse_args()
    began = time.perf_counter()
    quiet_libraries()
    logging.getLogger("mesotron").setLevel(logging.ERROR)
    given.out.mkdir(parents=True, exist_ok=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    versions["trl"] = trl.__version__
    device = name_device(choose_device("auto"))

    record: dict[str, Any] = {
        "device": device,
        "versions": versions,
        "rows": [],
    }
    with Verifier() as verifier:
        for name in given.cases:
            left = given.seconds - (time.perf_counter() - began)
            if left < 5:
                print(json.dumps({"case": name, "left_out": "no time left"}), flush=True)
                continue

            started = time.perf_counter()
            try:
                row = measure(
                    name,
                    CASES[name],
                    given.small,
                    left,
                    verifier,
                )
            except Exception as error:  # the other cases are worth having
                traceback.print_exc()
                row = {"case": name, "error": f"{type(error).__name__}: {error}"[:300]}

            row["case_s"] = round(time.perf_counter() - started, 1)
            record["rows"].append(row)
            print(json.dumps(row), flush=True)
            (given.out / "result.json").write_text(json.dumps(record, indent=1) + "\n")
            gc.collect()

            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    for row in record["rows"]:
        ratios = [f"{key} {row[key]:.2f}" for key in ("step_ratio", "memory_ratio") if key in row]
        print(f"{row['case']:<28}", "  ".join(ratios) or row.get("error", ""))


if __name__ == "__main__":
    main()
