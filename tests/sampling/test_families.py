"""Every family of `BLOCKS` against Transformers: equal greedy tokens in float32."""

import os

import pytest
import torch
import transformers

from mesotron.sampling import decoder
from mesotron.sampling.blocks import BLOCKS
from mesotron.sampling.decoder import FusedSampler
from mesotron.sampling.graphs import Sampling

END = 1
PAD = 0
WINDOW = 8
# What makes a family different; tests of `test_graphs` have Llama, Qwen2 and Qwen3 without more.
SPECIAL = {
    "Mistral": {"sliding_window": WINDOW},
    "Qwen2": {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "SmolLM3": {"no_rope_layers": [1, 0], "use_sliding_window": False},
    "Granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.7,
        "logits_scaling": 3.0,
    },
    "Gemma3": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
        "head_dim": 16,
    },
    "Olmo3": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
FAMILIES = [name.removesuffix("ForCausalLM") for name in BLOCKS]


def make_model(family: str, **changed):
    torch.manual_seed(0)
    settings = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.4,  # greedy paths are not ties
        "pad_token_id": PAD,
        "eos_token_id": END,
        "bos_token_id": END,
        **SPECIAL.get(family, {}),
        **changed,
    }
    names = {"Gemma3": "Gemma3TextConfig"}
    config = getattr(transformers, names.get(family, f"{family}Config"))(**settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()

    # Weights of norms begin alike, which would hide a norm that is left out or misplaced.
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(0.3 * torch.randn_like(weight))

    return model


def make_prompts():
    generator = torch.Generator().manual_seed(1)
    sizes = (3, 21, 12)
    prompts = [torch.randint(2, 50, (size,), generator=generator).tolist() for size in sizes]
    return [*prompts, prompts[1]]


def by_generate(model, prompt, max_tokens):
    ids = torch.tensor([prompt])
    written = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    return written[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(family):
    model = make_model(family)
    prompts = make_prompts()
    sampler = FusedSampler(model, [END], PAD, Sampling(temperature=0.0))

    for _ in range(2):  # the second time after the weights changed
        expected = [by_generate(model, prompt, 24) for prompt in prompts]
        assert sampler.sample(prompts, 24) == expected
        assert len({tuple(row) for row in expected}) == 3

        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.2 * torch.randn_like(weight))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="interprets the kernels")
@pytest.mark.parametrize("family", ["Mistral", "SmolLM3", "Granite", "Gemma3", "Olmo3"])
def test_kernels_write_the_same(monkeypatch, family):
    model = make_model(family)
    prompts = make_prompts()[1:]
    monkeypatch.setattr(decoder.triton, "available", lambda device: True)
    sampler = FusedSampler(model, [END], PAD, Sampling(temperature=0.0))

    assert sampler.sample(prompts, 4) == [by_generate(model, prompt, 4) for prompt in prompts]


@pytest.mark.parametrize(
    ("family", "changed", "reason"),
    [
        ("GPT2", {}, "GPT2LMHeadModel"),
        ("Gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("Gemma3", {"use_bidirectional_attention": True}, "bidirectional"),
        ("Llama", {"attn_implementation": "eager"}, "eager"),
    ],
)
def test_other_models_are_refused_with_the_reason(family, changed, reason):
    if family == "GPT2":
        config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50)
        model = transformers.GPT2LMHeadModel(config)
    else:
        model = make_model(family, **changed)

    assert reason in (FusedSampler.obstacle(model) or "")
