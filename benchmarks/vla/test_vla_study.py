"""The VLA study's plan reaches its finals and chooses as its page says."""

import math
import time

import pytest

from benchmarks._lib.results import write_json
from benchmarks._lib.rows import values, where
from benchmarks.vla import page
from benchmarks.vla import plan as planning
from benchmarks.vla.pace import Pace
from benchmarks.vla.pilot import choose
from benchmarks.vla.plan import key_of, of, plan, preference, small_rate
from benchmarks.vla.study import DEFAULTS, fill_in, make_parser

BEST = {
    "adamw": 1e-4,
    "muon": 5e-3,
    "muon_pion": 5e-3,
    "pion": 0.02,
    "muon_low_rank": 5e-3,
}


@pytest.fixture
def given(tmp_path):
    arguments = f"--out {tmp_path} --state {tmp_path} --small 100 --full 400 --long 900"
    return fill_in(make_parser().parse_args(arguments.split()))


def finish(cell: dict, learned: bool = True) -> dict:
    """A cell as if trained: better the closer to its best rate and the longer."""
    away = abs(math.log2(cell["rate"] / BEST[cell["contender"]]))
    success = 0.05
    if learned:
        success = max(0.0, 0.6 - 0.1 * away + 0.1 * (cell["steps"] > 100))

    step = {"noise": 0.2, "k_p=0": 0.001}.get(cell["strength"], 0.1) * cell["action_scale"]
    ratio = 0.8 if cell["contender"] == "muon" else step
    is_probed = cell["seed"] == 0 and cell["steps"] == 400
    return cell | {
        "loss": 0.3 + 0.05 * away,
        "validation": success,
        "test": success,
        "wrong": 0.01,
        "losses": [[1, 1.0]],
        "half": {"action_to_vision": ratio, "passed_rank": 2.0, "dead_blocks": 0.0},
        "probes": [probe(step) for step in range(7)] if is_probed else [],
    }


def probe(step: int) -> dict:
    """Gradient statistics of every part."""
    found = {"step": step}
    for part in page.PARTS:
        for name in page.MEASURES:
            found[f"gradient/{part}/{name}"] = 1.0
    return found


def run(given, learned: bool = True) -> dict[str, dict]:
    done: dict[str, dict] = {}
    while True:
        left = []
        for cell in plan(given, done):
            if key_of(cell) not in done:
                left.append(cell)

        if not left:
            return done
        done[key_of(left[0])] = finish(left[0], learned)


def test_every_contender_reports_its_best_rate_on_all_seeds(given):
    done = run(given)
    for name in ("adamw", "muon", "muon_pion", "pion"):
        tried = sorted(of(done, "l1", name, 100))
        best = small_rate(given, done, "l1", name)
        assert tried[0] < best < tried[-1], name  # inside the grid
        assert best == pytest.approx(BEST[name], rel=0.5)

        for head in ("l1", "flow"):
            for steps in (100, 400):
                own = where(done.values(), head=head, contender=name, steps=steps)
                assert set(values(own, "seed")) == {0, 1, 2}


def test_strengths_are_tried_with_a_step_as_large_as_muons(given):
    cells = run(given).values()
    scales = {}
    for c in cells:
        if c["action_scale"] != 1:
            scales[c["strength"]] = c["action_scale"]

    assert set(scales) == set(planning.STRENGTHS)
    assert scales["noise"] == pytest.approx(0.8 / 0.2)
    assert scales["k_p=0"] == 16  # the cap


def test_the_best_trains_longer_unless_it_was_good_enough(given, monkeypatch):
    longest = where(run(given).values(), steps=900)
    assert values(longest, "contender") == ["muon"] * 3

    monkeypatch.setattr(planning, "ENOUGH", 0.5)
    assert not where(run(given).values(), steps=900)


def test_the_loss_chooses_where_no_policy_succeeds():
    lucky = {"validation": 0.1, "loss": 0.5}
    better = {"validation": 0.02, "loss": 0.3}
    able = {"validation": 0.4, "loss": 0.9}

    assert max([lucky, better], key=preference([lucky, better])) is better
    assert max([lucky, better, able], key=preference([lucky, better, able])) is able


def test_pilot_results_are_defaults_and_flags_win(tmp_path):
    pilot = {"graph": False, "rates": {"aux": 0.01}, "budgets": {"small": 7, "full": 9}}
    write_json(pilot, tmp_path / "object10.pilot.json")
    arguments = ["--out", str(tmp_path), "--state", str(tmp_path), "--full", "50"]
    given = fill_in(make_parser().parse_args(arguments))

    assert (given.graph, given.aux, given.aux_adamw) == (False, 0.01, 3e-3)
    assert (given.small, given.full, given.long) == (7, 50, DEFAULTS["object10"]["long"])


def test_a_cell_that_would_not_finish_is_not_started():
    pace = Pace(time.time() + 1000, alone=True)
    cell = {"contender": "muon", "steps": 100, "train_seconds": 100.0, "seconds": 110.0}
    assert pace.choose([cell], busy=set()) is cell
    assert pace.choose([cell], busy={"another"}) is None  # the first one compiles for all

    pace.note(cell)
    assert pace.choose([cell | {"steps": 2000}, cell], busy={"another"}) is cell
    assert pace.choose([cell | {"contender": "muon_low_rank"}], busy=set()) is None


def test_a_pilot_chooses_the_budgets():
    points = ((400, 0.1), (800, 0.45), (1600, 0.9), (3200, 0.96))
    curve = [{"steps": s, "success": p} for s, p in points]
    assert choose(curve, 1e6) == {"small": 533, "full": 1600, "long": 3200}
    assert choose(curve, 43_000) == {"small": 333, "full": 1000, "long": 3200}
    assert choose(curve[:1], 1e6) == {}


@pytest.mark.slow
def test_the_page_has_every_part(given, tmp_path, capsys):
    settings = {"small": 100, "full": 400, "long": 900, "world": "object10", "test": 20}
    facts = {"expert": {"tasks": {name: {} for name in "abcdefghij"}}}
    cells = list(run(given).values())
    path = tmp_path / "object10.json.gz"
    write_json({"settings": settings, "facts": facts, "cells": cells}, path)
    page.write(path)

    shown = capsys.readouterr().out
    for cell in ("| l1 | Muon |", "| flow | AdamW |", "k_p=0"):
        assert cell in shown, cell

    for name in ("rates", "gradients", "learning"):
        assert (tmp_path / f"object10_{name}.png").stat().st_size > 1000


def test_standard_errors_of_a_difference():
    # 0.5 * 0.5 / 200 twice, and (0.02 + 0) / 2
    assert page.errors([0.4, 0.6], [0.5, 0.5], episodes=100) == ["0.050", "0.100"]
    assert page.errors([0.4, 0.6], [0.5], episodes=100) == ["0.061", ""]
