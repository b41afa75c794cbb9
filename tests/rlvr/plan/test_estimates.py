"""Estimates change only on purpose: benchmarks/plan fitted their constants to measured steps.

After a change that is meant: `PYTHONPATH=src:tests python -m golden update`, and read the diff.
"""

import json
from types import SimpleNamespace

import pytest

from golden import committed
from mesotron.rlvr.plan.cost import RunEstimate
from mesotron.watch.budget import Limits


def test_estimates_are_those_committed():
    known = json.loads((committed.HERE / committed.ESTIMATES).read_text(encoding="utf-8"))
    found = json.loads(committed.estimates())
    assert found.keys() == known.keys()

    for line, parts in known.items():
        assert found[line]["needed"] == pytest.approx(parts["needed"], rel=1e-4), line
        assert found[line]["supervised"] == pytest.approx(parts["supervised"], rel=1e-4), line
        for name in ("seconds", "memory"):
            assert found[line][name] == pytest.approx(parts[name], rel=1e-4), line


def test_limits_buy_whole_steps_after_the_start():
    def steps(start=0.0, **limits):
        pace = SimpleNamespace(seconds_per_step=10.0)
        estimate = RunEstimate(
            num_prompts=1,
            maths=None,  # pyright: ignore
            sampled=1.0,
            tokens=None,  # pyright: ignore
            pace=pace,  # pyright: ignore
            limits=Limits(**limits),
            start=start,
        )
        return estimate.affordable_steps

    assert steps(seconds=105.0) == 10
    assert steps(seconds=105.0, start=26.0) == 7
    assert steps(seconds=105.0, start=200.0) == 0
    assert steps(dollars=1.0, price=36.0) == 10
    assert steps(seconds=55.0, dollars=1.0, price=36.0) == 5
    assert steps(dollars=1.0, price=0.0) is None  # a machine that costs nothing
    assert steps(price=36.0) is None
