"""The guard's rollback: decisions on streams, then inside real trainers, killed and resumed too."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from peft import LoraConfig
from transformers import Trainer, TrainingArguments

import mesotron
from mesotron import cli
from mesotron.runs import RunFolder
from mesotron.watch import Action, Change, Engine, Event
from mesotron.watch.detectors import KL_TO_START, SMALLER_STEP
from mesotron.watch.diagnosis import diagnose
from mesotron.watch.guard import (
    SMALLEST,
    Monitor,
    choose_checkpoint,
    choose_event,
    lr_factor,
    merge_history,
    prescribe,
    why_give_up,
)
from mesotron.watch.settings import Setting, apply, scale_rates, schedule_rise, settings_of
from support.rlvr_processes import run_on
from support.rlvr_tiny import make_trainer, rows, same, weights
from support.watch_streams import FAILURES, TURN

WORDS = {"diagnosis": "it fell", "remedy": "go back"}


def fatal(step: int, began: int, *changes: Change, detector: str = "reward_collapse") -> Event:
    given = tuple({"field": c.field, "act": c.act, "value": c.value} for c in changes)
    return Event(step=step, detector=detector, severity="stop", changes=given, began=began, **WORDS)


# decisions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["update_explosion", "parser_drift", "entropy_explosion"])
def test_the_checkpoint_is_from_before_the_evidence_and_not_merely_the_alarm(name):
    memory, chosen = Monitor(), []
    for row in FAILURES[name](0):
        event = choose_event(memory.update(row), memory.engine.detectors)
        step = int(row["step"])
        if event:
            chosen.append((step, choose_checkpoint(memory, event, memory.snapshots)))
            break
        if step % 5 == 0:
            memory.save(step)
    (alarm, checkpoint), *_ = chosen
    assert checkpoint is not None
    assert TURN - 15 <= checkpoint <= TURN + 1
    # There were later checkpoints, which an alarm alone would have called healthy.
    assert max(memory.snapshots) > checkpoint
    assert alarm > max(memory.snapshots)


def test_after_a_rollback_stale_rows_raise_no_alarm_and_the_failure_is_caught_again():
    stream = FAILURES["reward_collapse"](0)
    memory = Monitor()
    seen: list[int] = []
    for row in stream:
        if row["step"] == 71:
            memory.save(70)
        if choose_event(memory.update(row), memory.engine.detectors):
            seen.append(int(row["step"]))
            break
    memory.restore(70)
    assert memory.engine.active() == {}
    later = [{**row, "step": row["step"] + 100} for row in stream if row["step"] > 70]
    for row in later:
        if choose_event(memory.update(row), memory.engine.detectors):
            seen.append(int(row["step"]) - 100)
            break
    assert seen[1] == seen[0]


def test_a_healthy_continuation_is_met_with_silence():
    memory = Monitor()
    for row in FAILURES["reward_collapse"](0):
        if row["step"] == 71:
            memory.save(70)
        memory.update(row)
    memory.restore(70)
    calm = [row for row in FAILURES["reward_collapse"](0) if 30 <= row["step"] < 70]
    assert [e for row in calm for e in memory.update({**row, "step": row["step"] + 200})] == []


def test_another_reward_is_not_compared_with_the_old_one():
    memory = Monitor()
    for step in range(40):
        memory.update({"step": step, "reward": 2.0, "loss": 0.0})
        if step in (10, 30):
            memory.save(step)
    parts = ({"field": "reward.parts", "old": ["mine"], "new": ["two_part"]},)
    act = Action(step=39, action="rollback", detector="d", attempt=1, checkpoint=30, changes=parts,
              reason="it is gamed")  # fmt: skip
    memory.add_action(act)
    again = Monitor()
    past = [*memory.rows, act, *({"step": s, "reward": 0.5, "loss": 0.0} for s in range(40, 90))]
    again.replay(past, [10, 30])
    assert again.events == []  # a quarter of the old reward is no collapse of the new one
    assert all("reward" not in kept["tracks"] for kept in memory.snapshots.values())
    assert memory.engine.step == 30
    assert "loss" in memory.engine.tracks


def test_a_replayed_past_is_the_past():
    live, history = Monitor(), []
    live.save(0)
    for row in FAILURES["reward_collapse"](1):
        event = choose_event(live.update(row), live.engine.detectors)
        history.append(row)
        if event and not live.actions:
            checkpoint = choose_checkpoint(live, event, live.snapshots)
            act = Action(step=event.step, action="rollback", detector=event.detector, attempt=1,
                      checkpoint=checkpoint, reason="why")  # fmt: skip
            live.add_action(act)
            history.append(Action.from_record(json.loads(json.dumps(act.record()))))
        if row["step"] % 20 == 0:
            live.save(int(row["step"]))
    assert live.actions
    again = Monitor()
    again.replay(history, live.snapshots)
    assert again.engine.state() == live.engine.state()
    assert again.snapshots == live.snapshots
    assert again.events == live.events
    rows_alone = [item for item in history if not isinstance(item, Action)]
    assert merge_history(rows_alone, [act.record() for act in live.actions]) == history


def test_reasons_to_give_up():
    memory, event = Monitor(), fatal(70, 55, SMALLER_STEP)
    assert why_give_up(memory, event, 50, tries=3, saves=True) == ""
    assert "checkpoints are off" in why_give_up(memory, event, None, tries=3, saves=False)
    assert "began at step 55" in why_give_up(memory, event, None, tries=3, saves=True)
    assert "no automatic remedy" in why_give_up(memory, fatal(70, 55), 50, 3, saves=True)
    done = Action(step=9, action="rollback", detector="x", attempt=1, checkpoint=0, reason="")
    memory.actions = [done]
    assert "again after 1 rollbacks" in why_give_up(memory, event, 50, tries=1, saves=True)


def test_a_remedy_grows_with_the_tries():
    tenth = replace(SMALLER_STEP, value=0.1)
    first, second = (prescribe((KL_TO_START,), number, tenth) for number in (1, 2))
    assert [change.field for change in first] == ["objective.beta"]
    assert second[0].value == 2 * first[0].value
    assert second[1] == tenth
    assert prescribe((SMALLER_STEP, KL_TO_START), 3, tenth)[0] == tenth


def test_what_is_left_of_a_run_goes_half_the_way_that_ruined_it():
    for steps, left in ((20, 90), (40, 70), (60, 240)):
        assert lr_factor(steps, left) * left == pytest.approx(steps / 2)
    # Steps that grow five times as large are made that much smaller as well.
    assert lr_factor(20, 90, rise=5.0) == pytest.approx(lr_factor(20, 90) / 5)
    assert lr_factor(20, 90, rise=0.2) == lr_factor(20, 90)
    # Late in a run each try still halves once more, and early in a long one no try does all.
    assert [lr_factor(900, 100, number=n) for n in (1, 2, 3)] == [0.5, 0.25, 0.125]
    assert lr_factor(10, 10_000) == SMALLEST
    assert lr_factor(5, 0) == 0.5


def test_the_rise_of_a_schedule_is_known_beforehand():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    trainer = SimpleNamespace(lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, float))
    assert schedule_rise(trainer, 0, 20, 100) == pytest.approx(59.5 / 9.5)
    assert schedule_rise(trainer, 20, 40, 100) == pytest.approx(69.5 / 29.5)
    assert schedule_rise(trainer, 0, 100, 100) == 1.0
    trainer.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    assert schedule_rise(trainer, 0, 20, 100) == 1.0


def test_what_cannot_be_changed_is_said_and_the_step_made_smaller():
    held = {"optim.lr": 0.1, "objective.beta": 0.04}

    def setting(name: str) -> Setting:
        return Setting(lambda: held[name], lambda new: held.update({name: new}))

    settings = {name: setting(name) for name in held}
    cooler = Change(field="rollout.temperature", act="multiply", value=0.8)
    changes, refused = apply([cooler, KL_TO_START], settings)
    assert held == {"optim.lr": 0.05, "objective.beta": 0.04}
    assert [one["why"] for one in refused] == [
        "it cannot be changed during a run", "it has that value already",
    ]  # fmt: skip
    assert changes == ({"field": "optim.lr", "old": 0.1, "new": 0.05},)


def test_the_story_goes_on_after_a_rollback():
    stream = FAILURES["reward_collapse"](0)
    memory = Monitor()
    for row in stream:
        if row["step"] == 71:
            memory.save(70)
        event = choose_event(memory.update(row), memory.engine.detectors)
        if event:
            memory.add_action(
                Action(step=event.step, action="rollback", detector=event.detector, attempt=1,
                       checkpoint=70, reason="why")
            )  # fmt: skip
            break
    calm = [{**row, "step": row["step"] + 100} for row in stream if 30 <= row["step"] < 70]
    for row in calm:
        memory.update(row)
    told = diagnose(memory.rows, memory.engine, memory.events, actions=memory.actions)
    assert told.condition == "healthy"
    assert told.cause is None
    assert f"rolled back from step {memory.actions[0].step} to 70" in told.text()
    assert json.dumps(told.record())


def test_the_command_knows_that_a_run_has_gone_back(tmp_path, capsys):
    stream = FAILURES["reward_collapse"](0)
    fallen = [row for row in stream if row["step"] <= 110]
    calm = [{**row, "step": row["step"] + 81} for row in stream if 30 <= row["step"] < 70]
    run = RunFolder.create(tmp_path / "run", {}, {})
    for row in (*fallen, *calm):
        run.append("metrics", row)
    assert cli.main(["watch", str(run.path), "--check"]) == 1
    act = Action(step=110, action="rollback", detector="reward_collapse", attempt=1, checkpoint=70,
              reason="why", changes=({"field": "optim.lr", "old": 0.1, "new": 0.05},))  # fmt: skip
    run.append("events", act.record())
    capsys.readouterr()
    assert cli.main(["watch", str(run.path), "--check"]) == 0
    told = capsys.readouterr().out
    assert "step 110 rollback 1 to step 70: why; optim.lr 0.1 to 0.05" in told
    assert "rolled back from step 110 to 70" in told


def test_a_trainer_state_tells_what_the_guard_did(tmp_path, capsys):
    fallen = FAILURES["reward_collapse"](0)[:110]
    calm = [{**row, "step": row["step"] + 110} for row in fallen[:60]]
    act = Action(step=110, action="rollback", detector="reward_collapse", attempt=1, checkpoint=70,
              reason="why", changes=({"field": "optim.lr", "old": 0.1, "new": 0.05},))  # fmt: skip
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": [*fallen, *calm]}))
    assert cli.main(["watch", str(path), "--check"]) == 1
    acted = {"step": 110, "mesotron/guard": act.record()}
    path.write_text(json.dumps({"log_history": [*fallen, acted, *calm]}))
    capsys.readouterr()
    assert cli.main(["watch", str(path), "--check"]) == 0
    told = capsys.readouterr().out
    assert "step 110 rollback 1 to step 70: why; optim.lr 0.1 to 0.05" in told
    assert "rolled back from step 110 to 70" in told


@pytest.mark.parametrize("changed", [{"checkpoint": 400}, {"step": None}, {"step": "9"}])
def test_an_act_that_cannot_be_is_a_sentence(tmp_path, capsys, changed):
    run = RunFolder.create(tmp_path / "run", {}, {})
    for row in FAILURES["reward_collapse"](0):
        run.append("metrics", row)
    act = Action(step=110, action="rollback", detector="x", attempt=1, checkpoint=7, reason="why")
    run.append("events", act.record() | changed)
    assert cli.main(["watch", str(run.path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# in trainers -------------------------------------------------------------------------------------


@pytest.fixture
def alarm(monkeypatch: pytest.MonkeyPatch):
    """Let the engine see a failure where the test says so: {step: event}."""
    planned: dict[int, Event] = {}
    update = Engine.update

    def see(self: Engine, row: dict[str, float]) -> list[Event]:
        update(self, row)
        event = planned.get(int(row["step"])) if "loss" in row else None
        return [event] if event else []

    monkeypatch.setattr(Engine, "update", see)
    return planned


def guarded(folder: Path, cls: type = trl.GRPOTrainer, **changed: Any) -> tuple[Any, Any]:
    parts = changed.pop("parts", None)
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1, **changed}
    trainer = make_trainer(folder, cls, parts=parts, **settings)
    watch = mesotron.Watch(guard="rollback", trainer=trainer)
    trainer.add_callback(watch)
    return trainer, watch


LORA = LoraConfig(r=2, target_modules="all-linear")
CASES = {
    "trl": (trl.GRPOTrainer, {}),
    "trl with lora": (trl.GRPOTrainer, {"parts": {"peft_config": LORA}}),
    "ours": (mesotron.GRPOTrainer, {"parts": {"optim": "muon", "objective": "mgrpo"}}),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_and_optimizer_go_back_and_the_rest_goes_on(tmp_path, alarm, case):
    cls, given = CASES[case]
    alarm[4] = fatal(4, 3, SMALLER_STEP)
    settings = {"lr_scheduler_type": "linear", "num_iterations": 2, "steps_per_generation": 1}
    trainer, watch = guarded(tmp_path, cls, **given, **settings)
    trainer.train()
    (act,) = watch.actions
    assert (act.checkpoint, act.attempt, act.action) == (2, 1, "rollback")
    assert act.changes[0]["new"] == act.changes[0]["old"] / 2
    before, after = (trainer_weights(trainer, tmp_path, step) for step in (2, 4))
    assert same(before, after)
    assert not same(after, trainer_weights(trainer, tmp_path, 5))
    found = rows(trainer)
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    rates = [row["learning_rate"] for row in found]
    assert rates[4] / rates[3] == pytest.approx(0.5 * 2 / 3)
    # A new sample was drawn although the old one would have served once more.
    assert "reward" in found[4]


def trainer_weights(trainer: Any, folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint; the trainer is left with them."""
    trainer._load_from_checkpoint(str(folder / f"checkpoint-{step}"))
    return weights(trainer)


