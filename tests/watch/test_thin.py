"""Long logs: few rows are read, and no sudden change is missed."""

import json
import math
import random
from pathlib import Path

import pytest

from mesotron.config import WatchSettings
from mesotron.watch import log as log_module
from mesotron.watch.changes import near_changes
from mesotron.watch.command import Watcher
from mesotron.watch.log import Log, Stream, Timeline, read_log
from mesotron.watch.metrics import Names
from mesotron.watch.thin import merge

COUNT = 20_000
LENGTH = 40  # rows of a change


def make_rows(count, changes=(), seed=0):
    """A run that learns; `changes` are (metric, first row, rows, value)."""
    draw = random.Random(seed)
    rows = []
    for k in range(count):
        row = {
            "step": float(k),
            "reward": draw.gauss(0.4 + 0.3 * k / count, 0.05),
            "grad_norm": abs(draw.gauss(0.5, 0.1)),
            "frac_reward_zero_std": draw.randrange(5) / 16,
            "completions/clipped_ratio": float(draw.random() < 0.01),
            "num_tokens": 100.0 * k,
        }
        for metric, first, length, value in changes:
            if first <= k < first + length:
                row[metric] = value

        rows.append(row)

    return rows


def thin(rows) -> Log:
    log = Log(Path("a.jsonl"), "jsonl", [])
    timeline = Timeline(log)
    timeline.add(rows)
    timeline.finish()
    return log


def diagnosis_of(log):
    watcher = Watcher(WatchSettings(), Names(log.path))
    watcher.update(log.rows)
    return watcher.diagnosis(log)


@pytest.mark.parametrize("count", [100, log_module.MAX_ROWS - 1])
def test_a_shorter_log_is_read_in_full(count):
    rows = make_rows(count)
    log = thin(rows)
    assert log.rows == rows
    assert not log.notes


def test_a_long_log_without_a_change_is_read_by_few_rows():
    rows = make_rows(COUNT)
    log = thin(rows)
    assert len(log.rows) <= log_module.MAX_ROWS / 2
    assert len(log.notes) == 1

    # Single rows, as they were logged, and the last ones in full.
    assert all(row in rows for row in log.rows[::50])
    assert log.rows[-1000:] == rows[-1000:]


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("reward", 0.0),
        ("grad_norm", 50.0),
        ("reward", math.nan),
        ("completions/clipped_ratio", 1.0),
    ],
)
@pytest.mark.parametrize("first", [3000, 9187, 13_000])
def test_a_short_change_is_read_in_full(metric, value, first):
    log = thin(make_rows(COUNT, [(metric, first, LENGTH, value)]))
    kept = {row["step"] for row in log.rows}

    assert kept >= set(range(first, first + LENGTH))
    assert len(log.rows) <= log_module.MAX_ROWS / 2


def test_a_short_collapse_is_named():
    first = 12_000
    phases = diagnosis_of(thin(make_rows(COUNT, [("reward", first, 60, 0.0)]))).phases

    dead = [phase for phase in phases if phase.condition == "dead"]
    assert len(dead) == 1
    assert abs(dead[0].first - first) <= 10
    assert phases[-1].condition == "healthy"


def test_a_collapse_of_the_last_rows_is_the_verdict():
    diagnosis = diagnosis_of(thin(make_rows(COUNT, [("reward", COUNT - 60, 60, 0.0)])))
    assert diagnosis.condition == "dead"
    assert abs(diagnosis.onset - (COUNT - 60)) <= 100  # by a smoothed reward


def test_too_many_changes_are_bounded():
    changes = [("reward", first, 100, 0.0) for first in range(100, COUNT, 200)]
    log = thin(make_rows(COUNT, changes))
    assert len(log.rows) <= log_module.MAX_ROWS
    assert "too many" in log.notes[0]


def test_values_logged_now_and_then_are_kept():
    rows = make_rows(100)
    rows[1]["eval/accuracy"] = 0.5
    kept, weights = merge(rows, [1] * 100, 10)

    assert weights == [10] * 10
    assert kept[0] == rows[9] | {"eval/accuracy": 0.5}


def test_the_work_grows_with_the_rows(monkeypatch):
    seen = []

    def counting(rows):
        seen.append(len(rows))
        return near_changes(rows)

    monkeypatch.setattr("mesotron.watch.changes.near_changes", counting)
    thin(make_rows(3 * COUNT))
    assert sum(seen) < 2 * 3 * COUNT  # each row is looked at about once


def test_a_resumed_run_goes_back_beyond_the_thinned_rows():
    rows = make_rows(COUNT)
    again = make_rows(COUNT, seed=1)[2000:]
    log = thin([*rows, *again])

    steps = [row["step"] for row in log.rows]
    assert steps == sorted(set(steps))
    assert steps[-1] == COUNT - 1
    assert log.rows[-1] == again[-1]


def test_a_long_log_is_followed(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = make_rows(COUNT)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:9000]))

    growing = Stream(path)
    assert growing.poll() == len(growing.log.rows) < log_module.MAX_ROWS

    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows[9000:]))

    growing.poll()
    assert growing.resumed  # earlier rows were thinned once more
    growing.finish()
    assert growing.log.rows == read_log(path).rows
