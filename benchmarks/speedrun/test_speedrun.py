"""The speedrun at a tiny size: both kinds of contender race, and are timed."""

import time
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks._lib.results import read_json
from benchmarks.speedrun import draw, protocol, racing
from benchmarks.speedrun.contenders import Contestant, make_config
from benchmarks.speedrun.entries import ARMS, NAMES
from benchmarks.speedrun.stopwatch import PHASES, measure
from mesotron.recipes import make_recipe
from mesotron.rlvr.train import check

GIVEN = {
    "model": "tiny",
    "small": True,
    "common": [],
    "every": 0.0,
    "target": 2.0,
}


def test_every_contender_is_a_valid_config():
    configs = {name: make_config(name, 3, None, small=False) for name in NAMES}
    for config in configs.values():
        check(config)
        assert config.seed == 3
        assert config.task == configs["stock"].task
        assert config.reward == configs["stock"].reward

    assert not configs["stock"].rollout.fast
    assert configs["recorded"].rollout.fast


def test_the_recipe_is_the_fastest_that_arrived_on_all_tuning_seeds():
    task = ["reward.parts=two_part,near,overlong", "reward.overlong_buffer=1"]
    raced = make_config("ours_16", 1, None, False, task)
    recipe = replace(make_recipe("arith_smollm2_fast"), seed=1)

    assert replace(raced, recipe="arith_smollm2_fast") == recipe


def test_the_page_gives_the_steps_to_the_target():
    folder = Path(protocol.__file__).parent
    runs = read_json(folder / "report.json.gz")
    for alone in (False, True):
        chosen = [
            run
            for run in runs
            if (run["name"], run["use"]) == ("ours_16", "reporting")
            and run.get("alone", False) == alone
        ]

        curves = [list(zip(*(row[:2] for row in run["curve"]))) for run in chosen]
        steps = [draw.seconds_to(protocol.TARGET, *curve) for curve in curves]
        assert f"| {', '.join(map(str, steps))} |" in (folder / "README.md").read_text()


@pytest.mark.slow
def test_plain_trl_in_micro_batches_makes_whole_steps(tmp_path):
    whole, cut = (
        make_config(
            "stock",
            0,
            "tiny",
            True,
            x,
        )
        for x in ([], ["rollout.micro_batch=8"])
    )

    args = [
        Contestant("stock", config, tmp_path / str(k)).trainer.args
        for k, config in enumerate((whole, cut))
    ]

    sizes = [(x.per_device_train_batch_size, x.gradient_accumulation_steps) for x in args]
    assert sizes == [(16, 1), (8, 2)]


@pytest.mark.slow
def test_the_twin_of_plain_trl_makes_the_same_updates(tmp_path, monkeypatch):
    """With TRL's sampler, which draws other numbers than ours."""
    common = [*protocol.COMMON, "task.format=boxed"]
    ends = {}  # what the tiny model can
    for name in ("stock_8e-05_400", "twin_8e-05_400"):
        short = {
            "optim.lr": 1e-3,
            "steps": 4,
            "rollout.fast": False,
        }

        monkeypatch.setitem(NAMES, name, NAMES[name] | short)
        config = make_config(name, 5, "tiny", True, common)
        trainer = Contestant(name, config, tmp_path / name).trainer
        start = torch.nn.utils.parameters_to_vector(trainer.model.parameters()).clone()
        trainer.train()
        end = torch.nn.utils.parameters_to_vector(trainer.model.parameters())
        ends[name] = end.detach() - start.detach()

    stock, twin = ends.values()
    assert stock.norm() > 0.1
    assert (stock - twin).norm() < 1e-3 * stock.norm()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stock", "muon"])
def test_a_race_counts_training_time_only(tmp_path, name):
    row = racing.race(
        name,
        0,
        tmp_path,
        60.0,
        GIVEN | {"limit": 0.5},
    )

    assert row["seconds_to_target"] is None
    assert [point["step"] for point in row["curve"]] == list(range(row["steps"] + 1))

    won = racing.race(
        name,
        0,
        tmp_path / "won",
        60.0,
        GIVEN | {"limit": 0.5, "target": 0.0},
    )

    assert won["steps"] == 1
    assert won["seconds_to_target"] == pytest.approx(won["first_step_s"])


@pytest.mark.slow
def test_parallel_runs_count_steps_at_the_given_pace_and_end_with_their_schedule(
    tmp_path, monkeypatch
):
    given = GIVEN | {"limit": 130.0, "pace": (100.0, 20.0)}
    row = racing.race("muon", 0, tmp_path, 60.0, given)
    assert [point["seconds"] for point in row["curve"]] == [0.0, 100.0, 120.0, 140.0]

    falling = NAMES["muon"] | {"steps": 3, "optim.schedule": "linear"}
    monkeypatch.setitem(NAMES, "falling", falling)
    row = racing.race(
        "falling", 0, tmp_path / "falling", 60.0, GIVEN | {"every": 1e9, "limit": 1e9}
    )

    assert [point["step"] for point in row["curve"]] == [0, 3]


