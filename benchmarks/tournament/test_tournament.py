"""The tournament's tasks share no instance between splits, and its plan follows the protocol."""

import numpy as np
import pytest

from benchmarks._lib.results import write_json
from benchmarks._lib.rows import distinct, values, where
from benchmarks.tournament import warm
from benchmarks.tournament.__main__ import read_cells
from benchmarks.tournament.analyse import compare
from benchmarks.tournament.cells import area
from benchmarks.tournament.plan import (
    CONTENDERS,
    PARTS,
    REPORTING_SEEDS,
    TUNING_SEEDS,
    highest_stable,
    key_of,
    make,
    plan,
)
from benchmarks.tournament.tasks import SIZES, TASKS, make_task

SLOW = {"words", "spell", "countdown"}


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW)) for one in TASKS]
)
def test_splits_share_no_instance(name):
    if name in ("spell", "countdown"):
        pytest.importorskip("reasoning_gym")

    made = make_task(name)
    keys = {}
    for split, rows in made.items():
        assert len(rows) == SIZES[split]
        keys[split] = set(values(rows, "key"))

    assert not keys["train"] & keys["test"]
    assert not keys["train"] & keys["validation"]
    assert not keys["validation"] & keys["test"]


def run_all(parts, accuracy):
    """Finish the plan with invented results; the finished cells and their order."""
    done = {}
    order = []
    while True:
        new = [cell for cell in plan(parts, done) if key_of(cell) not in done]
        if not new:
            return done, order

        for cell in new:
            value = accuracy(cell)
            done[key_of(cell)] = cell | {"accuracy": value, "stable": value > 0.2}
            order.append(cell)


def test_every_contender_has_the_same_search_and_reports_at_its_best_rate():
    def accuracy(cell):
        middle = CONTENDERS[cell["contender"]].middle
        return {1: 0.5, 2: 0.6, 4: 0.5}.get(cell["rate"] / middle, 0.0)

    done, order = run_all(PARTS, accuracy)
    reports = where(order, use="reporting")
    assert len(reports) == len(TASKS) * len(CONTENDERS) * len(REPORTING_SEEDS)
    for cell in reports:
        assert cell["rate"] == 2 * CONTENDERS[cell["contender"]].middle

    assert distinct(where(order, use="tuning"), "seed") == list(TUNING_SEEDS)
    assert highest_stable(tuple(TASKS), "muon", done) is None  # the smallest rate was not stable


def test_stable_rates_are_searched_upward_and_do_not_choose():
    done, order = run_all(PARTS, lambda cell: 0.5 - abs(cell["rate"] / 5e-5 - 1) / 1e3)
    rates = values(where(order, task="sums", contender="muon"), "rate")
    assert max(rates) == pytest.approx(5e-5 * 2**4)  # the grid's end is 2^1
    assert highest_stable(tuple(TASKS), "muon", done) == 4
    assert distinct(where(order, use="reporting", contender="muon"), "rate") == [5e-5]


def test_area_of_a_broken_run_ends_at_zero():
    assert area([(0, 0.2), (50, 0.4), (100, 0.6)], 100, 0.6) == pytest.approx(0.4)
    assert area([(0, 0.2)], 100, 0.0) == pytest.approx(0.001)


def test_a_win_needs_significance_a_lead_and_three_tasks():
    rng = np.random.default_rng(0)
    noise = {name: 0.01 * rng.standard_normal((4, 5)) for name in ("a", "b", "c")}
    X = {"a": 0.5 + noise["a"], "b": 0.4 + noise["b"], "c": 0.49 + noise["c"]}
    X["b"][:2] += 0.15  # ahead of a on two tasks, far behind on the others
    X["b"][2:] -= 0.25
    assert not any(pair.wins for pair in compare(X))

    X["b"] = 0.4 + noise["b"]
    found = {(pair.first, pair.second): pair for pair in compare(X)}
    assert found["a", "b"].wins
    assert found["c", "b"].wins
    assert not found["a", "c"].wins  # a lead below 0.02
    assert found["a", "b"].low < 0.1 < found["a", "b"].high


def test_a_start_is_the_merged_model_with_all_weights_trainable(tmp_path):
    peft = pytest.importorskip("peft")
    from safetensors.torch import save_file

    plain, _ = warm.start("tiny", None, "cpu")
    before = {name: p.clone() for name, p in plain.named_parameters()}

    weights = peft.get_peft_model_state_dict(warm.with_adapter(plain))
    save_file({name: value + 0.01 for name, value in weights.items()}, tmp_path / warm.FILE)
    model, _ = warm.start("tiny", tmp_path / warm.FILE, "cpu")
    after = dict(model.named_parameters())

    assert after.keys() == before.keys()
    for name, p in after.items():
        assert p.requires_grad
        has_moved = not before[name].equal(p)
        assert has_moved == ("_proj" in name)


def test_a_start_that_is_there_is_not_made_again_and_named_if_it_is_not_the_protocols(tmp_path):
    path = warm.adapter_of("sums", tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"other weights")
    said = []

    assert warm.make("sums", "no such model", tmp_path, said.append) == path
    (line,) = said
    assert warm.hash_of(path) in line


def test_runs_are_read_from_files_and_folders(tmp_path):
    cells = [make("tuning", "sums", "muon", 0, seed) for seed in (100, 101, 102)]
    write_json(cells[:2], tmp_path / "cells.json.gz")
    write_json(cells[2], tmp_path / "cells" / "third.json")
    found = read_cells([tmp_path / "cells.json.gz", tmp_path / "cells"])

    assert list(found.values()) == cells
