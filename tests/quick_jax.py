"""For tests of tiny JAX programs: compile them fast rather than well (a third of the time)."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Import it into a test module; others, whose programs run for long, stay as they are."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