def test_evaluations_stop_the_clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(racing, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow:
        def accuracy(self):
            now[0] += 100.0
            return 0.5

    clock = racing.Clock(
        Slow(),
        every=2.0,
        target=0.9,
        seconds=5.0,
        deadline=1e9,
    )

    control = types.SimpleNamespace(should_training_stop=False)
    clock.on_train_begin()

    for step in (1, 2, 3, 4):
        now[0] += 1.5
        clock.on_step_end(None, types.SimpleNamespace(global_step=step), control)
        assert control.should_training_stop == (step == 4)

    seconds = {point["step"]: point["seconds"] for point in clock.curve}
    assert seconds == {0: 0.0, 2: 3.0, 4: 6.0}
    assert clock.row()["settled_step_s"] == 1.5
    assert not clock.row()["cut_short"]

    clock.deadline = now[0]
    now[0] += 1.5
    clock.on_step_end(None, types.SimpleNamespace(global_step=5), control)

    assert clock.row()["cut_short"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stock", "muon"])
def test_phases_add_up_to_the_step(tmp_path, name):
    given = {
        "model": "tiny",
        "small": True,
        "common": ["task.few_shot=1"],
        "warm": 1,
        "count": 2,
    }

    row = measure(name, tmp_path, 60.0, given)
    expected = set(PHASES) - ({"clip", "log"} if name == "stock" else set())
    assert expected <= row["phases_ms"].keys()
    assert min(row["phases_ms"].values()) > -1.0
    assert sum(row["first_phases_ms"].values()) == pytest.approx(row["first_ms"])


def test_every_arm_reports_the_best_of_its_search_on_other_seeds():
    done = {}
    wanted = {arm: names[0] for arm, names in protocol.REPORTED.items()}
    for _ in range(5):
        for cell in list(protocol.plan(list(ARMS), done)):
            reached = 80.0 if cell["name"] == wanted[cell["arm"]] else None
            done[protocol.key_of(cell)] = cell | {"seconds_to_target": reached, "last": 0.8}

    for arm, runs in (("ours", 5), ("trl", 19)):
        mine = [cell for cell in done.values() if cell["arm"] == arm]
        tuned = [cell["seed"] for cell in mine if cell["use"] == "tuning"]
        assert len(tuned) == runs
        assert all(100 <= seed < 200 for seed in tuned)

        reports = [cell for cell in mine if cell["use"] == "reporting"]
        assert {cell["name"] for cell in reports} == {wanted[arm]}
        assert [cell["seed"] for cell in reports] == list(protocol.REPORTING_SEEDS[arm])


def test_a_configuration_of_ours_that_failed_on_a_tuning_seed_is_not_reported():
    done = {}
    for cell in list(protocol.plan(["ours"], done)):
        reached = None if cell["seed"] == 113 else 80.0
        done[protocol.key_of(cell)] = cell | {"seconds_to_target": reached, "last": 0.8}

    assert {cell["use"] for cell in protocol.plan(["ours"], done)} == {"tuning"}
    assert any(cell["arm"] == "trl" for cell in protocol.plan(list(ARMS), done))


def test_the_table_compares_with_the_end_of_a_baseline_that_does_not_arrive():
    ours, stock = (names[0] for names in protocol.REPORTED.values())
    paces = {protocol.shape_of(n): p for n, p in ((ours, [2, 1]), (stock, [3, 2]))}

    def ran(arm, name, seed, reached):
        cell = protocol.make("reporting", arm, name, seed)
        return cell | {
            "seconds_to_target": reached,
            "steps": 30,
            "pace": [10.0, 10.0],
        }

    cells = [ran("ours", ours, seed, 100.0) for seed in protocol.REPORTING_SEEDS["ours"]]
    cells += [ran("trl", stock, seed, None) for seed in protocol.REPORTING_SEEDS["trl"]]
    shown = protocol.report({protocol.key_of(cell): cell for cell in cells}, paces)

    assert "| 10 of 10 | 11.0 |" in shown
    assert "| 0 of 5 | inf |" in shown
    assert f"ours / trl: {11 / (3 + 29 * 2):.3f}" in shown


@pytest.mark.slow
def test_a_reported_run_arrives_with_two_evaluations(monkeypatch):
    monkeypatch.setattr(protocol, "TARGET", 0.0)
    monkeypatch.setattr(protocol, "EVERY_STEPS", 1)
    name = next(iter(ARMS["trl"]))

    settings = {
        "paces": {protocol.shape_of(name): [3.0, 0.5]},
        "model": "tiny",
        "small": True,
    }

    cell = protocol.make("reporting", "trl", name, 210)
    row = protocol.run_cell(cell, settings | {"protocol": "x"}, time.time() + 300)
    assert [point["seconds"] for point in row["curve"]] == [0.0, 3.0]
    assert row["seconds_to_target"] == 0.0  # the first of two at or above the target
    assert row["protocol"] == "x"