@pytest.mark.parametrize("case", ["trl", "ours"])
def test_killed_after_a_rollback_and_resumed_equals_left_alone(tmp_path, alarm, case):
    cls, given = CASES[case]
    cooler = Change(field="rollout.temperature", act="multiply", value=0.8)
    alarm[3] = fatal(3, 2, SMALLER_STEP, cooler)
    settings = {"data_seed": 1, **given}
    if cls is trl.GRPOTrainer:
        settings |= {"num_generations": 4}
    whole, watch = guarded(tmp_path / "whole", cls, **settings)
    whole.train()
    assert [change["field"] for change in watch.actions[0].changes] == [
        "optim.lr", "rollout.temperature",
    ]  # fmt: skip
    again, second = guarded(tmp_path / "whole", cls, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert again.temperature == pytest.approx(0.8)
    assert second.actions == watch.actions
    assert same(weights(whole), weights(again))
    first, again = ({**w.engine.state()["tracks"], "step_time": None} for w in (watch, second))
    assert first == again


def test_it_gives_up_after_its_tries_and_stops(tmp_path, alarm):
    alarm |= {step: fatal(step, 1, SMALLER_STEP) for step in (2, 3, 4)}
    trainer, watch = guarded(tmp_path)
    watch.tries = 2
    trainer.train()
    assert [act.action for act in watch.actions] == ["rollback", "rollback", "stop"]
    assert [act.checkpoint for act in watch.actions] == [0, 0, None]
    assert watch.actions[1].changes[0]["new"] == pytest.approx(1e-2 * (1 / 4 / 2) / 16)
    assert "again after 2 rollbacks" in watch.actions[2].reason
    assert trainer.state.global_step == 4
    assert watch.stopped_by is not None


@pytest.mark.parametrize(("settings", "told"), [
    ({"save_strategy": "no"}, "checkpoints are off"),
    ({"save_steps": 1, "save_total_limit": 1}, "no earlier checkpoint is left"),
])  # fmt: skip
def test_nothing_to_go_back_to_is_said_and_the_run_stops(tmp_path, alarm, settings, told):
    alarm[3] = fatal(3, 1, SMALLER_STEP)
    trainer, watch = guarded(tmp_path, **settings)
    trainer.train()
    (act,) = watch.actions
    assert (act.action, act.checkpoint) == ("stop", None)
    assert told in act.reason
    assert trainer.state.global_step == 3


def test_a_loss_that_is_not_a_number_is_gone_back_from_at_once(tmp_path, monkeypatch):
    trainer, watch = guarded(tmp_path)
    compute = trainer._compute_loss

    def spoil(model: Any, inputs: Any) -> torch.Tensor:
        loss = compute(model, inputs)
        return loss * float("nan") if trainer.state.global_step == 2 else loss

    monkeypatch.setattr(trainer, "_compute_loss", spoil)
    trainer.train()
    (act,) = watch.actions
    assert (act.detector, act.step, act.checkpoint) == ("nonfinite", 3, 2)
    assert trainer.state.global_step == 6
    assert all(torch.isfinite(p).all() for p in weights(trainer).values())


def test_a_plain_trainer_goes_back_too(tmp_path, alarm):
    alarm[3] = fatal(3, 2, KL_TO_START)
    model = torch.nn.Linear(4, 1)

    class Squares(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.layer(x)[:, 0] - labels).square().mean()}

    data = [{"x": torch.randn(4), "labels": torch.tensor(1.0)} for _ in range(16)]
    args = TrainingArguments(
        str(tmp_path), max_steps=5, save_steps=1, logging_steps=1, learning_rate=0.1,
        use_cpu=True, report_to="none", disable_tqdm=True, lr_scheduler_type="constant",
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(Squares(), args, train_dataset=data)  # pyright: ignore
    watch = mesotron.Watch(guard="rollback", trainer=trainer)
    trainer.add_callback(watch)
    trainer.train()
    (act,) = watch.actions
    assert act.refused[0]["field"] == "objective.beta"
    assert act.changes == ({"field": "optim.lr", "old": 0.1, "new": 0.05},)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.05


def test_what_could_not_be_done_at_the_alarm_is_refused_at_the_start(tmp_path):
    with pytest.raises(ValueError, match="trainer=trainer"):
        mesotron.Watch(guard="rollback")
    trainer = make_trainer(tmp_path)
    with pytest.raises(ValueError, match="tries 0"):
        mesotron.Watch(guard="rollback", trainer=trainer, tries=0)
    trainer.args.save_only_model = True
    with pytest.raises(ValueError, match="save_only_model"):
        mesotron.Watch(guard="rollback", trainer=trainer)
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="FSDP1"):
        mesotron.Watch(guard="rollback", trainer=trainer)
    plain = SimpleNamespace(is_deepspeed_enabled=False, is_fsdp_enabled=True,
                            accelerator=SimpleNamespace(is_fsdp2=True),
                            args=SimpleNamespace(save_only_model=False))  # fmt: skip
    with pytest.raises(ValueError, match="unsharded"):
        mesotron.Watch(guard="rollback", trainer=plain)


