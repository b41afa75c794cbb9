"""Crews of real processes, and MPS: used where it works, always stopped again."""

import os
import sys
import time

import pytest

from benchmarks._lib.crew import Cells, Crew, work_through
from benchmarks._lib.mps import CONTROL, PIPES, mps

CELLS = [{"name": name} for name in ("good", "broken", "deadly", "better")]
GOOD = (sys.executable, "-c", "pass")
BAD = (sys.executable, "-c", "raise SystemExit(1)")


def run_cell(cell, settings, deadline):
    if cell["name"] == "broken":
        raise RuntimeError("no such thing")

    if cell["name"] == "deadly":
        os._exit(1)

    return cell | {"by": settings["who"]}


def play(folder, seconds=120.0, tries=1):
    """The cells after they were worked through, and what was said of them."""
    said = []
    cells = Cells(
        lambda done: CELLS,
        lambda cell: cell["name"],
        done={},
        keep=lambda key, cell: None,
        describe=lambda cell: f"by {cell['by']}",
        say=said.append,
        tries=tries,
    )
    crew = Crew(
        target="benchmarks._lib.test_processes:run_cell",
        settings={"who": "us"},
        num_workers=2,
        deadline=time.time() + seconds,
        grace=0.0,
        log=folder / "log",
    )
    work_through(cells, crew)
    return cells, said


def test_a_failing_or_dying_cell_does_not_end_the_others(tmp_path):
    cells, said = play(tmp_path)
    assert set(cells.done) == {"good", "better"}
    assert cells.done["good"] == {"name": "good", "by": "us"}
    assert "good: by us" in said

    assert set(cells.failed) == {"broken", "deadly"}
    assert "RuntimeError" in cells.failed["broken"]
    assert cells.num_left() == 2


def test_a_cell_is_given_up_after_its_last_try():
    cells = Cells(
        lambda done: CELLS[:1],
        lambda cell: cell["name"],
        done={},
        keep=lambda key, cell: None,
        describe=str,
        say=lambda text: None,
        tries=2,
    )
    cells.take(CELLS[0], None, "no such thing")
    assert cells.choose(set()) == CELLS[0]
    assert cells.choose({"good"}) is None

    cells.take(CELLS[0], None, "")  # given back for lack of time
    assert cells.choose(set()) == CELLS[0]

    cells.take(CELLS[0], None, "no such thing")
    assert cells.choose(set()) is None


def test_nothing_starts_after_the_deadline(tmp_path):
    cells, said = play(tmp_path, seconds=-1.0)
    assert not cells.done
    assert not said


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
