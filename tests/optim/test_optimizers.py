"""Builders put every parameter into one group; classes reject bad settings and keep checkpoints."""

import copy

import pytest
import torch
from optim.test_step import param
from torch import nn

import mesotron
from mesotron.optim import BUILDERS, AdamW, Muon, MuonSGD, NorMuon, Pion
from mesotron.optim.auxiliary.sgd import SGD_LR
from mesotron.optim.step import group_filter
from mesotron.spectral import make_filter


def net() -> nn.ModuleDict:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))

    parts = {
        "embedding": nn.Embedding(11, 8),
        "vision": block(),
        "action": block(),
    }
    return nn.ModuleDict(parts | {"head": nn.Linear(8, 11)})


def step(optimizer: torch.optim.Optimizer) -> None:
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    optimizer.step()


def group_of(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> dict:
    return next(g for g in optimizer.param_groups if any(q is p for q in g["params"]))


ADAM = {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    ("name", "cls", "matrix", "rest", "state"),
    [
        ("muon", Muon, "muon", "adamw", {"momentum_buffer", *ADAM}),
        ("pion", Pion, "pion", "adamw", {"momentum_buffer", *ADAM}),
        ("normuon", NorMuon, "normuon", "adamw", {"momentum_buffer", "line_moment", *ADAM}),
        ("muon_sgd", MuonSGD, "muon", "sgd", {"momentum_buffer"}),
        ("adamw", AdamW, "adamw", "adamw", ADAM),
    ],
)
def test_builders_give_every_parameter_its_rule(name, cls, matrix, rest, state):
    model = net()
    optimizer = BUILDERS[name](model, lr=0.02, weight_decay=0.1)
    assert type(optimizer) is cls

    groups = optimizer.param_groups
    held = {n: p for g in groups for n, p in zip(g["param_names"], g["params"], strict=True)}
    assert sum(len(g["params"]) for g in groups) == len(held) == len(list(model.parameters()))
    assert all(held[n] is p for n, p in model.named_parameters())
    assert group_of(optimizer, model["vision"][0].weight)["rule"] == matrix

    for p in (model["embedding"].weight, model["head"].weight, model["vision"][1].weight):
        assert group_of(optimizer, p)["rule"] == rest

    for p in model.parameters():
        assert group_of(optimizer, p)["weight_decay"] == (0.1 if p.ndim > 1 else 0.0)

    step(optimizer)
    assert {key for kept in optimizer.state.values() for key in kept} == state


def test_learning_rates_go_to_the_rule_of_their_unit():
    model = net()
    override = {"action.0.weight": {"rule": "adamw", "lr_scale": 0.5}}
    optimizer = mesotron.muon(
        model, lr=0.01, aux_lr=0.002, overrides=override, modalities={"vision": "pion"}
    )
    vision = group_of(optimizer, model["vision"][0].weight)

    assert (vision["rule"], vision["filter"], vision["lr"]) == ("pion", "pion", 0.01)
    assert group_of(optimizer, model["head"].weight)["lr"] == 0.002

    overridden = group_of(optimizer, model["action"][0].weight)
    assert (overridden["rule"], overridden["lr"]) == ("adamw", 0.001)

    hybrid = mesotron.muon_sgd(model, lr=0.01)
    assert group_of(hybrid, model["head"].weight)["lr"] == SGD_LR

    mixed = mesotron.muon_sgd(model, lr=0.01, overrides={"head.weight": "adamw"})
    assert group_of(mixed, model["head"].weight)["lr"] == 0.01, "0.1 is SGD's unit, not AdamW's"


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda: mesotron.pion(net(), cutoff=0.3, promote=1), "cutoff=0.3"),
        (lambda: mesotron.adamw(net(), cutoff=0.3), "cutoff=0.3"),
        (lambda: mesotron.adamw(net(), leash=0.1), "leash"),
        (lambda: mesotron.muon(net(), leash=-1.0), "leash"),
        (lambda: mesotron.muon(net(), leash=0.1, filter="polar_express", steps=3), "polar_expr"),
        (lambda: mesotron.muon(net(), lr="x"), "lr='x'"),
        (lambda: Muon([]), "empty"),
        (lambda: Muon(["weight"]), "'weight'"),
        (lambda: Muon([param(4, 4)], lr=float("nan")), "lr=nan"),
        (lambda: Muon([param(4, 4)], lr=torch.tensor([0.1])), "lr"),
        (lambda: Muon([param(4, 4)], momentum=1.0), "momentum=1.0"),
        (lambda: Muon([param(4, 4)], weight_decay=-0.1), "weight_decay=-0.1"),
        (lambda: Muon([param(4, 4)], betas=(0.9, 1.0)), "betas"),
        (lambda: Muon([param(4, 4)], scale=-2.0), "scale=-2.0"),
        (lambda: AdamW([param(4, 4)], scale="rsm"), "rsm"),
        (lambda: Muon([param(4, 4)], filter="muno"), "muno"),
        (lambda: Muon([param(4, 4)], dtype="float16"), "float16"),
        (lambda: Muon([param(4, 4)], aux="adam"), "aux='adam'"),
        (lambda: Muon([param(4, 4)], maximize=True), "maximize"),
        (lambda: Muon([param(4, 4, dtype=torch.complex64)]), "complex64"),
        (lambda: Muon([{"params": [param(4, 4)], "rule": "sdg"}]), "sdg"),
        (lambda: Muon([{"params": [param(4)], "rule": "muon"}]), "rule='adamw'"),
        (lambda: Muon([{"params": [param(4, 4)], "view": "rows:3"}]), "rows:3"),
        (lambda: Pion([{"params": [param(4, 4)], "filter": "cubic"}]), "cubic"),
    ],
)
def test_bad_settings_are_rejected_by_value(make, value):
    with pytest.raises(ValueError, match=value):
        make()


