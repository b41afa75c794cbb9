"""Every objective: what its registration promises, and what follows from it."""

import inspect
import subprocess
import sys

import pytest
import torch

from mesotron.config.registry import OBJECTIVES
from support.losses import gradient, loss_of, make_inputs


@pytest.mark.parametrize("name", OBJECTIVES.names())
def test_its_gradient_raises_what_was_better_and_lowers_what_was_worse(name):
    published = OBJECTIVES[name]
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
    for name in OBJECTIVES.names():
        assert OBJECTIVES[name].name == name

    for name in ("mgpro", "../grpo", "__init__"):
        with pytest.raises(ValueError, match="unknown"):
            OBJECTIVES[name]


def test_published_values_are_read_without_torch():
    """A loss may import torch inside; at the top of its file that slows every command."""
    code = """
import sys
from mesotron.config.registry import OBJECTIVES
for name in OBJECTIVES.names():
    OBJECTIVES[name]
assert "torch" not in sys.modules, f"{name} imports torch at the top of its file"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", OBJECTIVES.names())
def test_published_options_are_the_defaults_of_the_loss(name):
    published = OBJECTIVES[name]
    parameters = inspect.signature(published.loss).parameters
    for option, value in published.options.items():
        if option in parameters:  # else the loss takes all by name
            assert parameters[option].default == value
