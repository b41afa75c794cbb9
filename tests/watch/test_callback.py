"""`mesotron.Watch` in real trainers: warn, stop, roll back, killed and resumed."""

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from peft import LoraConfig
from torch import nn
from transformers import Trainer, TrainingArguments

import mesotron
from mesotron import Watch
from mesotron.config import WatchSettings
from mesotron.runs import RunFolder
from mesotron.watch import Change, Engine, Event
from mesotron.watch.detectors import COOLER, KL_TO_START, SMALLER_STEP
from support.rlvr_processes import run_on
from support.rlvr_tiny import make_trainer, rows, same, weights

slow = pytest.mark.slow
SETTINGS = WatchSettings(warmup=4, window=2, patience=2)
FALL = 12


class Line(nn.Module):
    """One weight and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.weight - x) ** 2).mean()}


class Rewarded(Trainer):
    """Also logs a reward, which falls at step FALL."""

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:
            logs["reward"] = 0.7 if self.state.global_step < FALL else 0.05
        super().log(logs, *args, **kwargs)


def plain_trainer(folder: Path, watch: Watch | None = None, **changed: Any) -> Trainer:
    settings: dict[str, Any] = {
        "max_steps": 22,
        "logging_steps": 1,
        "save_steps": 10,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }

    data: Any = [{"x": torch.ones(1)} for _ in range(64)]
    args = TrainingArguments(str(folder), **settings | changed)

    return Rewarded(Line(), args, train_dataset=data, callbacks=[watch] if watch else [])


def test_stop_ends_the_run_with_a_checkpoint_and_the_diagnosis(tmp_path, caplog):
    folder = RunFolder.create(tmp_path / "run", config={}, environment={})
    watch = Watch(
        guard="stop",
        run=folder.path,
        settings=SETTINGS,
    )

    assert watch.state() == "not known yet"
    with caplog.at_level(logging.INFO, logger="mesotron.watch"):
        plain_trainer(tmp_path / "out", watch).train()

    assert "stop: reward collapse" in watch.state()
    step = watch.stopped_by.step
    assert FALL < step < FALL + 8
    assert (tmp_path / "out" / f"checkpoint-{step}" / "trainer_state.json").exists()

    last = folder.rows("events")[-1]
    assert (last["severity"], last["changes"][0]["field"]) == ("stop", "optim.lr")
    assert "reward collapse" in caplog.messages[-1]

    # So does resuming a dead run.
    caplog.clear()
    history = [
        {
            "step": k,
            "loss": 0.0,
            "reward": 0.7 if k < 20 else 0.1,
        }
        for k in range(40)
    ]

    state: Any = SimpleNamespace(
        global_step=39,
        log_history=history,
        is_world_process_zero=True,
    )

    Watch(guard="stop").on_train_begin(None, state, None)
    assert "reward collapse" in caplog.text


def test_a_resumed_run_is_watched_as_if_it_had_never_stopped(tmp_path, caplog):
    whole, resumed = (Watch(guard="off", settings=SETTINGS) for _ in range(2))
    trainer = plain_trainer(tmp_path, whole)
    trainer.train()

    assert trainer.state.global_step == 22
    assert "stop" in [event.severity for event in whole.events]
    assert caplog.messages == []

    plain_trainer(tmp_path, resumed).train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    first, second = ([(e.step, e.detector, e.severity) for e in w.events] for w in (whole, resumed))
    assert first == second
    assert resumed.engine.state()["tracks"]["reward"] == whole.engine.state()["tracks"]["reward"]


def test_a_stop_does_not_save_broken_weights():
    model = nn.Linear(1, 1)
    watch = Watch(guard="stop")

    with torch.no_grad():
        model.weight.fill_(math.nan)

    control: Any = SimpleNamespace(should_training_stop=False, should_save=True)
    state: Any = SimpleNamespace(global_step=1, is_world_process_zero=True)
    watch.on_log(
        None,
        state,
        control,
        logs={"loss": math.nan},
        model=model,
    )

    assert control.should_training_stop
    assert not control.should_save


def test_arguments_that_cannot_work(tmp_path):
    trainer: Any = plain_trainer(tmp_path)

    def refuse(match: str, **arguments: Any) -> None:
        with pytest.raises(ValueError, match=match):
            Watch(**{"guard": "rollback", "trainer": trainer} | arguments)

    refuse("guard 'shout'", guard="shout")
    refuse("trainer=trainer", trainer=None)
    refuse("tries 0", tries=0)
    trainer.args.save_only_model = True
    refuse("save_only_model")
    trainer.is_fsdp_enabled = True
    refuse("FSDP1")
    trainer.args.save_only_model = False
    trainer.accelerator = SimpleNamespace(is_fsdp2=True)
    refuse("FSDP")


# Rollback


def fatal(step: int, began: int, *changes: Change) -> Event:
    given = tuple(vars(change) for change in changes)
    return Event(
        step=step,
        detector="reward_collapse",
        severity="stop",
        changes=given,
        began=began,
        diagnosis="it fell",
        remedy="go back",
    )


@pytest.fixture
def alarm(monkeypatch: pytest.MonkeyPatch) -> dict[int, Event]:
    """Let the engine report these events: {step: event}."""
    planned: dict[int, Event] = {}
    update = Engine.update

    def report(self: Engine, row: dict[str, float]) -> list[Event]:
        update(self, row)
        event = planned.get(int(row["step"])) if "loss" in row else None
        return [event] if event else []

    monkeypatch.setattr(Engine, "update", report)
    return planned


def guarded(trainer: Any, **arguments: Any) -> Watch:
    watch = Watch(
        guard="rollback",
        trainer=trainer,
        **arguments,
    )
    trainer.add_callback(watch)

    return watch


LORA = {"peft_config": LoraConfig(r=2, target_modules="all-linear")}
CASES: dict[str, tuple[type, Any]] = {
    "trl": (trl.GRPOTrainer, None),
    "trl with lora": (trl.GRPOTrainer, LORA),
    "ours": (
        mesotron.GRPOTrainer,
        {
            "optim": "muon",
            "objective": "mgrpo",
            "average": 0.7,
        },
    ),
}


def grpo(folder: Path, case: str, **changed: Any) -> tuple[Any, Watch]:
    cls, parts = CASES[case]
    settings = {
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 1,
        **changed,
    }

    trainer = make_trainer(folder, cls, parts=parts, **settings)
    return trainer, guarded(trainer)


@pytest.mark.parametrize("case", [pytest.param("trl with lora", marks=slow), "ours"])
def test_weights_and_optimizer_go_back_and_the_rest_goes_on(tmp_path, alarm, case):
    alarm[4] = fatal(4, 3, SMALLER_STEP)
    settings = {
        "lr_scheduler_type": "linear",
        "num_iterations": 2,
        "steps_per_generation": 1,
    }

    trainer, watch = grpo(tmp_path, case, **settings)
    trainer.train()
    (action,) = watch.actions

    assert (action.checkpoint, action.attempt, action.action) == (2, 1, "rollback")
    assert action.changes[0]["new"] == action.changes[0]["old"] / 2

    found = {}
    for step in (2, 4, 5):
        trainer._load_from_checkpoint(str(tmp_path / f"checkpoint-{step}"))
        found[step] = weights(trainer)

    assert same(found[2], found[4])
    assert not same(found[4], found[5])

    logged = rows(trainer)
    assert [row["step"] for row in logged] == [1, 2, 3, 4, 5, 6]
    assert logged[4]["learning_rate"] / logged[3]["learning_rate"] == pytest.approx(0.5 * 2 / 3)
    assert "reward" in logged[4]  # sampled again, although the old sample had one more use


@pytest.mark.parametrize("case", [pytest.param("trl", marks=slow), "ours"])
def test_killed_after_a_rollback_and_resumed_equals_left_alone(tmp_path, alarm, case):
    alarm[3] = fatal(3, 2, SMALLER_STEP, COOLER)
    settings = {"data_seed": 1, "max_steps": 5}
    settings |= {"num_generations": 4} if case == "trl" else {}
    whole, watch = grpo(tmp_path, case, **settings)
    whole.train()
    fields = [change["field"] for change in watch.actions[0].changes]

    assert fields == ["optim.lr", "rollout.temperature"]
    again, second = grpo(tmp_path, case, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))

    assert again.temperature == pytest.approx(0.8)
    assert second.actions == watch.actions
    assert same(weights(whole), weights(again))

    first, last = ({**w.engine.state()["tracks"], "step_time": None} for w in (watch, second))
    assert first == last


def test_a_rollback_at_the_last_step_ends_with_the_average(tmp_path, alarm):
    alarm[6] = fatal(6, 4, SMALLER_STEP)
    trainer, watch = grpo(tmp_path, "ours")
    trainer.train()

    assert [action.checkpoint for action in watch.actions] == [3]
    assert same(weights(trainer), trainer.average.weights)


def guarded_run(folder: Path, tries: int = 3, **settings: Any) -> tuple[Trainer, Watch]:
    trainer = plain_trainer(
        folder,
        **{
            "max_steps": 6,
            "save_steps": 1,
            **settings,
        },
    )

    watch = guarded(trainer, tries=tries)
    trainer.train()

    return trainer, watch


def test_a_plain_trainer_rolls_back_and_gives_up_after_its_tries(tmp_path, alarm):
    alarm |= {step: fatal(step, 1, SMALLER_STEP, KL_TO_START) for step in (2, 3, 4)}
    trainer, watch = guarded_run(tmp_path, tries=2)
    actions = [(action.action, action.checkpoint) for action in watch.actions]

    assert actions == [("rollback", 0), ("rollback", 0), ("stop", None)]
    assert watch.actions[1].changes[0]["new"] == pytest.approx(0.1 * (1 / 4 / 2) / 16)
    assert [item["field"] for item in watch.actions[0].refused] == ["objective.beta"]
    assert trainer.state.global_step == 4
    assert watch.stopped_by is not None


@pytest.mark.parametrize("settings", [{"save_strategy": "no"}, {"save_total_limit": 1}])
def test_without_a_checkpoint_to_go_back_to_the_run_stops(tmp_path, alarm, settings):
    alarm[3] = fatal(3, 1, SMALLER_STEP)
    trainer, watch = guarded_run(tmp_path, **settings)
    (action,) = watch.actions

    assert (action.action, action.checkpoint) == ("stop", None)
    assert "checkpoint" in action.reason
    assert trainer.state.global_step == 3


def test_a_loss_that_is_not_finite_is_rolled_back_at_once(tmp_path, monkeypatch, caplog):
    trainer = plain_trainer(tmp_path, max_steps=6, save_steps=1)
    watch = guarded(trainer)
    compute = trainer.compute_loss

    def spoil(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = compute(*args, **kwargs)
        if trainer.state.global_step == 2:
            return loss * float("nan")

        return loss

    monkeypatch.setattr(trainer, "compute_loss", spoil)
    trainer.train()
    (action,) = watch.actions

    assert (action.detector, action.step, action.checkpoint) == ("nonfinite", 3, 2)
    assert "step 3 stop" in caplog.text
    assert "step 3 warn" not in caplog.text
    assert trainer.state.global_step == 6
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


@slow
def test_all_processes_do_what_the_first_decides():
    (rolled_back,), (stopped,) = (
        run_on(2, [(kind,)], "obey_the_first") for kind in ("rollback", "budget")
    )
    assert rolled_back[0] == rolled_back[1]
    assert [rolled_back[0][name] for name in ("acts", "rate", "steps")] == [[1], 0.005, 4]
    assert stopped[0] == stopped[1]
    assert stopped[0]["steps"] == 1


def test_the_last_healthy_checkpoint_is_kept(tmp_path):
    watch = Watch(guard="stop", settings=SETTINGS)
    trainer = plain_trainer(tmp_path, watch, save_steps=2, save_total_limit=1)
    trainer.train()
    kept = {int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*")}
    healthy = watch.last_healthy_checkpoint

    assert healthy in kept
    assert FALL - 4 <= (healthy or 0) < FALL


def test_a_run_that_ends_unhealthy_keeps_its_newest_checkpoint(tmp_path, monkeypatch):
    settings = {
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 1,
    }

    trainer = make_trainer(tmp_path, **settings)
    trainer.add_callback(Watch(guard="warn"))
    monkeypatch.setattr(Engine, "unhealthy_since", lambda _: 2)
    trainer.train()

    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
