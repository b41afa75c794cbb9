"""Spectral steps against a float64 SVD reference, and the cases other Muons got wrong."""

import math
from unittest.mock import patch

import numpy as np
import pytest
import torch
from optim.test_matrix import oracle
from torch import nn

from mesotron.optim import Muon, Pion, matrix
from mesotron.optim import step as module
from mesotron.optim.device import round_stochastically
from mesotron.spectral import Filter, muon, pion, polar_express

SHAPES = [(6, 10), (10, 6), (7, 7), (1, 5)]
SCALES = {
    "rms": lambda m, n: 0.2 * math.sqrt(max(m, n)),
    "moonlight": lambda m, n: 0.2 * math.sqrt(max(m, n)),
    "spectral": lambda m, n: math.sqrt(max(1, m / n)),
    5.0: lambda m, n: 5.0 * math.sqrt(max(m, n)),
}


class Reference:
    """Momentum and filter by an SVD, in float64 numpy."""

    def __init__(self, filter: Filter, lr: float, mu: float, wd: float, nesterov: bool) -> None:
        self.filter = filter
        self.lr = lr
        self.mu = mu
        self.wd = wd
        self.nesterov = nesterov
        self.momenta: dict[int, np.ndarray] = {}

    def step(self, key: int, W: np.ndarray, G: np.ndarray, scale: float) -> np.ndarray:
        M = self.mu * self.momenta.get(key, np.zeros_like(G)) + (1 - self.mu) * G
        self.momenta[key] = M
        look = (1 - self.mu) * G + self.mu * M if self.nesterov else M
        X = oracle(torch.from_numpy(look), self.filter).numpy()

        return (1 - self.lr * self.wd) * W - self.lr * scale * X


def param(*shape: int, dtype=torch.float32, seed: int = 0) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    p = nn.Parameter(torch.randn(*shape, generator=generator).to(dtype))
    p.grad = torch.randn(*shape, generator=generator).to(dtype)

    return p


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    ("cls", "options", "filter", "nesterov"),
    [
        (Muon, {}, muon(), True),
        (Muon, {"filter": "polar_express", "steps": 4}, polar_express(4), False),
        (Pion, {"promote": 2}, pion(2), True),
    ],
)
def test_steps_equal_the_float64_reference(cls, options, filter, nesterov, scale, dtype):
    rng = np.random.default_rng(0)
    start = [rng.normal(size=shape) for shape in SHAPES]
    params = [nn.Parameter(torch.tensor(w, dtype=dtype)) for w in start]
    optimizer = cls(
        params, lr=0.02, momentum=0.9, weight_decay=0.1, scale=scale, nesterov=nesterov, **options
    )

    reference = Reference(
        filter,
        lr=0.02,
        mu=0.9,
        wd=0.1,
        nesterov=nesterov,
    )
    for _ in range(4):
        grads = [rng.normal(size=shape) for shape in SHAPES]
        for p, g in zip(params, grads, strict=True):
            p.grad = torch.tensor(g, dtype=dtype)

        optimizer.step()
        for k, (w, g) in enumerate(zip(start, grads, strict=True)):
            start[k] = reference.step(k, w, g, SCALES[scale](*SHAPES[k]))

    # Float32: rounding of the filter (4e-3 at worst, see test_matrix) times the step.

    if dtype == torch.float64:
        atol = 1e-9
    else:
        atol = 2e-4 * (5 if scale == 5.0 else 1)

    for p, w in zip(params, start, strict=True):
        np.testing.assert_allclose(p.detach().double().numpy(), w, rtol=0, atol=atol)


def test_views_step_as_their_matrices():
    rng = np.random.default_rng(0)
    W = rng.normal(size=(12, 18))
    G = rng.normal(size=(12, 18))

    views = {
        "conv": (12, 2, 3, 3),
        "rows:3": (12, 18),
        "cols:3": (18, 12),
        "stack": (3, 4, 18),
    }

    views["T"] = (18, 12)
    params = {}
    for view, shape in views.items():
        w, g = (x.T.copy() if view in ("cols:3", "T") else x for x in (W, G))
        params[view] = nn.Parameter(torch.tensor(w).reshape(shape))
        params[view].grad = torch.tensor(g).reshape(shape)

    groups = [
        {
            "params": [p],
            "rule": "muon",
            "view": view,
        }
        for view, p in params.items()
    ]

    Muon(groups, lr=0.1, weight_decay=0.0).step()
    reference = Reference(
        muon(),
        lr=0.1,
        mu=0.95,
        wd=0.0,
        nesterov=True,
    )

    whole = reference.step(9, W, G, 0.2 * 18**0.5)
    heads = np.concatenate(
        [reference.step(h, W[4 * h :][:4], G[4 * h :][:4], 0.2 * 18**0.5) for h in range(3)]
    )
    for view, p in params.items():
        expected = heads if view in ("rows:3", "cols:3", "stack") else whole
        expected = expected.T if view in ("cols:3", "T") else expected
        found = p.detach().numpy().reshape(expected.shape)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


