"""Crews of real processes, and MPS: used where it works, always stopped again."""

import os
import sys
import time

import pytest

from benchmarks._lib.crew import work_through
from benchmarks._lib.mps import CONTROL, PIPES, mps

CELLS = [{"name": name} for name in ("good", "broken", "deadly", "late", "better")]
GOOD = (sys.executable, "-c", "pass")
BAD = (sys.executable, "-c", "raise SystemExit(1)")


def run_cell(cell, settings, deadline):
    if cell["name"] == "broken":
        raise RuntimeError("no such thing")

    if cell["name"] == "deadly":
        os._exit(1)

    return None if cell["name"] == "late" else cell | {"by": settings["who"]}


def play(cells, seconds=120.0):
    """The outcome of each cell by name."""
    results: dict[str, tuple] = {}

    def following(busy):
        return next((c for c in cells if c["name"] not in busy | set(results)), None)

    work_through(
        "benchmarks._lib.test_processes:run_cell",
        {"who": "us"},
        following,
        lambda key, cell, error: results.update({key: (cell, error)}),
        lambda cell: cell["name"],
        num_workers=2,
        deadline=time.time() + seconds,
        grace=0.0,
    )
    return results


def test_a_failing_or_dying_cell_does_not_end_the_others():
    results = play(CELLS)
    assert results["good"] == ({"name": "good", "by": "us"}, "")
    assert results["better"][0] == {"name": "better", "by": "us"}
    assert results["broken"][0] is None
    assert "RuntimeError" in results["broken"][1]
    assert results["deadly"][0] is None
    assert results["deadly"][1]
    assert results["late"] == (None, "")


def test_nothing_starts_after_the_deadline():
    assert play(CELLS, seconds=-1.0) == {}


@pytest.fixture
def daemon(tmp_path, monkeypatch):
    """A stand-in for the MPS daemon that logs its commands; returns the log's path."""
    program = tmp_path / "bin" / CONTROL
    log = tmp_path / "log"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nif [ "$1" = "-d" ]; then echo start; else cat; fi >> {log}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.delenv(PIPES, raising=False)

    return log


def test_mps_is_started_and_stopped_even_if_the_work_fails(daemon, tmp_path):
    with mps(tmp_path, print, GOOD) as works:
        assert works
        assert os.environ[PIPES] == str(tmp_path / "mps")

    daemon.unlink()
    with pytest.raises(ZeroDivisionError), mps(tmp_path, print, GOOD):
        raise ZeroDivisionError

    assert PIPES not in os.environ
    assert daemon.read_text() == "start\nquit -t 5\n"


def test_mps_that_does_not_work_is_not_used(daemon, tmp_path, monkeypatch):
    with mps(tmp_path, print, BAD) as works:
        assert not works
        assert PIPES not in os.environ

    assert daemon.read_text() == "start\nquit -t 5\n"
    monkeypatch.setenv("PATH", str(tmp_path))

    with mps(tmp_path, print) as works:
        assert not works


def test_running_mps_is_used_and_left_running(daemon, tmp_path, monkeypatch):
    monkeypatch.setenv(PIPES, "somewhere")
    with mps(tmp_path, print, BAD) as works:
        assert works

    assert os.environ[PIPES] == "somewhere"
    assert not daemon.exists()
