"""JAX filters against the float64 SVD oracle of the torch filters."""

import jax.numpy as jnp
import numpy as np
import pytest
from optim.test_matrix import FILTERS, INPUTS, noise, oracle

from mesotron.jax.filter import apply_filter
from mesotron.spectral import muon

# Spectral norm of the error in float32, (slope above 100, others).
TOLERANCE = (4e-3, 2e-5)
# One of each kind: torch's own tests have every length and strength.
NAMES = ["muon", "cubic", "polar_express", "promote_2", "cutoff_0.3", "cutoff_noise", "low_rank"]
KINDS = ("random", "rank_one", "orthogonal", "power_law", "near_zero")
# The square matrix takes the standard form, the others the Gram form.
MATRICES = {kind: INPUTS[kind] for kind in KINDS} | {"square": noise(16, 16)[None]}


def error(result: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(result, np.float64) - expected, 2))


@pytest.mark.parametrize("name", NAMES)
def test_filter_equals_the_svd_oracle(name):
    filter = FILTERS[name]
    for kind, X in MATRICES.items():
        (original,) = X
        (one,) = result = apply_filter(jnp.asarray(X.float().numpy()), filter)
        assert result.dtype == jnp.float32

        # The four largest of equal singular values are not defined.
        if (name, kind) != ("low_rank", "orthogonal"):
            allowed = TOLERANCE[filter.name in ("pion", "low_rank")]
            assert error(one, oracle(original, filter).numpy()) < allowed, kind


def test_bfloat16_matmuls_stay_close():
    X = jnp.asarray(np.random.default_rng(3).normal(size=(2, 8, 12)), jnp.float32)
    result = apply_filter(X, muon(2), "bfloat16")
    exact = apply_filter(X, muon(2))

    assert result.dtype == jnp.bfloat16
    assert error(np.asarray(result[0], np.float32), np.asarray(exact[0], np.float64)) < 0.2
