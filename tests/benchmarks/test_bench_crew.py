"""A crew of real processes: what fails, dies or is given back is told of and ends nobody else."""

import os
import time

import pytest

from mesotron.bench.crew import Crew, do_cells

CELLS = [{"name": name} for name in ("good", "broken", "deadly", "late", "better")]


def work(settings, number, line, deadline):
    def run(cell):
        if cell["name"] == "broken":
            raise RuntimeError("no such thing")
        if cell["name"] == "deadly":
            os._exit(1)
        return None if cell["name"] == "late" else cell | {"by": settings["who"]}

    do_cells(line, run)


def play(cells, seconds=120.0, size=2):
    """What became of the cells, by name."""
    found: dict[str, tuple] = {}
    ends = time.time() + seconds
    crew = Crew(size, work, {"who": "us"}, lambda cell: cell["name"], deadline=ends, grace=0.0)

    def following(busy):
        return next((c for c in cells if c["name"] not in busy | set(found)), None)

    crew.work_through(following, lambda key, cell, error: found.update({key: (cell, error)}))
    assert_gone(crew)
    return found


def assert_gone(crew):
    for process, _ in crew.members:
        process.join(timeout=60)
        assert not process.is_alive()


def test_every_cell_is_told_of_and_none_ends_the_others():
    found = play(CELLS)
    assert found["good"] == ({"name": "good", "by": "us"}, "")
    assert found["better"][0] == {"name": "better", "by": "us"}
    cell, error = found["broken"]
    assert cell is None
    assert error.strip().endswith("RuntimeError: no such thing")
    assert found["deadly"] == (None, "the process died")
    assert found["late"] == (None, "")


def test_nothing_is_begun_when_the_time_is_up():
    assert play(CELLS, seconds=-1.0) == {}


def test_an_error_of_the_study_lets_the_processes_go():
    crew = Crew(1, work, {"who": "us"}, lambda cell: cell["name"], time.time() + 120, grace=0.0)

    def take(key, cell, error):
        raise KeyError(key)

    with pytest.raises(KeyError, match="good"):
        crew.work_through(lambda busy: None if busy else CELLS[0], take)
    assert_gone(crew)