def test_an_expert_without_tokens_gets_no_step_and_a_bad_one_skips_its_parameter():
    params = [param(4, 6, 10) for _ in range(3)]
    params[1].grad[2] = 0
    params[2].grad[1, 0, 0] = float("inf")
    before = [p.detach().clone() for p in params]

    groups = [
        {
            "params": params,
            "rule": "muon",
            "view": "stack",
            "weight_decay": 0.0,
        }
    ]

    optimizer = Muon(groups)
    optimizer.step()
    full, idle, bad = (p.detach() - old for p, old in zip(params, before, strict=True))

    assert full[2].any()
    assert not idle[2].any()

    torch.testing.assert_close(idle[[0, 1, 3]], full[[0, 1, 3]], rtol=0, atol=1e-6)
    assert not bad.any()
    assert optimizer.stats()["skipped"] == 1
    assert not params[2].grad.isfinite().all(), "the loss scaler must still see it"


# torch warns once that this CPU multiplies bfloat16 slowly.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_momentum_in_bfloat16_drifts_little():
    p = nn.Parameter(torch.zeros(8, 8))
    optimizer = Muon(
        [p],
        lr=0.0,
        dtype="bfloat16",
        momentum_dtype="bfloat16",
    )

    exact = torch.zeros(8, 8, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        p.grad = torch.randn(8, 8, generator=generator)
        exact = 0.95 * exact + 0.05 * p.grad.double()
        optimizer.step()

    buffer = optimizer.state[p]["momentum_buffer"]
    assert buffer.dtype == torch.bfloat16
    assert (buffer.double() - exact).norm() < 0.02 * exact.norm()


def test_rounding_seeds_differ_by_step_parameter_and_window_and_not_by_run():
    def seeds_of(missing: int | None = None) -> list[int]:
        params = [param(8, 6, dtype=torch.bfloat16, seed=k) for k in range(5)]
        if missing is not None:
            params[missing].grad = None

        groups = [{"params": params[:2], "view": "rows:5+3"}, {"params": params[2:]}]
        optimizer = Muon(groups, dtype="float32")

        rounding = patch.object(module, "round_stochastically", wraps=round_stochastically)
        with rounding as rounded:
            for _ in range(4):
                optimizer.step()

        return [call.args[2] for call in rounded.call_args_list]

    seeds = seeds_of()
    assert len(set(seeds)) == len(seeds) == 4 * (2 * 2 + 3)
    assert max(seeds) < 2**32, "a CPU generator reads no more"
    assert seeds_of() == seeds
    assert set(seeds_of(missing=2)) < set(seeds), "they do not depend on which others step"


def test_a_group_may_have_parameters_on_two_devices():
    params = [param(5), param(4, 4), *(nn.Parameter(p.to("meta")) for p in (param(5), param(4, 4)))]
    before = [p.detach().clone() for p in params[:2]]

    for p in params[2:]:
        p.grad = torch.empty_like(p)

    Muon(params).step()
    assert not any(torch.equal(p, b) for p, b in zip(params, before))


def test_batches_beyond_the_memory_limit_are_split(monkeypatch):
    sizes = []
    monkeypatch.setattr(module, "_BATCH_BYTES", 2 * 6 * 10 * 4)
    monkeypatch.setattr(
        module, "apply_filter", lambda X, f: sizes.append(len(X)) or matrix.apply_filter(X, f)
    )
    Muon([param(6, 10, seed=k) for k in range(5)], dtype="float32").step()

    assert sizes == [2, 2, 1]


@pytest.mark.parametrize("wd", [0.0, 0.5, torch.tensor(0.5)])
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
@pytest.mark.parametrize("finite", [None, True, False])
def test_a_step_is_as_precise_with_and_without_a_mask(lr, wd, finite):
    W = torch.randn(4, 6)
    X = torch.randn(4, 6).bfloat16()
    group = {"lr": lr, "weight_decay": wd}
    expected = W.double() * (1 - 0.1 * float(wd)) - 0.2 * X.double()
    expected = W.double() if finite is False else expected
    mask = None if finite is None else torch.tensor(finite)
    module.step_weights(W, X, 2 * lr, group, mask, 0)
    torch.testing.assert_close(W.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_step_does_not_read_what_is_on_the_device():
    """Nothing can be read from the meta device."""
    with torch.device("meta"):
        W = torch.ones(4, 6)
        X = torch.ones(4, 6)
        flag = torch.tensor(True)
        wd = torch.tensor(0.5)

    for decay in (0.0, 0.5, wd):
        module.step_weights(
            W,
            X,
            0.1,
            {"lr": 0.1, "weight_decay": decay},
            flag,
            0,
        )