def test_an_unknown_option_is_rejected_and_a_bad_group_is_not_kept():
    with pytest.raises(TypeError, match="promot"):
        mesotron.pion(net(), promot=1)

    groups = [{"params": [], "rule": "muon"}, {"params": [param(4, 4)]}]
    optimizer = Muon(groups, foreach=True, capturable=True)  # as torch's optimizers take them
    with pytest.raises(ValueError, match="view='stack'"):
        optimizer.add_param_group({"params": [param(3, 4, 4)]})

    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 1]


def test_sparse_gradients_are_rejected():
    table = nn.Embedding(5, 4, sparse=True)
    optimizer = Muon(table.parameters())
    table(torch.tensor([1])).sum().backward()

    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step()


@pytest.mark.parametrize(
    ("cls", "options", "group", "expected"),
    [
        (Pion, {"cutoff": "noise", "steps": 2}, {"rule": "muon"}, {"name": "muon"}),
        (Muon, {"rank": 2}, {"rule": "pion", "promote": 1}, {"name": "pion", "promote": 1}),
        (AdamW, {}, {"rule": "pion", "promote": 1}, {"name": "pion", "promote": 1}),
        (AdamW, {}, {"rule": "muon"}, {"name": "muon"}),
    ],
)
def test_a_group_of_another_rule_has_its_own_filter(cls, options, group, expected):
    options |= {"filter": "low_rank"} if "rank" in options else {}
    optimizer = cls([{"params": [param(6, 6)], **group}], **options)
    assert group_filter(optimizer.param_groups[0]) == make_filter(**expected)


def test_a_checkpoint_holds_every_setting_but_options_newer_than_it():
    optimizer = Pion([param(6, 10), param(6)], lr=1e-3, cutoff=0.3)
    optimizer.step()

    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        del group["batched"]

    resumed = Pion([param(6, 10), param(6)], lr=0.5, promote=1)
    resumed.load_state_dict(saved)

    for group, expected in zip(resumed.param_groups, optimizer.param_groups, strict=True):
        assert {**group, "params": 0} == {**expected, "params": 0}

    resumed.step()


def test_checkpoints_of_other_rules_are_rejected_and_of_other_classes_loaded():
    p = param(6, 10)
    muon = Muon([p])
    adamw = AdamW([p])

    adam = torch.optim.AdamW([p])
    for optimizer in (muon, adamw, adam):
        optimizer.step()

    with pytest.raises(ValueError, match="import_state"):
        Pion([p]).load_state_dict(muon.state_dict())

    with pytest.raises(ValueError, match="import_state"):
        muon.load_state_dict(adam.state_dict())

    # What `mesotron.adamw` saved while its class was Muon.
    older = Muon([{"params": [p], "rule": "adamw"}])
    older.step()
    adamw.load_state_dict(older.state_dict())
    MuonSGD([p]).load_state_dict(muon.state_dict())
