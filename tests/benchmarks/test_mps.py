"""MPS: used where it is there and works, told of where not, and always stopped again."""

import os
import sys

import pytest

from mesotron.bench.mps import CONTROL, PIPES, mps

GOOD, BAD = (sys.executable, "-c", "pass"), (sys.executable, "-c", "raise SystemExit(1)")


@pytest.fixture
def daemon(tmp_path, monkeypatch):
    """A stand-in that writes down what it is told; the path of what it wrote."""
    program, told = tmp_path / "bin" / CONTROL, tmp_path / "told"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nif [ "$1" = "-d" ]; then echo start; else cat; fi >> {told}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.delenv(PIPES, raising=False)
    return told


def test_it_is_started_and_stopped(daemon, tmp_path):
    said = []
    with mps(tmp_path, said.append, GOOD) as works:
        assert works
        assert os.environ[PIPES] == str(tmp_path / "mps")
    assert PIPES not in os.environ
    assert daemon.read_text() == "start\nquit -t 5\n"
    assert said == ["with MPS"]


def test_it_is_stopped_when_the_work_fails(daemon, tmp_path):
    with pytest.raises(ZeroDivisionError), mps(tmp_path, print, GOOD):
        raise ZeroDivisionError
    assert daemon.read_text().endswith("quit -t 5\n")
    assert PIPES not in os.environ


def test_what_does_not_work_under_it_is_run_without(daemon, tmp_path):
    said = []
    with mps(tmp_path, said.append, BAD) as works:
        assert not works
        assert PIPES not in os.environ
    assert daemon.read_text() == "start\nquit -t 5\n"
    assert said[0].startswith("without MPS: what was tried under it failed")


def test_one_that_runs_already_is_used_and_left_running(daemon, tmp_path, monkeypatch):
    monkeypatch.setenv(PIPES, "somewhere")
    said = []
    with mps(tmp_path, said.append, BAD) as works:
        assert works
        assert os.environ[PIPES] == "somewhere"
    assert os.environ[PIPES] == "somewhere"
    assert not daemon.exists(), "nobody was started or stopped"
    assert said == ["with the MPS of somewhere"]


def test_there_may_be_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(PIPES, raising=False)
    said = []
    with mps(tmp_path, said.append) as works:
        assert not works
    assert said == [f"without MPS: there is no {CONTROL}"]
