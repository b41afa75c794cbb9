"""The VLA study's plan goes all the way to its finals, and chooses as its page says."""

import math
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "vla"
pytestmark = pytest.mark.usefixtures("beside_scripts")


@pytest.fixture
def given(tmp_path):
    from study import fill_in, make_parser

    words = [
        "--out",
        str(tmp_path),
        "--state",
        str(tmp_path),
        "--small",
        "100",
        "--full",
        "400",
        "--long",
        "900",
    ]
    return fill_in(make_parser().parse_args(words))


BEST = {"adamw": 1e-4, "muon": 5e-3, "muon_pion": 5e-3, "pion": 0.02, "muon_low_rank": 5e-3}


def finish(cell: dict, learned: bool = True) -> dict:
    """A cell as if trained: the nearer to its best rate and the longer, the better."""
    away = abs(math.log2(cell["rate"] / BEST[cell["contender"]]))
    loss = 0.3 + 0.05 * away
    success = max(0.0, 0.6 - 0.1 * away + 0.1 * (cell["steps"] > 100)) if learned else 0.05
    step = {"noise": 0.2, "k_p=0": 0.001}.get(cell["strength"], 0.1) * cell["action_scale"]
    half = {"action_to_vision": 0.8 if cell["contender"] == "muon" else step}
    probes = [{"step": k} for k in range(7)] if cell["seed"] == 0 and cell["steps"] == 400 else []
    return cell | {"loss": loss, "validation": success, "test": success, "wrong": 0.01,
                   "losses": [[1, 1.0]], "half": half, "probes": probes}  # fmt: skip


def run(given, learned: bool = True) -> dict[str, dict]:
    """Every cell, one after another, in the plan's order."""
    from plan import key_of, plan

    done: dict[str, dict] = {}
    while left := [cell for cell in plan(given, done) if key_of(cell) not in done]:
        done[key_of(left[0])] = finish(left[0], learned)
    return done


def test_a_best_rate_lies_inside_its_grid(given):
    from plan import of, small_rate

    done = run(given)
    for name in ("adamw", "muon", "muon_pion", "pion"):
        tried = sorted(of(done, "l1", name, 100))
        best = small_rate(given, done, "l1", name)
        assert tried[0] < best < tried[-1], name
        assert best == pytest.approx(BEST[name], rel=0.5)
    assert min(of(done, "l1", "adamw", 100)) < 1e-4  # its grid began at 2.5e-4


def test_everybody_has_three_seeds_at_both_budgets_and_the_first_head_comes_first(given):
    done = list(run(given).values())
    for head in ("l1", "flow"):
        for name in ("adamw", "muon", "muon_pion", "pion"):
            for steps in (100, 400):
                seeds = {
                    cell["seed"]
                    for cell in done
                    if (cell["head"], cell["contender"], cell["steps"]) == (head, name, steps)
                }
                assert seeds == {0, 1, 2}
    heads = [cell["head"] for cell in done]
    last_final = max(k for k, c in enumerate(done) if c["head"] == "l1" and c["strength"] == "noise"
                     and c["action_scale"] == 1)  # fmt: skip
    assert "flow" not in heads[:last_final]
    assert [c["seed"] for c in done if c["contender"] == "muon_low_rank"] == [0, 1, 2]


def test_strengths_are_also_tried_at_muons_step(given):
    done = run(given)
    scales = {c["strength"]: c["action_scale"] for c in done.values() if c["action_scale"] != 1}
    assert set(scales) == {"k_p=0", "k_p=1", "k_p=2", "k_p=3", "k_p=4", "noise"}
    assert scales["noise"] == pytest.approx(0.8 / 0.2)
    assert scales["k_p=0"] == 16  # nothing cannot be matched


def test_the_best_trains_longer_unless_it_is_good_enough(given, monkeypatch):
    import plan

    long = [c for c in run(given).values() if c["steps"] == 900]
    assert {c["contender"] for c in long} == {"muon"}
    assert len(long) == 3
    monkeypatch.setattr(plan, "ENOUGH", 0.5)
    assert not [c for c in run(given).values() if c["steps"] == 900]


