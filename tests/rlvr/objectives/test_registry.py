"""Every objective: what its registration promises, and what follows from it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mesotron.rlvr import objectives
from support.losses import gradient, loss_of, make_inputs

DOCS = Path(__file__).parents[3] / "docs" / "objectives.md"


@pytest.mark.parametrize("name", objectives.names())
def test_its_gradient_raises_what_was_better_and_lowers_what_was_worse(name):
    published = objectives.get(name)
    inputs = make_inputs(
        [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
        [1.0, -1.0],
        [[1, 1, 0], [1, 1, 1]],
        old=[[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]],
        objective=name,
        num_tokens=5.0,
        level=published.level,
    )
    slopes = gradient(inputs)  # of the loss, so the signs are reversed

    assert (slopes[0, :2] < 0).all()
    assert (slopes[1] > 0).all()
    assert slopes[0, 2] == 0

    mean = loss_of(inputs).mean
    assert torch.isfinite(mean.value)
    assert mean.share.shape == ()


def test_names_are_files_and_unknown_ones_are_refused():
    for name in objectives.names():
        assert objectives.get(name).name == name

    for name in ("mgpro", "../grpo", "__init__"):
        with pytest.raises(ValueError, match="must be one of"):
            objectives.get(name)


def test_published_values_are_read_without_torch():
    """A loss may import torch inside; at the top of its file that slows every command."""
    code = """
import sys
from mesotron.rlvr import objectives
for name in objectives.names():
    objectives.get(name)
assert "torch" not in sys.modules, f"{name} imports torch at the top of its file"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_table_in_the_docs_is_that_of_the_registry():
    assert objectives.table() in DOCS.read_text(encoding="utf-8")
