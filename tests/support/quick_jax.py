"""For tests of tiny JAX programs on a CPU: compile them fast, not well (a third of the time)."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Import it into a test module; others, whose programs run for long, stay as they are.

    On a GPU the optimizations are what has to be tested.
    """
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")
    yield
    jax.config.update("jax_disable_most_optimizations", False)
