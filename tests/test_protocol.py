"""Results that follow benchmarks/PROTOCOL.md: seeds either tune or report, and the protocol's
commit came first."""

import subprocess
from functools import cache
from pathlib import Path

import pytest

from benchmarks._lib.results import read_json

ROOT = Path(__file__).parents[1]
TUNING = range(100, 200)
REPORTING = range(200, 300)


def runs_in(value):
    """The runs under a JSON value: dictionaries that name a protocol's commit and a seed."""
    if isinstance(value, dict):
        if "protocol" in value and "seed" in value:
            yield value
        for one in value.values():
            yield from runs_in(one)
    elif isinstance(value, list):
        for one in value:
            yield from runs_in(one)


@cache
def all_runs():
    runs = []
    for path in sorted((ROOT / "benchmarks").rglob("*.json*")):
        if path.suffix != ".jsonl":
            runs += [(path.relative_to(ROOT), run) for run in runs_in(read_json(path))]

    return runs


def git(*arguments):
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
    )


def test_seeds_tune_or_report():
    wrong = []
    for path, run in all_runs():
        if run["seed"] not in (TUNING if run["use"] == "tuning" else REPORTING):
            wrong.append((str(path), run["seed"]))

    assert not wrong


def test_the_protocol_came_first():
    if git("rev-parse", "--verify", "HEAD").returncode or not all_runs():
        pytest.skip("no git history, or no run under the protocol yet")

    for commit in {run["protocol"] for _, run in all_runs()}:
        assert git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0, commit
        assert git("cat-file", "-e", f"{commit}:benchmarks/PROTOCOL.md").returncode == 0, commit
