"""Every filter against its float64 SVD oracle: U f(S) V^T, f read from `mesotron.spectral`.

Tolerances are on the largest singular value of the error, the filtered ones being about 1, and
hold for both forms of the iteration. Rounding grows by the filter's slope at zero (485 for Muon, 24
for Pion's five promotions) and, in Gram form, by its square inside a segment, which is planned for
2e-3 in float32. So Pion, whose slope is small, is held to more digits than the others.
"""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close as close

from mesotron.optim.matrix import apply_filter, largest_eigenvalue
from mesotron.spectral import (
    Filter,
    cubic,
    high_pass,
    low_rank,
    muon,
    noise_edge,
    pion,
    polar_express,
    response,
)
from mesotron.spectral.filters import aim

# dtype: (slope above 100, others). Worst measured: 1.5e-10, 2.5e-3, 0.11 and 3e-14, 5e-6, 5e-3.
TOLERANCE = {
    torch.float64: (1e-9, 1e-12),
    torch.float32: (4e-3, 2e-5),
    torch.bfloat16: (0.2, 0.02),
}
FIXED = {
    "muon": muon(),
    "muon_3": muon(3),
    "cubic": cubic(),
    "polar_express": polar_express(),
    "polar_express_12": polar_express(12),
    **{f"promote_{k}": pion(k) for k in range(6)},
}
CUTOFF = {f"cutoff_{c}": high_pass(c) for c in (0.05, 0.3, 0.7, "noise")}
FILTERS = {**FIXED, **CUTOFF, "low_rank": low_rank(4)}


def with_spectrum(sigma: np.ndarray, m: int, n: int, seed: int = 0) -> Tensor:
    """An m x n float64 matrix with these singular values and random singular vectors."""
    rng = np.random.default_rng(seed)
    U = np.linalg.qr(rng.normal(size=(m, m)))[0][:, : len(sigma)]
    V = np.linalg.qr(rng.normal(size=(n, n)))[0][:, : len(sigma)]

    return torch.from_numpy((U * sigma) @ V.T)


def noise(m: int, n: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(m, n)))


def batch(m: int, n: int) -> Tensor:
    power = [with_spectrum(np.arange(1, m + 1.0) ** -a, m, n, seed=3) for a in (0.5, 1, 2)]
    scaled = [power[0] * 1e-25, power[1] * 1e18, torch.zeros(m, n, dtype=torch.float64)]
    return torch.stack([noise(m, n), *power, *scaled])


INPUTS = {
    "random": noise(24, 40)[None],
    "rank_one": torch.outer(noise(24, 1)[:, 0], noise(1, 40)[0])[None],
    "orthogonal": with_spectrum(np.ones(24), 24, 40)[None],
    "diagonal": torch.diag(torch.linspace(0.1, 1, 24, dtype=torch.float64))[None],
    "wide": batch(8, 160),  # takes the Gram form, the others the standard one
    "tall": noise(40, 24)[None],
    "power_law": with_spectrum(np.arange(1, 25.0) ** -1.0, 24, 40)[None],
    "near_zero": noise(24, 40)[None] * 1e-30,
    "one_row": noise(1, 40)[None],
    "batched": batch(24, 40),
}


def oracle(matrix: Tensor, filter: Filter) -> Tensor:
    """U f(S) V^T by an SVD in float64."""
    U, S, Vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    if not S.any():
        return torch.zeros_like(matrix, dtype=torch.float64)

    sigma = (S / S.norm()).numpy()
    if filter.rank is not None:
        passed = ((np.arange(len(sigma)) < filter.rank) & (sigma > 1e-5)).astype(float)
    elif filter.cutoff is not None:
        passed = aimed(matrix, sigma, filter)
    else:
        passed = response(filter, sigma)

    return (U * torch.from_numpy(passed)) @ Vh


def aimed(matrix: Tensor, sigma: np.ndarray, filter: Filter) -> np.ndarray:
    """A cutoff filter on Frobenius-normalized singular values, by the definition."""
    bound = (sigma**8).sum() ** 0.125
    if filter.cutoff == "noise":
        t = np.float64(noise_edge(*matrix.shape) / bound)
    else:
        t = np.float64(filter.cutoff * seen_largest(matrix) / bound)

    s = sigma / bound
    for _ in range(filter.num_steps(*matrix.shape)):
        (a, b, c), t = aim(t)
        s = a * s + b * s**3 + c * s**5

    return s


def seen_largest(matrix: Tensor) -> float:
    """The largest singular value as the filter estimates it, tested on its own below."""
    X = matrix[None] / matrix.norm()
    A = torch.bmm(X, X.mT)
    return largest_eigenvalue(A @ A).item() ** 0.25


