"""The speedrun at a tiny size: both kinds of contender race, and are timed."""

import time
import types
from dataclasses import replace
from pathlib import Path

import pytest
from torch.nn.utils import parameters_to_vector

from benchmarks._lib.results import read_json
from benchmarks._lib.rows import by_key, distinct, values, where
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
    page = (folder / "details.md").read_text()
    runs = read_json(folder / "report.json.gz")
    reported = where(runs, name="ours_16", use="reporting")
    for chosen in (where(reported, alone=None), where(reported, alone=True)):
        steps = []
        for run in chosen:
            at = [point[0] for point in run["curve"]]
            scores = [point[1] for point in run["curve"]]
            steps.append(draw.seconds_to(protocol.TARGET, at, scores))
        assert f"| {', '.join(map(str, steps))} |" in page


@pytest.mark.slow
def test_plain_trl_in_micro_batches_makes_whole_steps(tmp_path):
    def sizes(name, common):
        config = make_config("stock", 0, "tiny", True, common)
        args = Contestant("stock", config, tmp_path / name).trainer.args
        return args.per_device_train_batch_size, args.gradient_accumulation_steps

    assert sizes("whole", []) == (16, 1)
    assert sizes("cut", ["rollout.micro_batch=8"]) == (8, 2)


@pytest.mark.slow
def test_the_twin_of_plain_trl_makes_the_same_updates(tmp_path, monkeypatch):
    """With TRL's sampler, which draws other numbers than ours."""
    common = [*protocol.COMMON, "task.format=boxed"]  # what the tiny model can
    short = {"optim.lr": 1e-3, "steps": 4, "rollout.fast": False}

    def change_of(name):
        monkeypatch.setitem(NAMES, name, NAMES[name] | short)
        config = make_config(name, 5, "tiny", True, common)
        trainer = Contestant(name, config, tmp_path / name).trainer
        start = parameters_to_vector(trainer.model.parameters()).detach().clone()
        trainer.train()
        return parameters_to_vector(trainer.model.parameters()).detach() - start

    stock = change_of("stock_8e-05_400")
    twin = change_of("twin_8e-05_400")
    assert stock.norm() > 0.1
    assert (stock - twin).norm() < 1e-3 * stock.norm()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stock", "muon"])
def test_a_race_counts_training_time_only(tmp_path, name):
    given = GIVEN | {"limit": 0.5}
    row = racing.race(name, 0, tmp_path, 60.0, given)
    assert row["seconds_to_target"] is None
    assert values(row["curve"], "step") == list(range(row["steps"] + 1))

    won = racing.race(name, 0, tmp_path / "won", 60.0, given | {"target": 0.0})
    assert won["steps"] == 1
    assert won["seconds_to_target"] == pytest.approx(won["first_step_s"])


@pytest.mark.slow
def test_parallel_runs_count_steps_at_the_given_pace_and_end_with_their_schedule(
    tmp_path, monkeypatch
):
    given = GIVEN | {"limit": 130.0, "pace": (100.0, 20.0)}
    row = racing.race("muon", 0, tmp_path, 60.0, given)
    assert values(row["curve"], "seconds") == [0.0, 100.0, 120.0, 140.0]

    falling = NAMES["muon"] | {"steps": 3, "optim.schedule": "linear"}
    monkeypatch.setitem(NAMES, "falling", falling)
    given = GIVEN | {"every": 1e9, "limit": 1e9}
    row = racing.race("falling", 0, tmp_path / "falling", 60.0, given)
    assert values(row["curve"], "step") == [0, 3]


def test_evaluations_stop_the_clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(racing, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow:
        def accuracy(self):
            now[0] += 100.0
            return 0.5

    clock = racing.Clock(Slow(), every=2.0, target=0.9, seconds=5.0, deadline=1e9)
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
    common = ["task.few_shot=1"]
    given = {"model": "tiny", "small": True, "common": common, "warm": 1, "count": 2}
    row = measure(name, tmp_path, 60.0, given)
    expected = set(PHASES) - ({"clip", "log"} if name == "stock" else set())
    assert expected <= row["phases_ms"].keys()
    assert min(row["phases_ms"].values()) > -1.0
    assert sum(row["first_phases_ms"].values()) == pytest.approx(row["first_ms"])


def test_every_arm_reports_the_best_of_its_search_on_other_seeds():
    best = {arm: names[0] for arm, names in protocol.REPORTED.items()}
    done = {}
    for _ in range(5):
        run_planned(list(ARMS), done, lambda cell: cell["name"] == best[cell["arm"]])

    for arm, count in (("ours", 5), ("trl", 19)):
        runs = where(done.values(), arm=arm)
        tuned = values(where(runs, use="tuning"), "seed")
        assert len(tuned) == count
        assert all(100 <= seed < 200 for seed in tuned)

        reports = where(runs, use="reporting")
        assert set(values(reports, "name")) == {best[arm]}
        assert values(reports, "seed") == list(protocol.REPORTING_SEEDS[arm])


def run_planned(arms, done, arrives):
    """Finish the runs that are planned by now."""
    for cell in list(protocol.plan(arms, done)):
        reached = 80.0 if arrives(cell) else None
        done[protocol.key_of(cell)] = cell | {"seconds_to_target": reached, "last": 0.8}


def test_a_configuration_of_ours_that_failed_on_a_tuning_seed_is_not_reported():
    done = {}
    run_planned(["ours"], done, lambda cell: cell["seed"] != 113)
    assert distinct(protocol.plan(["ours"], done), "use") == ["tuning"]
    assert where(protocol.plan(list(ARMS), done), arm="trl")


def test_the_table_compares_with_the_end_of_a_baseline_that_does_not_arrive():
    ours, stock = (names[0] for names in protocol.REPORTED.values())
    paces = {protocol.shape_of(ours): [2, 1], protocol.shape_of(stock): [3, 2]}

    def ran(arm, name, reached):
        cells = [protocol.make("reporting", arm, name, s) for s in protocol.REPORTING_SEEDS[arm]]
        outcome = {"seconds_to_target": reached, "steps": 30, "pace": [10.0, 10.0]}
        return [cell | outcome for cell in cells]

    cells = [*ran("ours", ours, 100.0), *ran("trl", stock, None)]
    shown = protocol.report(by_key(cells, protocol.key_of), paces)

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
    assert values(row["curve"], "seconds") == [0.0, 3.0]
    assert row["seconds_to_target"] == 0.0  # the first of two at or above the target
    assert row["protocol"] == "x"
