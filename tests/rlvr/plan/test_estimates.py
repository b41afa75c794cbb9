"""Estimates change only on purpose: benchmarks/plan fitted their constants to measured steps.

After a change that is meant: `PYTHONPATH=src:tests python -m golden update`, and read the diff.
"""

import json

import pytest

from golden import committed


def test_estimates_are_those_committed():
    known = json.loads((committed.HERE / committed.ESTIMATES).read_text(encoding="utf-8"))
    found = json.loads(committed.estimates())
    assert found.keys() == known.keys()

    for line, parts in known.items():
        assert found[line]["needed"] == pytest.approx(parts["needed"], rel=1e-4), line
        assert found[line]["supervised"] == pytest.approx(parts["supervised"], rel=1e-4), line
        for name in ("seconds", "memory"):
            assert found[line][name] == pytest.approx(parts[name], rel=1e-4), line