def assert_near(found: Tensor, matrices: Tensor, filter: Filter, dtype: torch.dtype) -> None:
    for X, original in zip(found, matrices, strict=True):
        error = torch.linalg.matrix_norm(X.double() - oracle(original, filter), 2).item()
        assert error < TOLERANCE[dtype][filter.name in ("pion", "low_rank")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", FILTERS)
def test_filter_and_its_numbers_equal_the_svd_oracle(name, dtype):
    for kind, matrices in INPUTS.items():
        filtered = apply_filter(matrices.to(dtype, copy=True), FILTERS[name])
        assert filtered.X.dtype == dtype

        p = torch.linalg.svdvals(matrices).square()
        p /= p.sum(1, keepdim=True).clamp_min(1e-300)
        close(filtered.norm, matrices.norm(dim=(1, 2)), rtol=1e-6, atol=0)
        close(filtered.concentration.double(), p.square().sum(1), rtol=1e-5, atol=1e-7)
        close(filtered.passed.to(dtype), filtered.X.square().sum((1, 2)), rtol=1e-4, atol=1e-6)

        # Which four of equal singular values are the largest has no answer: tested on its own.
        if (name, kind) != ("low_rank", "orthogonal"):
            assert_near(filtered.X, matrices, FILTERS[name], dtype)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0, 4.0, 64.0])  # 64: rank one
@pytest.mark.parametrize("name", [*FIXED, "cutoff_noise"])
def test_float32_at_the_size_of_a_head(name, exponent):
    # Gram segments pay here and are chosen; more directions, more rounding: 6.5e-3 at worst, 2e-4
    # for Pion.
    matrix = with_spectrum(np.arange(1, 129.0) ** -exponent, 128, 512)
    X = apply_filter(matrix.float()[None].clone(), FILTERS[name]).X[0]
    error = torch.linalg.matrix_norm(X.double() - oracle(matrix, FILTERS[name]), 2).item()

    assert error < (1e-3 if FILTERS[name].name == "pion" else 1e-2)


# torch says once that this CPU multiplies bfloat16 slowly, which is why it is not the default here.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("name", ["muon", "polar_express", "promote_2", "cutoff_0.3"])
def test_bfloat16_stays_near_the_oracle(name):
    # bfloat16's matrices, not the float64 ones, are the question put to the filter.
    matrices = with_spectrum(np.array([1.0, 0.9, 0.8, *[0.02] * 29]), 32, 48)[None].bfloat16()
    filtered = apply_filter(matrices.clone(), FILTERS[name])
    assert filtered.X.dtype == torch.bfloat16
    assert_near(filtered.X, matrices.double(), FILTERS[name], torch.bfloat16)


def test_the_largest_direction_is_found_beside_a_lone_heavy_row():
    # The heaviest column is a block of its own; the largest direction is spread over 64 rows.
    ones = torch.ones(64) / 8
    signs = torch.tensor([1.0, -1.0]).repeat(32) / 8
    X = torch.zeros(1, 65, 80)
    X[0, 1:, :64] = torch.outer(ones, ones) + 0.2 * torch.outer(signs, signs)
    X[0, 0, 70] = 0.4
    out = torch.linalg.svdvals(apply_filter(X, high_pass(0.3)).X[0])

    assert out[:2].min() > 0.9
    assert out[2] < 0.1, "0.2 of the largest singular value lies below a cutoff of 0.3"


@pytest.mark.parametrize("kind", INPUTS)
def test_the_largest_singular_value_is_estimated_from_below(kind):
    for matrix in INPUTS[kind]:
        S = torch.linalg.svdvals(matrix)
        if S.any():
            share = seen_largest(matrix) / (S[0] / S.norm()).item()
            assert 0.95 < share < 1 + 1e-5


def test_noise_does_not_pass_and_a_planted_signal_does():
    X = torch.stack([noise(64, 256, seed) for seed in range(8)]).float()
    assert apply_filter(X, high_pass("noise")).passed.max() < 1.0  # of 64 directions

    for promote in range(3):
        assert apply_filter(noise(128, 2048).float()[None], pion(promote)).passed.item() < 1e-10

    edge = 8 + 16  # sqrt(m) + sqrt(n), where the noise ends
    signal = with_spectrum(np.array([4.0, 3.0, 2.0]) * edge, 64, 256, seed=1)
    filtered = apply_filter((signal + noise(64, 256)).float()[None], high_pass("noise"))

    assert filtered.passed.item() == pytest.approx(3, abs=0.2)
    U, _, Vh = torch.linalg.svd(signal.float())
    assert (U[:, :3].T @ filtered.X[0] @ Vh[:3].T).diag().min() > 0.8


def test_low_rank_keeps_as_many_of_equal_directions_and_no_rounding():
    assert apply_filter(INPUTS["rank_one"].float(), low_rank(128)).passed.item() == 1
    X = apply_filter(INPUTS["orthogonal"].clone(), low_rank(4)).X[0]
    close(torch.linalg.svdvals(X)[:5], torch.tensor([1.0] * 4 + [0]).double())


@pytest.mark.parametrize("name", ["muon", "low_rank"])
def test_autocast_does_not_round_the_products(name):
    X = batch(6, 9).float()
    alone = apply_filter(X.clone(), FILTERS[name]).X
    with torch.autocast("cpu", torch.bfloat16):
        inside = apply_filter(X.clone(), FILTERS[name]).X

    close(inside, alone, rtol=0, atol=0)
