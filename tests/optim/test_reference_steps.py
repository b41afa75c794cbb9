"""Whole steps against independent references: Muon and Pion against a float64 step written here
with an SVD, the auxiliary rules against `torch.optim`."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mesotron.optim.auxiliary import STEPS
from mesotron.optim.optimizers import Muon, Pion
from mesotron.optim.stats import StepStats
from mesotron.spectral import Filter, muon, pion, polar_express, response

SHAPES = [(6, 10), (10, 6), (6, 6), (1, 7), (12, 6)]


class Reference:
    """M <- mu M + (1 - mu) G; U by Nesterov; W <- (1 - lr wd) W - lr scale f(U), by an SVD."""

    def __init__(self, filter: Filter, lr: float, mu: float, wd: float, nesterov: bool) -> None:
        self.filter, self.lr, self.mu, self.wd, self.nesterov = filter, lr, mu, wd, nesterov
        self.momentum: dict[int, np.ndarray] = {}

    def step(self, k: int, W: np.ndarray, G: np.ndarray, scale: float) -> np.ndarray:
        M = self.mu * self.momentum.get(k, 0) + (1 - self.mu) * G
        self.momentum[k] = M
        look = (1 - self.mu) * G + self.mu * M if self.nesterov else M
        U, S, Vh = np.linalg.svd(look, full_matrices=False)
        X = (U * response(self.filter, S / np.linalg.norm(S))) @ Vh
        return (1 - self.lr * self.wd) * W - self.lr * scale * X


SCALES = {
    "rms": lambda m, n: 0.2 * math.sqrt(max(m, n)),
    "moonlight": lambda m, n: 0.2 * math.sqrt(max(m, n)),
    "spectral": lambda m, n: math.sqrt(max(1, m / n)),
    5.0: lambda m, n: 5.0 * math.sqrt(max(m, n)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    ("make", "filter"),
    [
        (lambda p, **o: Muon(p, **o), muon()),
        (lambda p, **o: Muon(p, filter="polar_express", steps=4, **o), polar_express(4)),
        (lambda p, **o: Pion(p, promote=2, **o), pion(2)),
    ],
)
def test_spectral_steps_equal_the_float64_reference(make, filter, scale, nesterov, dtype):
    rng = np.random.default_rng(0)
    start = [rng.normal(size=shape) for shape in SHAPES]
    params = [nn.Parameter(torch.tensor(w, dtype=dtype)) for w in start]
    optimizer = make(
        params, lr=0.02, momentum=0.9, weight_decay=0.1, scale=scale, nesterov=nesterov
    )
    reference = Reference(filter, lr=0.02, mu=0.9, wd=0.1, nesterov=nesterov)
    for _ in range(4):
        grads = [rng.normal(size=shape) for shape in SHAPES]
        for p, g in zip(params, grads, strict=True):
            p.grad = torch.tensor(g, dtype=dtype)
        optimizer.step()
        for k, (w, g) in enumerate(zip(start, grads, strict=True)):
            start[k] = reference.step(k, w, g, SCALES[scale](*SHAPES[k]))
    # Float32: rounding of the filter (4e-3 at worst, see test_matrix) times the step.
    atol = 1e-9 if dtype == torch.float64 else 2e-4 * (5 if scale == 5.0 else 1)
    for p, w in zip(params, start, strict=True):
        np.testing.assert_allclose(p.detach().double().numpy(), w, rtol=0, atol=atol)


def convolution(rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    return torch.tensor(rng.normal(size=(6, 2, 3, 3))), torch.tensor(rng.normal(size=(6, 2, 3, 3)))


def test_a_convolution_steps_as_its_flattened_matrix():
    W, G = convolution(np.random.default_rng(0))
    p = nn.Parameter(W.clone())
    p.grad = G
    Muon([p], lr=0.1, weight_decay=0.0).step()
    reference = Reference(muon(), lr=0.1, mu=0.95, wd=0.0, nesterov=True)
    flat = reference.step(0, W.reshape(6, 18).numpy(), G.reshape(6, 18).numpy(), 0.2 * 18**0.5)
    np.testing.assert_allclose(p.detach().reshape(6, 18).numpy(), flat, rtol=0, atol=1e-9)


def test_heads_step_each_on_its_own():
    rng = np.random.default_rng(0)
    W, G = rng.normal(size=(12, 10)), rng.normal(size=(12, 10))
    rows, cols = nn.Parameter(torch.tensor(W)), nn.Parameter(torch.tensor(W.T.copy()))
    rows.grad, cols.grad = torch.tensor(G), torch.tensor(G.T.copy())
    groups = [
        {"params": [rows], "rule": "muon", "view": "rows:3"},
        {"params": [cols], "rule": "muon", "view": "cols:3"},
    ]
    Muon(groups, lr=0.1, weight_decay=0.0).step()
    reference = Reference(muon(), lr=0.1, mu=0.95, wd=0.0, nesterov=True)
    heads = [
        reference.step(h, W[4 * h : 4 * h + 4], G[4 * h : 4 * h + 4], 0.2 * 10**0.5)
        for h in range(3)
    ]
    expected = np.concatenate(heads)
    np.testing.assert_allclose(rows.detach().numpy(), expected, rtol=0, atol=1e-9)
    np.testing.assert_allclose(cols.detach().numpy(), expected.T, rtol=0, atol=1e-9)


# The auxiliary rules.


def follow(ours: torch.optim.Optimizer, a, theirs: torch.optim.Optimizer, b, schedule) -> None:
    """Twenty steps of both with the same gradients and the same schedule."""
    generator = torch.Generator().manual_seed(1)
    schedulers = [schedule(optimizer) for optimizer in (ours, theirs)]
    for _ in range(20):
        for p, q in zip(a, b, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        for optimizer, scheduler in zip((ours, theirs), schedulers, strict=True):
            optimizer.step()
            scheduler.step()


def pair() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(s, generator=generator) for s in ((5,), (4, 3), (), (2, 3, 2))]
    return [nn.Parameter(w.clone()) for w in start], [nn.Parameter(w.clone()) for w in start]


SCHEDULES = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=20),
    "warmup": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: min(1, k / 5)),
    "one_cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=21),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_adamw_equals_torch(schedule):
    a, b = pair()
    options = {"lr": 0.02, "betas": (0.8, 0.97), "eps": 1e-6, "weight_decay": 0.3}
    ours = Muon([{"params": a, "rule": "adamw"}], **options)
    follow(ours, a, torch.optim.AdamW(b, fused=True, **options), b, SCHEDULES[schedule])
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_adamw_agrees_with_the_loop_that_torch_runs_by_default_here():
    a, b = pair()
    ours = Muon([{"params": a, "rule": "adamw"}], lr=0.02, weight_decay=0.1)
    theirs = torch.optim.AdamW(b, lr=0.02, weight_decay=0.1)
    follow(ours, a, theirs, b, SCHEDULES["cosine"])
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("schedule", ["cosine", "warmup"])
def test_sgd_equals_torch(schedule, nesterov):
    a, b = pair()
    options = {"lr": 0.02, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.0}
    ours = Muon([{"params": a, "rule": "sgd"}], **options)
    follow(ours, a, torch.optim.SGD(b, fused=True, **options), b, SCHEDULES[schedule])
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_sgd_decays_weights_apart_from_the_gradient():
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.full((3,), 2.0)
    Muon([{"params": [p], "rule": "sgd"}], lr=0.1, weight_decay=0.5, nesterov=False).step()
    torch.testing.assert_close(p.detach(), torch.full((3,), 0.95 - 0.2))


@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_auxiliary_rules_pair_elements_and_not_addresses(rule):
    # Fused kernels walk memory: a transposed gradient or state must not be read in its own order.
    start, G = torch.randn(4, 6), torch.randn(4, 6)
    ends = []
    for param, grad in [
        (start.clone(), G.clone()),
        (start.clone(), G.t().contiguous().t()),
        (start.t().contiguous().t(), G.clone()),
        (torch.stack([start, start], 2)[:, :, 0], G.clone()),
    ]:
        p = nn.Parameter(param)
        p.grad = grad
        optimizer = Muon([{"params": [p], "rule": rule}], lr=0.1)
        optimizer.step()
        p.data = p.data.clone(memory_format=torch.contiguous_format)  # now the state lies otherwise
        optimizer.step()
        ends.append(p.detach())
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_a_skip_decided_on_the_device_leaves_everything(rule, dense):
    # What a GPU does: the host does not know that the gradient is bad, the kernel does.
    p, state, stats = torch.ones(3, 2)[:, 0], {}, StepStats()
    p = p.clone() if dense else p
    group = Muon([nn.Parameter(torch.ones(3))], lr=0.1).param_groups[0]
    bad = torch.tensor([1.0, float("nan"), 1.0])
    STEPS[rule]([p], [bad], [state], group, torch.tensor(1.0), stats, [0])
    assert torch.equal(p, torch.ones(3))
    assert all(not value.any() for value in state.values())
    assert all(value == 0 for value in stats.read().values())
