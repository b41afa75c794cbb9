"""Fused layouts against the models' own forward passes: zeroing a block must act like zeroing that
projection.

Without biases, a zero query and a zero key both make attention uniform and give the same output; a
zero value acts like a zero output projection. No other split of the weight has these properties.
"""

from __future__ import annotations

import pytest
import torch
from optim.routing.test_golden import FOUR_HEADS, GQA, MODELS, MOE, construct
from torch import nn

from mesotron.optim.routing import route
from mesotron.optim.views import View

transformers = pytest.importorskip("transformers")

# GPTBigCode scripts its softmax when its module is imported.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)

ONE = {"num_hidden_layers": 1}
NEOX = {**FOUR_HEADS, **ONE}
GPT = {
    "vocab_size": 96,
    "n_embd": 16,
    "n_head": 4,
    "n_layer": 1,
}
SMALL = {
    "vocab_size": 96,
    "hidden_size": 16,
    **ONE,
    "num_attention_heads": 4,
}
FALCON = {**SMALL, "alibi": False, "bias": False}
FUSED = {
    "gpt2": ("GPT2LMHeadModel", GPT),
    "phi3": (
        "Phi3ForCausalLM",
        {
            **GQA,
            **ONE,
            "pad_token_id": 0,
        },
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", NEOX),
    "bloom": (
        "BloomForCausalLM",
        {
            "vocab_size": 96,
            "hidden_size": 16,
            "n_layer": 1,
            "n_head": 4,
        },
    ),
    "falcon_groups": (
        "FalconForCausalLM",
        {
            **FALCON,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
        },
    ),
    "falcon_one_key": ("FalconForCausalLM", {**FALCON, "multi_query": True}),
    "falcon_heads": ("FalconForCausalLM", {**FALCON, "multi_query": False}),
    "codegen": (
        "CodeGenForCausalLM",
        {
            **GPT,
            "n_embd": 32,
            "n_head": 8,
            "rotary_dim": 4,
        },
    ),
    "bigcode_heads": ("GPTBigCodeForCausalLM", {**GPT, "multi_query": False}),
    "bigcode_one_key": ("GPTBigCodeForCausalLM", {**GPT, "multi_query": True}),
    "persimmon": ("PersimmonForCausalLM", NEOX),
    "mpt": (
        "MptForCausalLM",
        {
            "vocab_size": 96,
            "d_model": 16,
            "n_heads": 4,
            "n_layers": 1,
        },
    ),
    "modernbert": ("ModernBertForMaskedLM", {**NEOX, "pad_token_id": 0}),
}
# Which of the three blocks of the view are query, key and value; CodeGen stores the value second.
ORDER = {"codegen": (0, 2, 1)}


def real_model(model: str, fields: dict) -> nn.Module:
    """A model on the CPU with large random weights and zero biases, so that every block matters."""
    torch.manual_seed(0)
    built = construct(model, fields).eval()
    with torch.no_grad():
        for name, param in built.named_parameters():
            if "bias" in name or "sinks" in name:
                param.zero_()
            elif param.ndim > 1:
                param.normal_(std=0.4)

    return built


def run(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(8)[None] * 7 % 96).logits


def run_without(model: nn.Module, name: str, view: str, part: int | None = None) -> torch.Tensor:
    """The output with one part of a parameter zeroed; the parameter is restored."""
    param = dict(model.named_parameters())[name]
    before = param.detach().clone()

    blocks = []
    for w in View.parse(view).windows(param.data):
        for cut in w.strided.unbind(1):
            blocks.append(cut)

    for i, block in enumerate(blocks):
        if part is None or i == part:
            block.zero_()

    output = run(model)
    param.data.copy_(before)

    return output


def only(table, role: str):
    rows = [row for row in table if row.role == role]
    assert len(rows) == 1, (role, rows)
    return rows[0]


@pytest.mark.parametrize("name", FUSED)
def test_fused_query_key_value(name: str):
    model = real_model(*FUSED[name])
    table = route(model)
    fused = only(table, "attention qkv")
    output = only(table, "attention o")
    query, key, value = (
        run_without(model, fused.name, fused.view, i) for i in ORDER.get(name, (0, 1, 2))
    )
    torch.testing.assert_close(query, key)
    torch.testing.assert_close(value, run_without(model, output.name, output.view))

    assert (query - run(model)).abs().max() > 1e-3
    assert (query - value).abs().max() > 1e-3


@pytest.mark.parametrize("name", FUSED)
def test_heads_refine_the_fused_parts(name: str):
    """Every per-head block lies inside exactly one of the query, key and value blocks."""
    with torch.device("meta"):
        model = construct(*FUSED[name])

    whole, heads = (only(route(model, per_head=x), "attention qkv") for x in (False, True))
    parts = torch.zeros(whole.shape)

    blocks = torch.zeros(heads.shape)
    for tensor, view in ((parts, whole.view), (blocks, heads.view)):
        cuts = [cut for w in View.parse(view).windows(tensor) for cut in w.strided.unbind(1)]
        for i, cut in enumerate(cuts):
            cut.fill_(i)

    for head in blocks.unique():
        assert parts[blocks == head].unique().numel() == 1

    assert blocks.unique().numel() > parts.unique().numel() == 3


@pytest.mark.parametrize(
    ("model", "fields", "fused", "down", "parts"),
    [
        ("Phi3ForCausalLM", {**GQA, "pad_token_id": 0}, "gate_up_proj", "down_proj", (0, 1)),
        ("MixtralForCausalLM", GQA, "gate_up_proj", "down_proj", (0, 1)),
        ("Qwen3MoeForCausalLM", MOE, "gate_up", "down_proj", (0, 1)),
        # gpt-oss computes (up + 1) * glu(gate): only a zero gate silences it.
        ("GptOssForCausalLM", {**GQA, "head_dim": 8}, "gate_up_proj", "down_proj", (0,)),
        ("ModernBertForMaskedLM", {**FOUR_HEADS, "pad_token_id": 0}, "mlp.Wi", "mlp.Wo", (0, 1)),
    ],
)
def test_fused_gate_and_up(model, fields, fused, down, parts):
    """A zero gate or a zero up silences the block, like a zero down projection."""
    built = real_model(model, {**fields, **ONE})
    table = route(built)
    pair = next(row for row in table if fused in row.name and "bias" not in row.name)
    last = next(row for row in table if down in row.name and "bias" not in row.name)

    silent = run_without(built, last.name, last.view)
    for part in parts:
        torch.testing.assert_close(run_without(built, pair.name, pair.view, part), silent)

    assert (silent - run(built)).abs().max() > 1e-3


def test_gated_query_of_qwen3_next():
    """The first part is the query: zeroing it makes attention uniform, like zeroing the key."""
    fields = {**MOE, **ONE, "layer_types": ["full_attention"]}
    model = real_model("Qwen3NextForCausalLM", fields)
    table = route(model)
    query = only(table, "attention q")
    key = only(table, "attention k")

    assert query.view == "rows:4%2"
    without_query = run_without(model, query.name, query.view, 0)
    torch.testing.assert_close(without_query, run_without(model, key.name, key.view))

    assert (without_query - run_without(model, query.name, query.view, 1)).abs().max() > 1e-3


def test_latent_attention_of_deepseek():
    """The second part of kv_b is the value; the latent part of kv_a feeds both key and value."""
    name, fields = MODELS["deepseek_v3"]
    model = real_model(name, {**fields, **ONE})
    table = route(model)
    silent = run_without(model, only(table, "attention o").name, "whole")
    rows = [row for row in table if row.role == "attention kv"]
    expand, squeeze = sorted(rows, key=lambda row: row.name, reverse=True)

    assert (expand.view, squeeze.view) == ("rows:4%8+6", "rows:12+4")
    torch.testing.assert_close(run_without(model, expand.name, expand.view, 1), silent)
    assert (run_without(model, expand.name, expand.view, 0) - silent).abs().max() > 1e-3
