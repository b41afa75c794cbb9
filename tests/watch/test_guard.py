"""The guard's decisions on streams, and changes to the settings of a trainer."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mesotron import cli
from mesotron.runs import RunFolder
from mesotron.watch import Action, Event
from mesotron.watch.detectors import ACTION_KEY, COOLER, KL_TO_START, SMALLER_STEP
from mesotron.watch.engine import Monitor, merge_history
from mesotron.watch.guard import (
    SMALLEST,
    choose_checkpoint,
    choose_event,
    lr_factor,
    prescribe,
    why_give_up,
)
from mesotron.watch.settings import LiveSetting, apply, scale_rates, schedule_rise, settings_of
from support.watch_streams import FAILURES, TURN

ROLLBACK = Action(
    step=110,
    action="rollback",
    detector="reward_collapse",
    attempt=1,
    checkpoint=70,
    reason="why",
    changes=({"field": "optim.lr", "old": 0.1, "new": 0.05},),
)


def run_to_alarm(monitor: Monitor, rows, save_every: int = 0) -> Event | None:
    for row in rows:
        event = choose_event(monitor.update(row), monitor.engine.detectors)
        if event:
            return event

        if save_every and row["step"] % save_every == 0:
            monitor.save(int(row["step"]))

    return None


def calm_rows(first_step: int):
    rows = [row for row in FAILURES["reward_collapse"](0) if 30 <= row["step"] < 70]
    return [{**row, "step": first_step + k} for k, row in enumerate(rows)]


@pytest.mark.parametrize("name", ["update_explosion", "parser_drift", "entropy_explosion"])
def test_the_checkpoint_is_from_before_the_onset_and_not_merely_the_alarm(name):
    monitor = Monitor()
    event = run_to_alarm(monitor, FAILURES[name](0), save_every=5)
    checkpoint = choose_checkpoint(monitor, event, monitor.snapshots)

    assert TURN - 15 <= checkpoint <= TURN + 1
    assert checkpoint < max(monitor.snapshots) < event.step


def test_a_checkpoint_whose_evaluation_had_fallen_is_not_taken():
    monitor = Monitor()
    scores = {
        1: 0.2,
        5: 0.9,
        10: 0.5,
        15: 0.15,
        20: 0.1,
        25: 0.1,
        30: 0.1,
    }

    rows = [{"step": k, "reward": 0.5} for k in range(1, 31)]
    for k, score in scores.items():
        rows[k - 1] |= {"eval/greedy": score, "eval/problems": 200}

    event = run_to_alarm(monitor, rows, save_every=2)
    assert event.began > 8  # which would be taken by the onset alone
    assert choose_checkpoint(monitor, event, monitor.snapshots) == 4
    assert choose_checkpoint(monitor, event, [8]) == 8


def test_after_a_rollback_only_a_new_failure_raises_an_alarm():
    stream = FAILURES["reward_collapse"](0)
    monitor = Monitor()
    first = run_to_alarm(monitor, stream, save_every=70)
    monitor.restore(70)

    assert monitor.engine.active() == {}
    later = [{**row, "step": row["step"] + 100} for row in stream if row["step"] > 70]
    second = run_to_alarm(monitor, later)

    assert second.step - 100 == first.step
    monitor.restore(70)
    assert [event for row in calm_rows(300) for event in monitor.update(row)] == []


def test_rewards_of_different_parts_are_not_compared():
    monitor = Monitor()
    for step in range(40):
        monitor.update(
            {
                "step": step,
                "reward": 2.0,
                "loss": 0.0,
            }
        )
        if step in (10, 30):
            monitor.save(step)

    parts = (
        {
            "field": "reward.parts",
            "old": ["mine"],
            "new": ["two_part"],
        },
    )

    action = replace(
        ROLLBACK,
        step=39,
        checkpoint=30,
        changes=parts,
    )

    monitor.add_action(action)
    assert all("reward" not in state["tracks"] for state in monitor.snapshots.values())
    assert monitor.engine.step == 30
    assert "loss" in monitor.engine.tracks

    again = Monitor()
    later = [
        {
            "step": s,
            "reward": 0.5,
            "loss": 0.0,
        }
        for s in range(40, 90)
    ]

    again.replay([*monitor.rows, action, *later], [10, 30])
    assert again.events == []  # a quarter of the old reward is no collapse of the new one


def test_replaying_rows_and_actions_rebuilds_the_state():
    live = Monitor()
    history = []
    live.save(0)

    for row in FAILURES["reward_collapse"](1):
        event = choose_event(live.update(row), live.engine.detectors)
        history.append(row)

        if event and not live.actions:
            checkpoint = choose_checkpoint(live, event, live.snapshots)
            action = replace(ROLLBACK, step=event.step, checkpoint=checkpoint)
            live.add_action(action)
            history.append(Action.from_record(json.loads(json.dumps(action.record()))))

        if row["step"] % 20 == 0:
            live.save(int(row["step"]))

    assert live.actions
    again = Monitor()
    again.replay(history, live.snapshots)

    assert again.engine.state() == live.engine.state()
    assert again.snapshots == live.snapshots
    assert again.events == live.events

    rows = [item for item in history if not isinstance(item, Action)]
    assert merge_history(rows, [action.record() for action in live.actions]) == history


def test_reasons_to_give_up():
    change = {
        "field": "optim.lr",
        "act": "multiply",
        "value": 0.5,
    }

    event = Event(
        step=70,
        detector="reward_collapse",
        severity="stop",
        changes=(change,),
        began=55,
        diagnosis="",
        remedy="",
    )

    monitor = Monitor()
    assert (
        why_give_up(
            monitor,
            event,
            50,
            tries=3,
            saves=True,
        )
        == ""
    )

    assert why_give_up(
        monitor,
        event,
        None,
        tries=3,
        saves=False,
    )

    assert "55" in why_give_up(
        monitor,
        event,
        None,
        tries=3,
        saves=True,
    )

    assert why_give_up(
        monitor,
        replace(event, changes=()),
        50,
        tries=3,
        saves=True,
    )

    monitor.actions = [ROLLBACK]
    assert why_give_up(monitor, event, 50, tries=1, saves=True)


def test_the_remedy_grows_with_each_try():
    tenth = replace(SMALLER_STEP, value=0.1)
    first, second = (prescribe((KL_TO_START, COOLER), number, tenth) for number in (1, 2))
    assert first == (KL_TO_START, COOLER)
    assert [change.value for change in second] == [0.02, pytest.approx(0.64), 0.1]
    assert prescribe((SMALLER_STEP, KL_TO_START), 3, tenth)[0] == tenth


def test_the_rest_of_a_run_moves_half_as_far_as_what_ruined_it():
    for steps, left in ((20, 90), (40, 70), (60, 240)):
        assert lr_factor(steps, left) * left == pytest.approx(steps / 2)

    # A schedule that rises fivefold is scaled down as well.
    assert lr_factor(20, 90, rise=5.0) == pytest.approx(lr_factor(20, 90) / 5)
    assert lr_factor(20, 90, rise=0.2) == lr_factor(20, 90)
    assert [lr_factor(900, 100, number=n) for n in (1, 2, 3)] == [0.5, 0.25, 0.125]
    assert lr_factor(10, 10_000) == SMALLEST
    assert lr_factor(5, 0) == 0.5


def test_the_rise_of_a_schedule():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    trainer = SimpleNamespace(lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, float))
    for first, last, rise in ((0, 20, 59.5 / 9.5), (20, 40, 69.5 / 29.5), (0, 100, 1.0)):
        assert schedule_rise(trainer, first, last, 100) == pytest.approx(rise)

    trainer.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    assert schedule_rise(trainer, 0, 20, 100) == 1.0


def test_what_cannot_be_changed_is_refused_and_the_step_made_smaller():
    held = {"optim.lr": 0.1, "objective.beta": 0.04}

    def setting(name: str) -> LiveSetting:
        return LiveSetting(lambda: held[name], lambda new: held.update({name: new}))

    changes, refused = apply([COOLER, KL_TO_START], {name: setting(name) for name in held})
    assert held == {"optim.lr": 0.05, "objective.beta": 0.04}
    assert [item["field"] for item in refused] == ["rollout.temperature", "objective.beta"]

    assert changes == (
        {
            "field": "optim.lr",
            "old": 0.1,
            "new": 0.05,
        },
    )


def test_rates_are_scaled_now_and_in_the_schedule():
    p = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [p], "lr": 0.4}], momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scale_rates(SimpleNamespace(optimizer=optimizer, lr_scheduler=scheduler), 0.5)

    assert optimizer.param_groups[0]["lr"] == 0.2
    p.grad = torch.ones(1)
    optimizer.step()
    scheduler.step()

    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    for rates, halved in (((0.0, 0.0), [0.0, 0.0]), ((0.0, 2e-3), [0.0, 1e-3])):  # no division by 0
        groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in rates]
        optimizer = torch.optim.SGD(groups)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        trainer: Any = SimpleNamespace(optimizer=optimizer, lr_scheduler=schedule)
        apply([SMALLER_STEP], settings_of(trainer))

        assert [group["lr"] for group in optimizer.param_groups] == halved


# Rolled back runs, read from their logs


def run_folder(path: Path, rows) -> RunFolder:
    run = RunFolder.create(path, {}, {})
    for row in rows:
        run.append("metrics", row)
    return run


@pytest.mark.parametrize("kind", ["run folder", "trainer_state"])
def test_the_command_reads_the_guards_actions(tmp_path, capsys, kind):
    failed = []
    for row in FAILURES["reward_collapse"](0):
        if row["step"] <= 110:
            failed.append(row)

    calm = calm_rows(111)

    state = tmp_path / "trainer_state.json"
    if kind == "run folder":
        run = run_folder(tmp_path / "run", (*failed, *calm))
        run.append("events", ROLLBACK.record())
    else:
        entry = {"step": 110, ACTION_KEY: ROLLBACK.record()}
        state.write_text(json.dumps({"log_history": [*failed, entry, *calm]}))

    path = run.path if kind == "run folder" else state
    out = tmp_path / "out.json"
    assert cli.main(["watch", str(path), "--check", "--out", str(out)]) == 0
    assert ROLLBACK.sentence() in capsys.readouterr().out

    record = json.loads(out.read_text())
    assert (record["condition"], record["cause"]) == ("healthy", None)
    assert record["acts"][0]["checkpoint"] == 70


@pytest.mark.parametrize(
    "changed",
    [
        {"checkpoint": 400},
        {"checkpoint": "abc"},
        {"step": None},
        {"step": "9"},
        {"changes": ["a"]},
        {"changes": [{"field": "lr"}]},
    ],
)
def test_an_impossible_action_is_one_sentence(tmp_path, capsys, changed):
    run = run_folder(tmp_path / "run", FAILURES["reward_collapse"](0))
    run.append("events", ROLLBACK.record())
    assert cli.main(["watch", str(run.path)]) == 0

    run.append("events", ROLLBACK.record() | changed)
    assert cli.main(["watch", str(run.path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
