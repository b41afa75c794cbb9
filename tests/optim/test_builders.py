"""Builders: a model in, one optimizer out, every trainable parameter in exactly one group."""

import pytest
import torch
from torch import nn

import mesotron
from mesotron.optim.optimizers import BUILDERS, SGD_LR


class Net(nn.Module):
    """An embedding, two blocks with norms, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.vision = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))
        self.action = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.action(self.vision(self.embedding(tokens))))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    tokens = torch.randint(0, 11, (32,), generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 11)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def rule_of(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> dict:
    return next(g for g in optimizer.param_groups if any(q is p for q in g["params"]))


@pytest.mark.parametrize("name", BUILDERS)
def test_every_parameter_is_in_one_group_and_trains(name):
    model = net()
    optimizer = BUILDERS[name](model, lr=0.02)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    losses = train(model, optimizer, 30)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("name", BUILDERS)
def test_builders_are_public(name):
    assert getattr(mesotron, name) is BUILDERS[name]


@pytest.mark.parametrize(
    ("name", "matrix", "rest"),
    [
        ("muon", "muon", "adamw"),
        ("pion", "pion", "adamw"),
        ("muon_sgd", "muon", "sgd"),
        ("adamw", "adamw", "adamw"),
    ],
)
def test_rules_by_role(name, matrix, rest):
    model = net()
    optimizer = BUILDERS[name](model)
    assert rule_of(optimizer, model.vision[0].weight)["rule"] == matrix
    for p in (model.embedding.weight, model.head.weight, model.vision[1].weight):
        assert rule_of(optimizer, p)["rule"] == rest


def test_vectors_have_no_weight_decay_and_matrices_have():
    model = net()
    optimizer = mesotron.muon(model, weight_decay=0.1)
    for p in model.parameters():
        assert rule_of(optimizer, p)["weight_decay"] == (0.1 if p.ndim > 1 else 0.0)


def test_muon_sgd_keeps_one_number_per_weight():
    model = net()
    optimizer = mesotron.muon_sgd(model)
    train(model, optimizer, 1)
    assert {key for state in optimizer.state.values() for key in state} == {"momentum_buffer"}


def test_rates_go_to_the_rule_in_whose_unit_they_are():
    model = net()
    optimizer = mesotron.muon(model, lr=0.01, aux_lr=0.002)
    assert rule_of(optimizer, model.vision[0].weight)["lr"] == 0.01
    assert rule_of(optimizer, model.head.weight)["lr"] == 0.002
    hybrid = mesotron.muon_sgd(model, lr=0.01)
    assert rule_of(hybrid, model.head.weight)["lr"] == SGD_LR
    mixed = mesotron.muon_sgd(model, lr=0.01, overrides={"head.weight": "adamw"})
    assert rule_of(mixed, model.head.weight)["lr"] == 0.01, "0.1 is SGD's unit, not AdamW's"


def test_modalities_mix_filters_in_one_optimizer():
    model = net()
    optimizer = mesotron.pion(
        model, lr=0.01, aux_lr=0.001, cutoff=0.3, modalities={"vision": "muon", "action": "pion"}
    )
    vision = rule_of(optimizer, model.vision[0].weight)
    action = rule_of(optimizer, model.action[0].weight)
    assert (vision["rule"], vision["filter"], vision["cutoff"]) == ("muon", "muon", None)
    assert (action["rule"], action["filter"], action["cutoff"]) == ("pion", "pion", 0.3)
    assert vision["lr"] == action["lr"] == 0.01
    train(model, optimizer, 2)
    stats = optimizer.stats()
    assert stats[f"{vision['name']}/passed_rank"] > stats[f"{action['name']}/passed_rank"]


def test_adamw_is_the_same_as_torch_with_the_same_groups():
    ours, theirs = net(), net()
    optimizer = mesotron.adamw(ours, lr=0.01, weight_decay=0.1)
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.01, fused=True)
    assert train(ours, optimizer, 10) == train(theirs, reference, 10)


def test_names_are_kept_for_checkpoints_and_logs():
    model = net()
    optimizer = mesotron.muon(model)
    names = {n: p for n, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            assert names[name] is p


def test_overrides_reach_the_groups():
    model = net()
    optimizer = mesotron.muon(
        model, lr=0.01, overrides={"action.0.weight": {"rule": "adamw", "lr_scale": 0.5}}
    )
    group = rule_of(optimizer, model.action[0].weight)
    assert (group["rule"], group["lr"]) == ("adamw", 0.005)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: mesotron.muon(m, overrides={"nothing.*": "adamw"}), "nothing"),
        (lambda m: mesotron.pion(m, cutoff=0.3, promote=1), "cutoff=0.3"),
        (lambda m: mesotron.muon(m, lr=-0.1), "lr=-0.1"),
    ],
)
def test_refusals_name_the_value(call, words):
    with pytest.raises(ValueError, match=words):
        call(net())


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="promot"):
        mesotron.pion(net(), promot=1)


def test_an_optimizer_built_before_freezing_says_so():
    model = net()
    optimizer = mesotron.muon(model)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="LoRA"):
        optimizer.step()
