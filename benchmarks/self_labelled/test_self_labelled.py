"""The long horizon's rule of survival, and the command line of its runs."""

import argparse
from pathlib import Path

import pytest

from benchmarks.self_labelled.run import CONTENDERS, HORIZON, command, kept


def test_a_run_keeps_the_last_mean_of_four_over_the_best():
    assert kept([0.5] * 8) == pytest.approx(1.0)
    assert kept([0.2, 0.5, 0.5, 0.5, 0.5, 0.3, 0.3, 0.3, 0.3]) == pytest.approx(0.6)
    assert kept([0.5, 0.1, 0.5, 0.5, 0.5, 0.5, 0.1]) == pytest.approx(0.8)  # one dip of four


@pytest.mark.parametrize("name", HORIZON)
def test_methods_of_the_long_horizon_are_valid_commands(name, tmp_path):
    given = argparse.Namespace(
        out=tmp_path, warm=Path("warm"), device="cpu", beta=None, steps=1500, prompts=32
    )
    typed = command((name, 1e-5, 120), given)
    beta = float(typed[typed.index("--objective.beta") + 1])
    assert (beta == 0) == (CONTENDERS[name].split()[1] == "grpo")
    assert typed[typed.index("--model.name") + 1] == "warm"
