"""The picture of a search: gain by rate, and the admitted rates."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mesotron.report import pocket, summary
from mesotron.report.read import Run, read_runs
from mesotron.rlvr.pocket import Choice, Fork, Sampled, Search, to_record
from support.report_worlds import make_run


def fork(factor: float, reward: float, condition: str = "healthy") -> Fork:
    steps = []
    for step in (1, 2):
        rewards = {"a": reward, "b": reward + 0.1 * step}
        steps.append(Sampled(step=step, travelled=factor * step, rewards=rewards, drift={}))

    return Fork(
        factor=factor,
        rate=1e-3 * factor,
        planned=10 * factor,
        steps=tuple(steps),
        conditions=(condition,),
    )


FORKS = (fork(0.25, 0.1), fork(1.0, 0.3), fork(16.0, 0.9, "dead"))
CHOICE = Choice(factor=1.0, rate=1e-3, why="it works", admitted=(0.25, 1.0))
SEARCH = Search(step=0, forks=FORKS, choice=CHOICE)


def test_the_chart_has_gains_the_dead_and_the_pocket():
    chart = pocket.make_chart(SEARCH)
    gains, dead, shade = chart.lines

    assert gains.x == [0.25e-3, 1e-3]
    assert gains.mean == pytest.approx([0.0, 0.2])
    assert dead.x == [16e-3]
    assert dead.dots == "crosses"
    assert shade.x[0] < 0.25e-3
    assert 1e-3 < shade.x[1] < 16e-3
    assert "it works" in chart.note


def test_the_table_names_the_choice():
    rows = pocket.forks_table((SEARCH,))["rows"]
    chosen = [row[1]["text"] for row in rows if row[-1]["text"] == "chosen"]

    assert chosen == ["0.001"]
    assert len(rows) == 3


def test_only_finished_searches_of_training_runs_are_read(tmp_path: Path):
    config = {"recipe": "arith", "rollout": {}, "objective": {}}
    run = Run("a", tmp_path, [], config)
    assert pocket.searches_of(run) == ()

    record = to_record([SEARCH, Search(step=10)])
    (tmp_path / "pocket.json").write_text(json.dumps(record))
    assert pocket.searches_of(run) == (SEARCH,)

    (tmp_path / "pocket.json").write_text('{"searches": [1]}')
    with pytest.raises(ValueError, match="damaged"):
        pocket.searches_of(run)


def test_the_summary_names_the_rate_that_was_found(tmp_path: Path):
    run = make_run(tmp_path / "a")
    run.save("pocket", to_record([replace(SEARCH, choice=replace(CHOICE, rate=0.0123))]))
    (read,) = read_runs([run.path])

    assert "at rate 0.0123 (" in summary.summarize_run(read)[0]
