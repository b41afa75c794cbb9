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
OPTIONAL = {"triton", "jax", "optax"}


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        pytest.skip(f"{name} needs {error.name}")
    failed, _ = doctest.testmod(module)
    assert failed == 0


def test_the_public_functions_have_examples():
    """Guards the test above: were no doctest found, it could not fail."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [
        test
        for name in ("mesotron.cli", "mesotron.spectral.filters")
        for test in finder.find(importlib.import_module(name))
        if test.examples
    ]
    assert len(found) >= 3