def test_rates_are_scaled_now_and_in_the_schedule():
    p = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [p], "lr": 0.4}], momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    class Held:
        lr_scheduler = scheduler

    Held.optimizer = optimizer
    scale_rates(Held, 0.5)
    assert optimizer.param_groups[0]["lr"] == 0.2
    p.grad = torch.ones(1)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize(("rates", "after"), [((0.0, 0.0), (0.0, 0.0)), ((0.0, 2e-3), (0.0, 1e-3))])
def test_a_group_without_a_rate_divides_nothing(rates, after):
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in rates]
    optimizer = torch.optim.SGD(groups)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    trainer: Any = SimpleNamespace(optimizer=optimizer, lr_scheduler=schedule)
    apply([SMALLER_STEP], settings_of(trainer))
    assert tuple(group["lr"] for group in optimizer.param_groups) == after


def test_a_change_is_what_its_act_says():
    assert replace(SMALLER_STEP, act="set", value=3).applied_to(1) == 3
    assert KL_TO_START.applied_to(0.0) == 0.01
    assert KL_TO_START.applied_to(0.5) == 0.5


@pytest.mark.slow
def test_all_processes_do_what_the_first_decides():
    (gone_back,), (stopped,) = (
        run_on(2, [(kind,)], "obey_the_first") for kind in ("rollback", "budget")
    )
    assert gone_back[0] == gone_back[1]
    assert gone_back[0]["acts"] == [1]
    assert gone_back[0]["rate"] == 0.005
    assert gone_back[0]["steps"] == 4
    assert stopped[0] == stopped[1]
    assert stopped[0]["steps"] == 1
