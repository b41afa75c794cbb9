"""Every module imports, and every example in a docstring gives what it says."""

import doctest
import importlib
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
MODULES = sorted(
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
)
# Absent on a machine without a GPU, or without the extra `jax`.
OPTIONAL = {"triton", "jax", "optax", "lerobot", "ray", "httpx", "verifiers"}
SLOW = ("mesotron.jax", "mesotron.ppo")  # they compile


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * x.startswith(SLOW)) for x in MODULES]
)
def test_examples_in_docstrings(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        pytest.skip(f"{name} needs {error.name}")

    assert doctest.testmod(module).failed == 0
