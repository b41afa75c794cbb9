"""One file to extend: what follows from the registration of a rule, and what a file must do."""

from typing import get_args

import pytest
import torch
from torch import nn

import mesotron
from mesotron.config import OptimConfig, OptimizerName, RouteConfig
from mesotron.config.rules import AUXILIARY_RULES, SPECTRAL_RULES, all_rules, optimizer_names
from mesotron.optim import BUILDERS, RoutedOptimizer, route
from mesotron.optim.build import builder
from mesotron.optim.registry import rule


@pytest.fixture
def halved():
    """A rule of a user's file: Muon with steps half as long."""

    def halve(X, lines, beta2):
        for each in lines:
            each.state.add_(1.0)
        return X / 2

    @rule("halved", about="as `muon`, half as far", finish=halve, line_state="num_steps")
    class Halved(RoutedOptimizer):
        pass

    yield Halved
    SPECTRAL_RULES._entries.pop("halved")


def test_the_names_are_those_of_the_files():
    assert {"muon", "pion", "normuon"} <= set(SPECTRAL_RULES)
    assert {"adamw", "sgd"} <= set(AUXILIARY_RULES)

    for name in SPECTRAL_RULES:
        assert SPECTRAL_RULES[name].name == SPECTRAL_RULES[name].optimizer.rule == name

    for name in AUXILIARY_RULES:
        assert AUXILIARY_RULES[name].name == name


def test_choices_and_builders_follow_from_the_files():
    choices, _ = get_args(OptimizerName)  # and any text: a rule may be registered later
    assert set(get_args(choices)) == set(BUILDERS) == set(optimizer_names())
    for name in optimizer_names():
        assert OptimConfig(name=name).name == name
        assert RouteConfig(model="tiny", optim=name).optim == name
        assert name in dir(mesotron) or name in SPECTRAL_RULES


def test_a_new_rule_steps_matrices_beside_adamw(halved):
    ends = []
    for make in (builder(halved), mesotron.muon):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 2))
        start = model[1].weight.detach().clone()
        optimizer = make(model, lr=0.1, weight_decay=0.0)
        for p in model.parameters():
            p.grad = torch.linspace(-1, 1, p.numel()).view_as(p).sin()

        optimizer.step()
        ends.append(model[1].weight.detach() - start)

    torch.testing.assert_close(ends[0], ends[1] / 2)


def test_a_new_rule_is_routed_keeps_its_state_and_refuses_products(halved):
    assert "halved" in all_rules()
    layer = nn.Linear(4, 6, bias=False)
    wrapped = nn.Sequential(layer, nn.Linear(6, 2, bias=False))
    assert route(wrapped, matrix="halved").row("0.weight").rule == "halved"

    optimizer = halved(layer.parameters())
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    state = optimizer.state[layer.weight]
    assert state["num_steps"].tolist() == [1.0] * 6

    A = nn.Parameter(torch.ones(2, 4))
    B = nn.Parameter(torch.zeros(6, 2))
    with pytest.raises(ValueError, match="halved"):
        halved([{"params": [A, B], "pairs": [1.0], "rule": "halved"}])


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match="muon"):

        @rule("muon", about="another Muon")
        class Other(RoutedOptimizer):
            pass


@pytest.mark.parametrize("name", ["muon", "pion"])
def test_rules_for_matrices_step_shards_and_adapters(name):
    entry = SPECTRAL_RULES[name]
    assert entry.sharded
    assert entry.products
