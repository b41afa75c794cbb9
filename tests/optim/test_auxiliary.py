"""AdamW and SGD against `torch.optim`, and unbiased rounding of narrow weights."""

import pytest
import torch
from torch import nn

from mesotron.optim import AdamW, Muon, elementwise
from mesotron.optim.device import round_stochastically, rounding_seed, step_seed
from mesotron.optim.elementwise import step_auxiliary
from mesotron.optim.registry import AuxiliaryBatch
from mesotron.optim.stats import StepStats

rules = pytest.mark.parametrize("rule", ["adamw", "sgd"])
SCHEDULES = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=20),
    "warmup": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: min(1, k / 5)),
    "one_cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=21),
}
ADAMW = {
    "lr": 0.02,
    "betas": (0.8, 0.97),
    "eps": 1e-6,
    "weight_decay": 0.3,
}
SGD = {
    "lr": 0.02,
    "momentum": 0.9,
    "nesterov": False,
    "weight_decay": 0.0,
}


@pytest.mark.parametrize(
    ("rule", "options", "schedule"),
    [
        *(("adamw", ADAMW, schedule) for schedule in SCHEDULES),
        ("sgd", SGD, "cosine"),
        ("sgd", SGD | {"nesterov": True}, "warmup"),
    ],
)
def test_steps_equal_torch(rule, options, schedule):
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(s, generator=generator) for s in ((5,), (4, 3), (), (2, 3, 2))]
    a, b = ([nn.Parameter(w.clone()) for w in start] for _ in range(2))
    cls, reference = {"adamw": (AdamW, torch.optim.AdamW), "sgd": (Muon, torch.optim.SGD)}[rule]
    optimizers = cls([{"params": a, "rule": rule}], **options), reference(b, fused=True, **options)

    schedulers = [SCHEDULES[schedule](optimizer) for optimizer in optimizers]
    for _ in range(20):
        for p, q in zip(a, b, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()

        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()

    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", ["dense", "strided", "bfloat16"])
@rules
def test_a_flag_on_the_device_skips_the_step(rule, kind):
    # As on a GPU, where the host does not know that the gradient is bad. PyTorch's non-fused
    # kernels, used for strided weights, do not take the flag.
    group = Muon([nn.Parameter(torch.ones(3))], lr=0.1).param_groups[0]
    for bad in (0.0, 1.0):
        p = torch.ones(3, 2)[:, 0] if kind == "strided" else torch.ones(3)
        p = p.bfloat16() if kind == "bfloat16" else p
        grad = torch.tensor([1.0, float("nan") if bad else 1.0, 1.0]).to(p.dtype)
        state = {}
        stats = StepStats()

        batch = AuxiliaryBatch(
            params=[p],
            grads=[grad],
            states=[state],
            group={**group, "rule": rule},
            found_inf=torch.tensor(bad),
            streams=[0],
        )

        step_auxiliary(batch, stats)
        assert torch.equal(p, torch.ones(3).to(p.dtype)) == bool(bad)
        assert all(not value.any() for value in state.values()) == bool(bad)
        assert all(value == 0 for value in stats.read().values()) == bool(bad)


def make(rule, weight, lr=1e-4):
    p = nn.Parameter(weight)
    return p, Muon(
        [{"params": [p], "rule": rule}],
        lr=lr,
        momentum=0.9,
        weight_decay=0.1,
    )


@pytest.mark.parametrize(("rule", "lr"), [("adamw", 1e-4), ("sgd", 1e-4), ("muon", 0.03)])
def test_bfloat16_steps_average_to_the_float32_step(rule, lr):
    start = torch.full((100, 200), 0.3, dtype=torch.bfloat16)
    narrow = make(rule, start.clone(), lr)

    wide = make(rule, start.float(), lr)
    for step in range(20):
        for p, optimizer in (narrow, wide):
            p.grad = torch.full_like(p, 1.0 + step / 16)
            optimizer.step()

    (p, _), (q, _) = narrow, wide
    moved, exact = (x.detach().double() - start.double() for x in (p, q))
    assert exact.abs().max() < 0.03  # few grid cells of bfloat16, which are 0.002 wide there
    assert moved.mean().item() == pytest.approx(exact.mean().item(), rel=0.02)
    assert len(p.unique()) > 1

    for key in narrow[1].state[p].keys() - {"step"}:
        torch.testing.assert_close(narrow[1].state[p][key], wide[1].state[q][key])


def test_float16_rounds_to_nearest():
    (p, narrow), (q, wide) = (make("adamw", w, 1e-2) for w in (torch.ones(4).half(), torch.ones(4)))
    p.grad = torch.ones_like(p)
    q.grad = torch.ones_like(q)
    narrow.step()
    wide.step()

    assert torch.equal(p, q.half())


def test_batching_of_narrow_weights_does_not_change_a_bit(monkeypatch):
    ends = []
    for limit in (1, 10**9):
        monkeypatch.setattr(elementwise, "_BATCH_ELEMENTS", limit)
        torch.manual_seed(0)
        params = [nn.Parameter(torch.rand(n).bfloat16()) for n in (5, 7, 3)]
        params.append(nn.Parameter(torch.rand(4)))  # a float32 one among them

        for p in params:
            p.grad = torch.ones_like(p)

        Muon([{"params": params, "rule": "adamw"}], lr=1e-3).step()
        ends.append(torch.cat([p.detach().float() for p in params]))

    assert torch.equal(*ends)
    assert not torch.equal(ends[0][5:8], ends[0][:3])


def test_rounding_is_exact_on_the_grid_even_and_independent():
    exact = torch.tensor([0.0, -2.5, float("inf"), -float("inf"), float("nan")])
    same = torch.empty(5, dtype=torch.bfloat16)
    round_stochastically(exact, same, seed=0)
    torch.testing.assert_close(same.float(), exact, equal_nan=True)
    x = torch.full((4096,), 1 + 0.3 / 128)

    rounds = []  # 0.3 of a grid cell: up 0.3 of the time
    for step in range(64):
        out = torch.empty(4096, dtype=torch.bfloat16)
        round_stochastically(x, out, step_seed(torch.tensor(float(step)), rounding_seed(0, 3, 0)))
        assert set(out.tolist()) == {1.0, 1 + 1 / 128}
        rounds.append(out > 1)

    up = torch.stack(rounds).double()
    assert up.mean().item() == pytest.approx(0.3, abs=0.004)

    # Of 64 or 4096 draws the mean spreads by 0.057 or 0.0072.
    assert up.mean(0).std().item() == pytest.approx(0.057, rel=0.1)
    assert up.mean(1).std().item() == pytest.approx(0.0072, rel=0.4)

    centered = up - 0.3
    assert (centered[1:] * centered[:-1]).mean().abs() < 0.002  # from step to step
    assert (centered[:, 1:] * centered[:, :-1]).mean().abs() < 0.002  # from place to place
