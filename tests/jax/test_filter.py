"""JAX filters against the float64 SVD oracle of the torch filters, and against torch."""

import numpy as np
import pytest
import torch
from optim.test_matrix import FILTERS, INPUTS, oracle

from mesotron.optim.matrix import apply_filter as torch_filter

jax = pytest.importorskip("jax")
jnp = jax.numpy
from mesotron.jax.filter import apply_filter, largest_eigenvalue, normalize  # noqa: E402
from mesotron.spectral import cheapest_plan, muon, pion  # noqa: E402
from support.quick_jax import quick_compilation  # noqa: E402, F401

# Spectral norm of the error in float32, (slope above 100, others).
TOLERANCE = (4e-3, 2e-5)
KINDS = ("random", "rank_one", "orthogonal", "power_law", "near_zero")
FLOAT32 = 2.0**-24


def error(result: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(result, np.float64) - expected, 2))


@pytest.mark.parametrize("name", FILTERS)
def test_filter_equals_the_svd_oracle(name):
    filter = FILTERS[name]
    for kind in KINDS:
        (original,) = X = INPUTS[kind]
        (one,) = result = apply_filter(jnp.asarray(X.float().numpy()), filter)
        assert result.dtype == jnp.float32
        # The four largest of equal singular values are not defined.
        if (name, kind) != ("low_rank", "orthogonal"):
            allowed = TOLERANCE[filter.name in ("pion", "low_rank")]
            assert error(one, oracle(original, filter).numpy()) < allowed, kind


@pytest.mark.parametrize("shape", [(16, 16), (12, 96)], ids=["standard", "gram"])
@pytest.mark.parametrize("name", FILTERS)
def test_torch_and_jax_agree_in_both_forms(name, shape):
    """Closer than to the oracle, since both round the same operations."""
    filter = FILTERS[name]
    X = np.random.default_rng(5).normal(size=(3, *shape)).astype(np.float32)
    expected = torch_filter(torch.from_numpy(X.copy()), filter).X.numpy()
    result = apply_filter(jnp.asarray(X), filter)
    for a, b in zip(result, expected, strict=True):
        assert error(a, b) < (5e-4, 2e-5)[filter.name in ("pion", "low_rank")]


def test_both_forms_are_used():
    """Guards the test above."""
    forms = [cheapest_plan(*shape, muon().steps, FLOAT32)[0].form for shape in [(16, 16), (12, 96)]]
    assert forms == ["standard", "gram"]


@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("name", ["muon", "promote_2", "cutoff_noise", "cutoff_0.3"])
def test_scale_does_not_matter(name, size):
    X = np.random.default_rng(1).normal(size=(3, 8, 12)).astype(np.float32)
    scaled = apply_filter(jnp.asarray(X) * size, FILTERS[name])
    np.testing.assert_allclose(scaled, apply_filter(jnp.asarray(X), FILTERS[name]), atol=2e-4)


@pytest.mark.parametrize("name", FILTERS)
def test_zero_stays_zero_and_nan_stays_alone(name):
    X = np.random.default_rng(2).normal(size=(3, 8, 12)).astype(np.float32)
    X[0] = 0
    good = apply_filter(jnp.asarray(X), FILTERS[name])
    assert not good[0].any()
    X[1, 2, 3] = np.nan
    bad = apply_filter(jnp.asarray(X), FILTERS[name])
    assert not bad[0].any()
    np.testing.assert_array_equal(bad[2], good[2])


def test_bfloat16_matmuls_stay_close():
    X = jnp.asarray(np.random.default_rng(3).normal(size=(2, 8, 12)), jnp.float32)
    for name, allowed in (("muon", 0.2), ("promote_2", 0.05)):
        result = apply_filter(X, FILTERS[name], "bfloat16")
        assert result.dtype == jnp.bfloat16
        exact = apply_filter(X, FILTERS[name])
        assert error(np.asarray(result[0], np.float32), np.asarray(exact[0], np.float64)) < allowed


def test_huge_matrices_are_normalized_without_float64():
    X = jnp.full((1, 3, 4), 1e30, jnp.float32)
    assert float(jnp.linalg.norm(normalize(X))) == pytest.approx(1, rel=1e-6)


def test_power_iteration_errs_low_and_little():
    X = np.random.default_rng(4).normal(size=(5, 16, 24))
    S = np.square(np.linalg.svd(X @ X.transpose(0, 2, 1))[1][:, 0])
    A = jnp.asarray(X @ X.transpose(0, 2, 1), jnp.float32)
    result = np.asarray(largest_eigenvalue(A @ A), np.float64)
    assert (result <= S * (1 + 1e-5)).all()
    assert (result > 0.9 * S).all()


def test_tall_batches_are_refused():
    with pytest.raises(ValueError, match="m <= n"):
        apply_filter(jnp.ones((1, 4, 3)), pion())
