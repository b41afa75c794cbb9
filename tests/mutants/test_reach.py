"""The notes from which `make mutants` picks its tests."""

import importlib.util
import os
import subprocess
import sys

import pytest

from mutants.changes import changes_of
from mutants.probes import MODULE, VARIABLE, Hits, insert, keys_of
from mutants.reach import Reach

SOURCE = '''"""A docstring."""

from __future__ import annotations

LIMIT = 5


class Meter:
    """Another."""

    def grow(self, by):
        """And one more."""
        if by < 0:
            raise ValueError(by)

        try:
            total = 1 / by
        except ZeroDivisionError:
            total = 0
        return total


def other():
    return Meter().grow(1)
'''


@pytest.fixture
def probed(tmp_path, monkeypatch):
    """A package with probes, the key of each, and what has run of it."""
    (tmp_path / "meter.py").write_text(SOURCE)
    numbers = insert(tmp_path, ["meter.py"])
    monkeypatch.setenv(VARIABLE, "")  # set back at the end
    hits = Hits(tmp_path / "hits")

    def load(name, path):
        spec = importlib.util.spec_from_file_location(name, tmp_path / path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    load("mesotron._reached", MODULE)
    meter = load("meter", "meter.py")
    keys = keys_of("meter.py", SOURCE.encode())

    def lines():
        ran = {numbers[number] for number in hits.read()}
        return {line for line, key in keys.items() if key in ran}

    return meter, hits, lines


def line_of(text):
    return 1 + [line.strip() for line in SOURCE.splitlines()].index(text)


def test_statements_that_ran_are_noted_and_others_are_not(probed):
    meter, hits, lines = probed
    hits.clear()
    assert meter.Meter().grow(0) == 0
    assert line_of("total = 0") in lines()
    assert line_of("raise ValueError(by)") not in lines()

    hits.clear()
    assert meter.other() == 1
    assert line_of("return Meter().grow(1)") in lines()
    assert line_of("total = 0") not in lines()


def test_a_process_that_is_killed_is_seen(probed, tmp_path):
    _, hits, lines = probed
    hits.clear()
    package = tmp_path / "new" / "mesotron"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / MODULE).write_text((tmp_path / MODULE).read_text())
    code = "import os, meter; meter.Meter().grow(0); os.kill(os.getpid(), 9)"
    paths = os.pathsep.join([str(package.parent), str(tmp_path)])

    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, check=False
    )
    assert line_of("total = 0") in lines()


def test_docstrings_stay(probed):
    meter, _, _ = probed
    assert meter.__doc__ == "A docstring."
    assert meter.Meter.grow.__doc__ == "And one more."


def test_a_key_counts_within_its_function():
    longer = SOURCE.replace("LIMIT = 5", "LIMIT = 5\n\n\ndef new():\n    return 1")
    keys = keys_of("meter.py", SOURCE.encode())
    moved = keys_of("meter.py", longer.encode())
    assert keys[line_of("total = 0")] == moved[line_of("total = 0") + 4]
    assert len(set(keys.values())) == len(SOURCE.split("def ")) + 5


@pytest.fixture
def reach(tmp_path):
    (tmp_path / "meter.py").write_text(SOURCE)
    keys = keys_of("meter.py", SOURCE.encode())
    zero, one, apart = (keys[line_of(text)] for text in ("total = 0", "if by < 0:", "return total"))

    reach = Reach()
    reach.add(
        {
            "wide": {"seconds": 1.0, "ran": [zero, one, apart, "more.py:f:0"]},
            "narrow": {"seconds": 2.0, "ran": [zero, one]},
            "slow": {"seconds": 50.0, "ran": [zero, one, apart]},
            "elsewhere": {"seconds": 1.0, "ran": [apart]},
        }
    )
    return reach


def change_on(tmp_path, text):
    changes = changes_of(tmp_path, "meter.py")
    return next(change for change in changes if change.line == line_of(text))


def test_the_most_specific_tests_come_first_within_the_budget(reach, tmp_path):
    change = change_on(tmp_path, "total = 0")
    assert reach.tests_for(change, SOURCE.encode(), 100) == ["narrow", "slow", "wide"]
    assert reach.tests_for(change, SOURCE.encode(), 10) == ["narrow", "wide"]


def test_a_line_that_no_test_runs_has_the_tests_of_its_function_then_of_its_file(reach, tmp_path):
    change = change_on(tmp_path, "total = 1 / by")
    assert set(reach.tests_for(change, SOURCE.encode(), 100)) == set(reach.seconds)

    change = change_on(tmp_path, "LIMIT = 5")
    assert set(reach.tests_for(change, SOURCE.encode(), 100)) == set(reach.seconds)


def test_a_file_that_no_probe_sees_has_the_tests_of_its_room(reach, tmp_path):
    reach.add({"tests/answers/test_a.py::b": {"seconds": 1.0, "ran": []}})
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "worker.py").write_text(SOURCE)
    change = changes_of(tmp_path, "answers/worker.py")[0]
    assert reach.tests_for(change, SOURCE.encode(), 100) == ["tests/answers/test_a.py::b"]
