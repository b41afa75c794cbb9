"""NorMuon against the formula, and the leash against its bound."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mesotron.optim import Muon, NorMuon, leash, lora, optimizer
from mesotron.optim.matrix import apply_filter
from mesotron.optim.norms import F_MAX
from mesotron.spectral import make_filter
from mesotron.spectral.response import response
from mesotron.spectral.scale import step_scale

LR = 0.02


@pytest.mark.parametrize(
    ("shape", "view"),
    [((6, 10), "whole"), ((10, 6), "whole"), ((7, 7), "whole"), ((10, 6), "rows:2")],
)
def test_normuon_is_the_normalized_polar_factor(shape, view):
    """Three float64 steps; the lines are those of the longer side of each block."""
    generator = torch.Generator().manual_seed(0)
    W = nn.Parameter(torch.randn(shape, generator=generator).double())
    options = {
        "momentum": 0.9,
        "nesterov": False,
        "weight_decay": 0.0,
        "beta2": 0.8,
    }

    exact = {
        "filter": "polar_express",
        "steps": 12,
        "dtype": "float64",
    }

    group = {"params": [W], "rule": "normuon", "view": view}
    optimizer = NorMuon([group], lr=LR, **options, **exact)
    expected = W.detach().clone()
    M = torch.zeros_like(W)
    blocks = 2 if view == "rows:2" else 1

    V: list[Tensor | float] = [0.0] * blocks
    for _ in range(3):
        W.grad = torch.randn(shape, generator=generator).double()
        optimizer.step()

        M = 0.9 * M + 0.1 * W.grad
        for k, (part, m) in enumerate(zip(expected.chunk(blocks), M.chunk(blocks), strict=True)):
            U, _, Vh = torch.linalg.svd(m, full_matrices=False)
            O = U @ Vh
            short = 0 if m.shape[0] <= m.shape[1] else 1
            V[k] = 0.8 * V[k] + 0.2 * O.square().mean(short, keepdim=True)
            scaled = O / (torch.as_tensor(V[k]).sqrt() + 1e-8)
            part -= LR * step_scale("rms", *m.shape) * scaled * O.norm() / scaled.norm()

    torch.testing.assert_close(W.detach(), expected, atol=1e-6, rtol=1e-5)


def matrices() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((8, 12), (12, 5))]


@pytest.mark.parametrize(
    ("shape", "view", "rule", "dtype", "lr"),
    [
        ((8, 12), "whole", "muon", torch.float32, 0.01),
        ((12, 5), "whole", "pion", torch.float32, 0.01),
        ((12, 5), "whole", "muon", torch.bfloat16, 0.01),
        ((8, 12), "whole", "pion", torch.bfloat16, 0.01),
        ((8, 12), "whole", "muon", torch.float32, 1.0),
        ((8, 6, 3), "conv", "muon", torch.float32, 0.05),
        ((2, 3, 8, 8), "stack", "muon", torch.float32, 0.05),
        ((64, 256), "whole", "normuon", torch.float32, 0.02),
        ((256, 64), "whole", "normuon", torch.float32, 1.0),
        ((64, 96), "whole", "normuon", torch.bfloat16, 0.02),
    ],
)
def test_the_leash_caps_the_spectral_distance(shape, view, rule, dtype, lr):
    """Aligned steps, for which the bound is nearly tight, far beyond it without a leash."""
    generator = torch.Generator().manual_seed(1)
    rho = 0.1
    W = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
    W.grad = torch.randn(shape, generator=generator).to(dtype)
    start = W.detach().clone().float()

    group = {
        "params": [W],
        "rule": rule,
        "view": view,
        "promote": 4 if rule == "pion" else 0,
    }

    optimizer = Muon([group], lr=lr, leash=rho)
    assert optimizer.param_groups[0]["weight_decay"] == 0

    def size(X: Tensor) -> float:
        X = X.flatten(1) if view == "conv" else X
        return torch.linalg.matrix_norm(X, 2).max().item()

    reached = 0.0
    for _ in range(60):
        optimizer.step()
        far = size(W.detach().float() - start) / size(start)
        assert far <= rho * (1.01 if dtype == torch.float32 else 1.3)  # rounding walks
        reached = max(reached, far)

    assert reached > rho / F_MAX / 2
    assert optimizer.stats()[f"{rule}/distance"] == pytest.approx(far, rel=0.05)


def test_normuon_keeps_the_leash_where_one_direction_has_most_of_the_lines():
    """63 directions of one line each, and one spread over 193: equal lines make it the largest, at
    almost six times the norm of a step of Muon."""
    generator = torch.Generator().manual_seed(0)
    W = nn.Parameter(torch.randn(64, 256, generator=generator))
    start = W.detach().clone()
    W.grad = torch.zeros(64, 256)
    W.grad[:63, :63] = torch.eye(63)
    W.grad[63, 63:] = 1.0

    optimizer = NorMuon([W], lr=LR, leash=0.1)
    for _ in range(60):
        optimizer.step()

    moved = torch.linalg.matrix_norm(W.detach() - start, 2)
    assert moved <= 0.1 * torch.linalg.matrix_norm(start, 2)


@pytest.mark.parametrize("lr", [0.005, 0.5, 10.0])
@pytest.mark.parametrize("beta2", [0.0, 0.5, 0.999])
def test_normuon_keeps_the_leash_while_the_gradient_moves_to_one_line(lr, beta2):
    """Second moments that remember other lines, or nothing, make the first steps there large."""
    generator = torch.Generator().manual_seed(0)
    W = nn.Parameter(torch.randn(32, 128, generator=generator))
    start = W.detach().clone()
    optimizer = NorMuon([W], lr=lr, leash=0.1, beta2=beta2)

    norm = torch.linalg.matrix_norm(start, 2)
    for number in range(30):
        W.grad = torch.randn(32, 128, generator=generator)
        if number >= 15:
            W.grad = 1e-3 * W.grad
            W.grad[:, 0] += 1.0
        optimizer.step()

        moved = torch.linalg.matrix_norm(W.detach() - start, 2)
        assert moved <= 0.1 * norm * 1.001


@pytest.mark.parametrize("rule", ["muon", "normuon", "pion"])
def test_weights_that_start_at_zero_have_no_leash(rule):
    """A share of a norm of zero would hold a zero-initialized layer at zero for ever."""
    ends = []
    for options in ({"leash": 0.1}, {"weight_decay": 0.0}):
        W = nn.Parameter(torch.zeros(6, 10))
        group = {"params": [W], "rule": rule, "promote": 2 if rule == "pion" else 0}
        optimizer = Muon([group], lr=LR, **options)
        for seed in range(3):
            W.grad = torch.randn(6, 10, generator=torch.Generator().manual_seed(seed))
            optimizer.step()

        ends.append(W.detach())

    assert ends[0].norm() > LR
    assert torch.equal(*ends)


def test_no_filter_leaves_more_than_the_leash_counts_on():
    sigma = np.linspace(0, 1, 200_001)
    filters = [
        make_filter("muon"),
        *(make_filter("muon", steps=k) for k in range(1, 9)),
        *(make_filter("pion", promote=k) for k in range(6)),
        *(make_filter("polar_express", steps=k) for k in range(5, 9)),
        make_filter("cubic"),
        make_filter("pion", cutoff="aligned"),
    ]

    peaks = [np.abs(response(each, sigma)).max() for each in filters]
    assert peaks[0] == pytest.approx(1.2024, abs=1e-4)
    assert max(peaks) < F_MAX


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding_stays_below_what_the_leash_counts_on(dtype):
    generator = torch.Generator().manual_seed(0)
    for shape in ((8, 8), (16, 64), (64, 96)):
        X = torch.randn(32, *shape, generator=generator)
        X *= torch.logspace(0, -3, shape[0])[:, None]
        filtered = apply_filter(X.to(dtype), make_filter("muon")).X
        assert torch.linalg.matrix_norm(filtered.float(), 2).max() < F_MAX


def test_an_endless_leash_is_the_plain_step():
    first = matrices()
    second = matrices()
    plain = Muon(first, lr=LR, weight_decay=0.0)

    leashed = Muon(second, lr=LR, leash=math.inf)
    for _ in range(3):
        for p, q in zip(first, second, strict=True):
            p.grad = q.grad = torch.randn(p.shape)
        plain.step()
        leashed.step()

    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


@pytest.mark.parametrize("rule", ["muon", "normuon", "product"])
def test_flags_that_stay_on_the_device_mask_the_step(rule, monkeypatch):
    """As on a GPU, where the host does not read which gradients are finite."""

    def run() -> tuple[list[Tensor], dict[str, float]]:
        if rule == "product":
            shapes = ((2, 6), (5, 2), (2, 6), (5, 2))
            extra = {"pairs": [2.0, 2.0]}
            extra["start_norms"] = [1.0, 2.0]
        else:
            shapes = ((6, 4), (6, 4))
            extra = {}

        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
        named = "muon" if rule == "product" else rule

        group = {
            "params": params,
            "rule": named,
            "dtype": "float32",
            **extra,
        }

        optimizer = Muon([group], lr=LR, leash=0.3)
        for k in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)

            if k == 1:
                params[-1].grad[0, 0] = float("nan")

            optimizer.step()

        state = [x for p in params for x in optimizer.state[p].values()]
        return [*(p.detach() for p in params), *state], optimizer.stats()

    read, stats = run()
    for module in (leash, lora, optimizer):
        monkeypatch.setattr(module, "on_host", lambda flags: False)

    masked, other = run()
    torch.testing.assert_close(masked, read)
    assert stats == pytest.approx(other, rel=1e-4)
