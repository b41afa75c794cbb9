"""The optimizer of a run: what its settings mean, its rate, and what is written of it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mesotron.config import OptimConfig
from mesotron.optim import Muon
from mesotron.rlvr import optimizer as module
from mesotron.rlvr.optimizer import (
    FINE_TUNING_SGD_LR,
    OptimizerLog,
    build_optimizer,
    builder_options,
    check_all_train,
    devices_of_kernels,
    matrix_rate,
    resolve_optim,
    unwrap_optimizer,
)
from mesotron.runs import RunFolder


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def test_settings_reach_the_groups():
    config = OptimConfig(name="pion", lr=0.01, aux_lr=0.002, promote=3, momentum=0.8)
    groups = {group["rule"]: group for group in build_optimizer(net(), config).param_groups}
    assert (groups["pion"]["lr"], groups["adamw"]["lr"]) == (0.01, 0.002)
    assert (groups["pion"]["promote"], groups["pion"]["momentum"]) == (3, 0.8)


def test_what_is_left_open_keeps_the_builders_defaults():
    options = builder_options(OptimConfig(name="muon"))
    assert not {"promote", "cutoff", "filter", "rank"} & options.keys()
    assert options["fused"] is None
    assert builder_options(OptimConfig(name="muon", fused=False))["fused"] is False
    assert "momentum" not in builder_options(OptimConfig(name="adamw"))

    ranked = builder_options(OptimConfig(name="muon", rank=4))
    assert (ranked["filter"], ranked["rank"]) == ("low_rank", 4)
    assert builder_options(OptimConfig(name="pion", cutoff=0.2))["cutoff"] == 0.2


@pytest.mark.parametrize(("given", "expected"), [(None, FINE_TUNING_SGD_LR), (0.03, 0.03)])
def test_plain_gradient_descent_beside_muon_has_a_rate_for_fine_tuning(given, expected):
    assert builder_options(OptimConfig(name="muon_sgd", aux_lr=given))["aux_lr"] == expected


def test_an_unknown_name_is_refused():
    config = OptimConfig()
    object.__setattr__(config, "name", "mion")
    with pytest.raises(ValueError, match="mion"):
        build_optimizer(net(), config)


def test_weights_that_would_not_train_are_named():
    model = net()
    optimizer = torch.optim.SGD(list(model.parameters())[1:], 0.1)
    with pytest.raises(ValueError, match=r"0\.weight.*1 such"):
        check_all_train(model, optimizer)

    next(model.parameters()).requires_grad_(False)
    check_all_train(model, optimizer)


def test_an_optimizer_is_given_once():
    args = SimpleNamespace(learning_rate=0.5, weight_decay=0.25)
    named = resolve_optim(args, "muon", (None, None))
    assert named is not None
    assert (named.name, named.lr, named.weight_decay) == ("muon", 0.5, 0.25)

    config = OptimConfig(lr=0.1)
    assert resolve_optim(args, config, None) is config
    assert resolve_optim(args, None, ("theirs", None)) is None
    with pytest.raises(ValueError, match="optim="):
        resolve_optim(args, "muon", ("theirs", None))


def test_the_rate_that_is_logged_is_that_of_the_matrices():
    routed = build_optimizer(net(), OptimConfig(name="muon", lr=0.02, aux_lr=0.001))
    wrapped = SimpleNamespace(optimizer=routed)  # as Accelerate does
    assert unwrap_optimizer(wrapped) is unwrap_optimizer(routed) is routed
    assert matrix_rate(wrapped, 7.0) == 0.02

    without = build_optimizer(net(), OptimConfig(name="adamw", lr=0.02))
    assert matrix_rate(without, 7.0) == 7.0
    plain = torch.optim.SGD(net().parameters(), 0.1)
    assert unwrap_optimizer(plain) is None
    assert matrix_rate(plain, 7.0) == 7.0


def test_kernels_are_for_matrices_alone():
    weight = nn.Parameter(torch.ones(2, 2))
    bias = nn.Parameter(torch.ones(2, device="meta"))
    groups = [{"params": [weight], "rule": "muon"}, {"params": [bias], "rule": "adamw"}]
    assert devices_of_kernels(Muon(groups)) == {torch.device("cpu")}

    groups = [{"params": [nn.Parameter(torch.ones(2, 2))], "rule": "muon"}]
    assert devices_of_kernels(Muon(groups, fused=False)) == set()


@pytest.mark.parametrize(
    ("most", "expected"), [(9, [1, 3, 5, 7, 9]), (2, [1, 2]), (1, [1]), (5, [1, 2, 3, 4, 5])]
)
def test_spectra_are_kept_of_five_steps_and_the_table_once(tmp_path, monkeypatch, most, expected):
    run = RunFolder.create(tmp_path / "run", {}, {})
    monkeypatch.setattr(module, "measure_spectrum", lambda optimizer, block: {"values": [1.0]})
    monkeypatch.setattr(module, "choose_blocks", lambda optimizer: ["one block"])
    log = OptimizerLog(run)
    optimizer: Any = build_optimizer(net(), OptimConfig(name="muon"))
    state = SimpleNamespace(global_step=0, max_steps=most, is_world_process_zero=True)
    log.on_train_begin(None, state, None, optimizer=optimizer)
    for step in range(most):
        state.global_step = step
        log.on_optimizer_step(None, state, None, optimizer=optimizer)

    assert [row["step"] for row in run.rows("spectra")] == expected
    names = [row["name"] for row in (run.load("routing") or {})["rows"]]
    assert any("0.weight" in name for name in names)


def test_other_optimizers_and_processes_write_nothing(tmp_path):
    run = RunFolder.create(tmp_path / "run", {}, {})
    log = OptimizerLog(run)
    state = SimpleNamespace(global_step=0, max_steps=3, is_world_process_zero=True)
    plain = torch.optim.SGD(net().parameters(), 0.1)
    log.on_train_begin(None, state, None, optimizer=plain)
    log.on_optimizer_step(None, state, None, optimizer=plain)

    state.is_world_process_zero = False
    routed = build_optimizer(net(), OptimConfig(name="muon"))
    log.on_train_begin(None, state, None, optimizer=routed)
    log.on_optimizer_step(None, state, None, optimizer=routed)
    assert run.load("routing") is None
    assert run.rows("spectra") == []