def test_the_loss_chooses_where_nobody_succeeds(given):
    from plan import preference

    lucky = {"validation": 0.1, "loss": 0.5}
    better = {"validation": 0.02, "loss": 0.3}
    able = {"validation": 0.4, "loss": 0.9}
    assert max([lucky, better], key=preference([lucky, better])) is better
    assert max([lucky, better, able], key=preference([lucky, better, able])) is able
    assert len(run(given, learned=False)) > 60


def test_the_study_takes_up_what_the_pilot_found(tmp_path):
    import json

    from study import DEFAULTS, fill_in, make_parser

    found = {"graph": False, "rates": {"aux": 0.01}, "budgets": {"small": 7, "full": 9}}
    (tmp_path / "object10.pilot.json").write_text(json.dumps(found))
    words = ["--out", str(tmp_path), "--state", str(tmp_path), "--full", "50"]
    given = fill_in(make_parser().parse_args(words))
    assert (given.graph, given.aux, given.aux_adamw) == (False, 0.01, 3e-3)
    long = DEFAULTS["object10"]["long"]
    assert (given.small, given.full, given.long) == (7, 50, long)  # what was said goes first
    assert not given.alone


def test_what_would_not_be_finished_is_not_begun():
    import time

    from pace import Pace

    pace = Pace(time.time() + 1000, alone=True)
    cell = {"contender": "muon", "steps": 100, "train_seconds": 100.0, "seconds": 110.0}
    assert pace.choose([cell], busy=set()) is cell
    assert pace.choose([cell], busy={"another"}) is None, "the first one compiles for all"
    pace.note(cell)
    assert pace.choose([cell | {"steps": 2000}, cell], busy={"another"}) is cell
    assert pace.choose([cell | {"contender": "muon_low_rank"}], busy=set()) is None


def test_a_pilot_chooses_the_budgets():
    from pilot import choose

    curve = [{"steps": s, "success": p} for s, p in ((400, 0.1), (800, 0.45), (1600, 0.9),
                                                     (3200, 0.96))]  # fmt: skip
    assert choose(curve, 1e6) == {"small": 533, "full": 1600, "long": 3200}
    short = choose(curve, 43_000)  # a full budget of 1,000 steps fits
    assert short == {"small": 333, "full": 1000, "long": 3200}
    assert choose(curve[:1], 1e6) == {}
    assert choose([{"steps": 400, "success": 0.6}], 1e6) == {
        "small": 266,
        "full": 800,
        "long": 1600,
    }


def test_the_page_tells_of_every_cell(given, tmp_path, capsys):
    import json

    import page

    cells = list(run(given).values())
    for cell in cells:
        for probe in cell["probes"]:
            probe |= {f"gradient/{part}/{name}": 1.0 for part in page.PARTS
                      for name in ("effective_rank", "top_share", "snr")}  # fmt: skip
        cell["half"] |= {"passed_rank": 2.0, "dead_blocks": 0.0}
    settings = {"small": 100, "full": 400, "long": 900, "world": "object10", "test": 20}
    facts = {"expert": {"tasks": {name: {} for name in "abcdefghij"}}}
    path = tmp_path / "object10.json"
    path.write_text(json.dumps({"settings": settings, "facts": facts, "cells": cells}))
    page.write(path)
    shown = capsys.readouterr().out
    for words in ("| l1 | Muon |", "| flow | AdamW |", "k_p=0", "low rank", "900 steps"):
        assert words in shown, words
    for name in ("rates", "gradients", "learning"):
        assert (tmp_path / f"object10_{name}.png").stat().st_size > 1000


def test_standard_errors_of_a_difference_by_hand():
    from page import errors

    # 0.5 * 0.5 / 200 twice, and (0.02 + 0) / 2
    assert errors([0.4, 0.6], [0.5, 0.5], episodes=100) == ["0.050", "0.100"]
    assert errors([0.4, 0.6], [0.5], episodes=100) == ["0.061", ""]
