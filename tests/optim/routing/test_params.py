"""The model behind what trainers pass: generators, names, and bare tensors, which are refused."""

import pytest
import torch
from optim.routing.test_golden import EXPERTS, GQA, MOE, construct
from torch import nn

import mesotron
from mesotron.optim.routing import route
from mesotron.optim.routing.params import model_behind


def rules(table):
    return {row.name: (row.rule, row.view) for row in table}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "passed",
    [
        lambda m: m.parameters(),
        lambda m: dict(m.named_parameters()),
        lambda m: list(m.named_parameters()),
    ],
)
def test_parameters_and_names_are_routed_like_the_model(passed, tied):
    model = construct("Qwen2ForCausalLM", {**GQA, "tie_word_embeddings": tied})
    model.model.layers[0].mlp.requires_grad_(False)
    optimizer = mesotron.pion(passed(model), lr=1e-3)

    assert rules(optimizer.table) == rules(route(model, matrix="pion"))
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == trained


def test_names_alone_show_embeddings_heads_routers_and_convolutions():
    shapes = {
        "wte.weight": (9, 8),
        "h.0.conv.weight": (8, 8, 3),
        "h.0.fc.weight": (8, 8),
        "h.0.mlp.router.gate.weight": (4, 8),
        "h.0.mlp.experts.0.w1.weight": (8, 8),
        "h.0.mlp.experts.1.w1.weight": (8, 8),
        "h.0.mlp.gate.weight": (2, 8),
        "h.0.norm.weight": (8,),
        "vision.patch.weight": (8, 3, 4, 4),
        "score.weight": (2, 8),
        "_orig_mod.lm_head.weight": (9, 8),
    }

    table = mesotron.muon({n: nn.Parameter(torch.randn(s)) for n, s in shapes.items()}).table
    filtered = {row.name for row in table if row.rule == "muon"}
    experts = {f"h.0.mlp.experts.{k}.w1.weight" for k in (0, 1)}

    assert filtered == {"h.0.conv.weight", "h.0.fc.weight"} | experts


def test_stacked_experts_need_their_layout_where_only_names_are_passed():
    model = construct("Qwen3MoeForCausalLM", {**MOE, **EXPERTS})
    with pytest.raises(ValueError, match="gate_up_proj"):
        mesotron.muon(list(model.named_parameters()))

    views = {"*.gate_up_proj": {"view": "stack/rows:2"}, "*.down_proj": {"view": "stack"}}
    optimizer = mesotron.muon(list(model.named_parameters()), overrides=views)
    assert rules(optimizer.table) == rules(route(model))


def test_bare_tensors_are_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    for params in (list(model.parameters()), [{"params": list(model.parameters())}], []):
        with pytest.raises(ValueError, match="named_parameters"):
            mesotron.muon(params)


def test_a_part_of_a_model_is_not_taken_for_the_whole():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    assert model_behind(model.named_parameters()) is model

    started = model.named_parameters()
    next(started)
    assert [name for name, _ in model_behind(started).named_parameters()] == [
        "0.bias",
        "1.weight",
        "1.bias",
    ]
