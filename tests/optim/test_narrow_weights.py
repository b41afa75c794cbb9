"""AdamW and SGD on bfloat16 and float16 weights: the float32 step, rounded back without a bias."""

import copy

import pytest
import torch
from torch import nn

from mesotron.optim import auxiliary
from mesotron.optim.device import round_stochastically, rounding_seed, step_seed
from mesotron.optim.optimizers import Muon
from mesotron.optim.stats import StepStats

RULES = ["adamw", "sgd"]


def make(rule, weight, lr=1e-4):
    p = nn.Parameter(weight)
    return p, Muon([{"params": [p], "rule": rule}], lr=lr, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("rule", RULES)
def test_on_average_it_is_the_step_of_float32(rule):
    """20,000 equal weights in bfloat16 against one in float32, over 20 steps."""
    start = torch.full((20_000,), 0.3, dtype=torch.bfloat16)
    narrow, wide = make(rule, start.clone()), make(rule, start[:1].float())
    for step in range(20):
        for p, optimizer in (narrow, wide):
            p.grad = torch.full_like(p, 1.0 + step / 16)
            optimizer.step()
    (p, _), (q, _) = narrow, wide
    travelled = (q - start[0].float()).item()
    assert abs(travelled) < 0.03  # few grid cells of bfloat16, which are 0.002 wide there
    moved = p.detach().double() - start.double()
    assert moved.mean().item() == pytest.approx(travelled, rel=0.02)
    assert len(p.unique()) > 1
    state = {k: v for k, v in narrow[1].state[p].items() if k != "step"}
    for key, value in state.items():
        torch.testing.assert_close(value[:1], wide[1].state[q][key])


def test_float16_keeps_its_state_in_float32_and_rounds_to_the_nearest():
    narrow, wide = make("adamw", torch.ones(4).half(), 1e-2), make("adamw", torch.ones(4), 1e-2)
    for p, optimizer in (narrow, wide):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert torch.equal(narrow[0], wide[0].half())


@pytest.mark.parametrize("rule", RULES)
def test_a_resumed_run_rounds_as_one_left_alone(rule):
    p, optimizer = make(rule, torch.rand(64, dtype=torch.bfloat16))
    q, other = make(rule, torch.zeros(64, dtype=torch.bfloat16))

    def train(weight, chosen):
        weight.grad = torch.sin(torch.arange(64.0)).bfloat16()
        chosen.step()

    train(p, optimizer)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    q.data.copy_(p.data)
    torch.rand(3)  # the global generator decides nothing
    for _ in range(3):
        train(p, optimizer)
        train(q, other)
    assert torch.equal(p, q)


@pytest.mark.parametrize("rule", RULES)
def test_a_skipped_step_leaves_bfloat16_as_it_is(rule):
    p, optimizer = make(rule, torch.rand(64, dtype=torch.bfloat16))
    state, group = {}, optimizer.param_groups[0]
    before, bad = p.detach().clone(), torch.full((64,), torch.nan, dtype=torch.bfloat16)
    stats = optimizer._stats
    auxiliary.STEPS[rule]([p.data], [bad], [state], group, torch.tensor(1.0), stats, [0])
    assert torch.equal(p, before)
    assert all(not value.any() for value in state.values())


def test_batches_do_not_change_a_bit(monkeypatch):
    ends = []
    for limit in (1, 10**9):
        monkeypatch.setattr(auxiliary, "_BATCH_ELEMENTS", limit)
        torch.manual_seed(0)
        params = [nn.Parameter(torch.rand(n).bfloat16()) for n in (5, 7, 3)]
        params.append(nn.Parameter(torch.rand(4)))  # a float32 one among them
        for p in params:
            p.grad = torch.ones_like(p)
        Muon([{"params": params, "rule": "adamw"}], lr=1e-3).step()
        ends.append(torch.cat([p.detach().float() for p in params]))
    assert torch.equal(*ends)
    assert not torch.equal(ends[0][5:8], ends[0][:3])


def test_hashed_bits_are_even_and_independent():
    """The rounding up of 0.3 of a grid cell happens 0.3 of the time, in every step and place."""
    x = torch.full((4096,), 1 + 0.3 / 128)
    rounds = []
    for step in range(64):
        out = torch.empty(4096, dtype=torch.bfloat16)
        seed = step_seed(torch.tensor(float(step)), rounding_seed(0, 3, 0))
        round_stochastically(x, out, seed)
        rounds.append(out > 1)
    up = torch.stack(rounds).double()
    assert up.mean().item() == pytest.approx(0.3, abs=0.004)
    # Of 64 or 4096 draws the mean spreads by 0.057 or 0.0072.
    assert up.mean(0).std().item() == pytest.approx(0.057, rel=0.1)
    assert up.mean(1).std().item() == pytest.approx(0.0072, rel=0.4)
    centred = up - 0.3
    assert (centred[1:] * centred[:-1]).mean().abs() < 0.002  # from step to step
    assert (centred[:, 1:] * centred[:, :-1]).mean().abs() < 0.002  # from place to place


@pytest.mark.parametrize("rule", RULES)
def test_a_flag_of_bad_gradients_is_obeyed_where_no_kernel_is_fused(rule):
    """Weights with gaps in memory have none; PyTorch's other kernels refuse the flag."""
    options = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    group = {**options, "momentum": 0.9, "nesterov": True, "name": "rest"}
    for bad in (0.0, 1.0):
        p = torch.ones(4, 6)[:, ::2]
        flag = torch.tensor(bad)
        auxiliary.STEPS[rule]([p], [torch.ones(4, 3)], [{}], group, flag, StepStats(), [0])
        assert torch.equal(p, torch.ones(4, 3)) == bool(bad)
