"""The long horizon's rule of survival, and the command line of its runs."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks._lib.results import write_json
from benchmarks.self_labelled.run import (
    CONTENDERS,
    MethodCell,
    command,
    is_over,
    kept,
    read_known,
    two_best,
)
from mesotron.cli import COMMANDS, parse
from mesotron.config import TrainConfig
from mesotron.recipes import make_recipe
from mesotron.rlvr.objectives import resolve


def read(typed: list[str]) -> TrainConfig:
    return parse(TrainConfig, typed[4:], "mesotron train", COMMANDS["train"].presets)


def test_a_run_keeps_the_last_mean_of_four_over_the_best():
    assert kept([0.5] * 8) == pytest.approx(1.0)
    assert kept([0.2, 0.5, 0.5, 0.5, 0.5, 0.3, 0.3, 0.3, 0.3]) == pytest.approx(0.6)
    assert kept([0.5, 0.1, 0.5, 0.5, 0.5, 0.5, 0.1]) == pytest.approx(0.8)  # one dip of four


@pytest.mark.parametrize("name", CONTENDERS)
def test_methods_of_the_long_horizon_are_valid_commands(name, tmp_path):
    warm = Path("warm")
    given = argparse.Namespace(out=tmp_path, warm=warm, device="cpu", steps=1500, prompts=32)
    config = read(command(MethodCell(name, 1e-5, 120), given))
    assert (config.objective.beta == 0) == (config.objective.name == "grpo")
    assert config.model.name == "warm"


def test_the_recipe_is_the_method_that_lasts(tmp_path):
    given = argparse.Namespace(out=tmp_path, warm=None, device="cpu", steps=1500, prompts=8)
    ran = read(command(MethodCell("sure_open_skip", 3e-4, 273), given))
    recipe = make_recipe("arith_self_labeled")
    for part in ("steps", "eval_every", "task", "reward", "optim", "rollout"):
        assert getattr(recipe, part) == getattr(ran, part)

    assert resolve(recipe.objective, 8) == resolve(ran.objective, 8)


def test_survivors_come_first_and_gold_labels_do_not_count():
    def run(name, kept, end):
        return {"contender": name, "kept": kept, "greedy": [(25 * k, end) for k in range(5)]}

    found = [
        run("grpo", 1.0, 0.9),
        run("vote", 0.5, 0.8),
        run("mgrpo", 0.96, 0.5),
        run("sure", 0.99, 0.6),
    ]
    assert two_best(found) == ["sure", "mgrpo"]


@pytest.mark.parametrize(("last", "over"), [(0.3, True), (0.45, False)])
def test_a_run_below_its_best_by_a_fifth_is_over(tmp_path, last, over):
    values = [0.5] * 4 + [last] * 4 + [0.6] * 4
    rows = [{"step": 25 * k, "eval/greedy": value} for k, value in enumerate(values)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert is_over(tmp_path) == over


def test_runs_that_are_over_are_taken_from_an_earlier_result(tmp_path):
    flat = [[k, 0.5] for k in range(8)]
    fallen = [[k, 0.5 - 0.05 * k] for k in range(8)]
    common = {"lr": 1e-5, "seed": 120}
    runs = [
        common | {"contender": "vote", "steps": 8, "greedy": flat},
        common | {"contender": "slow", "steps": 5, "greedy": flat},
        common | {"contender": "sure", "steps": 5, "greedy": fallen},
    ]

    path = tmp_path / "result.json.gz"
    write_json(runs, path)
    assert {cell.contender for cell in read_known(path, 8)} == {"vote", "sure"}
    assert read_known(None, 8) == {}
