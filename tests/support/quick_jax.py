"""For tests of tiny JAX programs on a CPU: compile without optimizations (a third of the time)."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Import it into a test module. On a GPU the optimizations are part of what is tested."""
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")
    yield
    jax.config.update("jax_disable_most_optimizations", False)
