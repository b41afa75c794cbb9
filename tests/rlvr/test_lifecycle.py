"""How a run begins, fails, stops and is continued, with trainers that only count what is asked."""

import logging
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from mesotron.config import SftConfig, TrainConfig, parse_duration
from mesotron.config.train import RewardConfig
from mesotron.rlvr import lifecycle
from mesotron.rlvr.callbacks import GiveUpAtLimit, NotContinued
from mesotron.rlvr.lifecycle import (
    ToView,
    explain_failure,
    first_step,
    fit,
    leave_behind,
    resume_command,
    say_stopped,
    trainer_arguments,
)
from mesotron.runs import RunFolder, process
from mesotron.runs.checkpoints import Checkpoint, writing
from mesotron.runs.deadline import LimitReached
from mesotron.runs.process import SharedFailure
from mesotron.runs.resume import Plan


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "run", {}, {})


def plan_of(run: RunFolder, step: int | None = None, **config: Any) -> Plan[Any]:
    checkpoint = None if step is None else Checkpoint(step, run.checkpoints / f"checkpoint-{step}")
    return Plan(TrainConfig(**{"steps": 4} | config), run.path, run, checkpoint)


class Deadline:
    """Notes whether the main thread was given the end, and what a limit may do meanwhile."""

    def __init__(self) -> None:
        self.obeyed = 0
        self.can_give_up: Any = None
        self.leave: Any = None

    @contextmanager
    def during(self, can_give_up: Any, leave: Any) -> Any:
        self.can_give_up, self.leave = can_give_up, leave
        yield

    def obey(self) -> None:
        self.obeyed += 1


class Trainer:
    """Trains by raising, or not."""

    def __init__(self, run: RunFolder, error: BaseException | None = None, step: int = 2) -> None:
        self.run = run
        self.error = error
        self.state = SimpleNamespace(global_step=step)
        self.callback_handler = SimpleNamespace(callbacks=["the first of old"])
        self.last_step: Any = None
        self.saved = 0
        self.began: list[Any] = []

    def train(self, checkpoint: str | None) -> None:
        self.began.append(checkpoint)
        if self.error is not None:
            raise self.error

    def save_last_step(self) -> None:
        self.saved += 1
        write(self.run, self.state.global_step)


def write(run: RunFolder, step: int) -> None:
    with writing(run.checkpoints, step) as draft:
        (draft / "model").write_text("x")


def budget() -> Any:
    return SimpleNamespace(deadline=Deadline())


# Training


def test_training_begins_where_the_plan_says(run):
    trainer = Trainer(run)
    spent = budget()
    assert fit(trainer, plan_of(run), spent) is None
    assert fit(trainer, plan_of(run, 3), spent) is None
    assert trainer.began == [None, str(run.checkpoints / "checkpoint-3")]
    assert spent.deadline.obeyed == trainer.saved == 0

    first = trainer.callback_handler.callbacks[0]
    assert isinstance(first, GiveUpAtLimit)
    assert first.deadline is spent.deadline


@pytest.mark.parametrize("step", [4, 5])
def test_a_run_that_stopped_after_its_last_step_only_loads(run, monkeypatch, step):
    loaded = []
    monkeypatch.setattr(lifecycle, "load_finished", lambda *what: loaded.append(what))
    trainer = Trainer(run)
    plan = plan_of(run, step)
    assert fit(trainer, plan, budget()) is None
    assert loaded == [(trainer, run.checkpoints / f"checkpoint-{step}", step)]
    assert trainer.began == []


def test_a_limit_saves_the_last_step_and_is_named(run, monkeypatch):
    monkeypatch.setattr(lifecycle, "why_over", lambda budget: "40 s are over")
    trainer = Trainer(run, LimitReached())
    spent = budget()
    assert fit(trainer, plan_of(run), spent) == "40 s are over"
    assert (trainer.saved, spent.deadline.obeyed) == (1, 1)


def test_a_limit_before_the_first_step_leaves_nothing_to_save(run):
    trainer = Trainer(run, LimitReached(), step=0)
    with pytest.raises(LimitReached):
        fit(trainer, plan_of(run), budget())
    assert trainer.saved == 0


@pytest.mark.parametrize("error", [ValueError("oops"), SystemExit(3), SharedFailure("oops")])
def test_a_failure_saves_the_last_step_and_goes_on(run, error):
    trainer = Trainer(run, error)
    spent = budget()
    with pytest.raises(type(error)):
        fit(trainer, plan_of(run), spent)
    assert (trainer.saved, spent.deadline.obeyed) == (1, 1)


@pytest.mark.parametrize(("error", "saved"), [(ValueError("a"), 0), (SharedFailure("a"), 1)])
def test_of_several_processes_all_save_or_none(run, monkeypatch, error, saved):
    monkeypatch.setenv("WORLD_SIZE", "2")
    trainer = Trainer(run, error)
    with pytest.raises(type(error)):
        fit(trainer, plan_of(run), budget())
    assert trainer.saved == saved


def test_a_stretch_that_a_limit_does_not_allow_ends_without_a_save(run):
    trainer = Trainer(run, NotContinued())
    spent = budget()
    assert fit(trainer, plan_of(run, 2), spent) is None
    assert (trainer.saved, spent.deadline.obeyed) == (0, 1)


def test_an_interrupt_is_not_held_up_by_a_save(run):
    trainer = Trainer(run, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, plan_of(run), budget())
    assert trainer.saved == 0


def test_a_step_may_be_given_up_while_the_state_before_it_is_kept(run, monkeypatch):
    trainer = Trainer(run)
    spent = budget()
    fit(trainer, plan_of(run), spent)
    assert not spent.deadline.can_give_up()
    trainer.last_step = {"rng": 1}
    assert spent.deadline.can_give_up()

    monkeypatch.setenv("WORLD_SIZE", "2")
    fit(trainer, plan_of(run), spent)
    assert not spent.deadline.can_give_up()  # the other one would wait


# Left behind


def test_what_ignores_the_limit_is_left_after_a_save(run, monkeypatch, capsys):
    monkeypatch.setattr(lifecycle, "why_over", lambda budget: "40 s are over")
    trainer = Trainer(run)
    assert leave_behind(trainer, plan_of(run), budget()) == 0
    said = capsys.readouterr().err
    assert "40 s are over" in said
    assert "step 2" in said
    assert f"--resume {run.path}" in said


def test_without_a_checkpoint_the_exit_code_tells(run, monkeypatch, capsys):
    monkeypatch.setattr(lifecycle, "why_over", lambda budget: "40 s are over")
    monkeypatch.setenv("WORLD_SIZE", "2")  # whose state is spread over both
    trainer = Trainer(run)
    assert leave_behind(trainer, plan_of(run), budget()) == 2
    assert trainer.saved == 0
    assert "step 0" in capsys.readouterr().err

    write(run, 1)
    assert leave_behind(trainer, plan_of(run), budget()) == 0
    assert "step 1" in capsys.readouterr().err


# Failures


def test_a_failure_says_how_to_continue(run):
    def explained() -> str:
        with pytest.raises(ValueError, match="soon") as caught, explain_failure(plan_of(run)):
            parse_duration("soon")
        return str(caught.value)

    assert "continue from the start" in explained()
    write(run, 3)
    assert "continue from step 3" in explained()
    assert f"--resume {run.path}" in explained()


def test_a_shared_failure_stays_one_and_outlives_the_launcher(run, monkeypatch):
    ignored = []
    monkeypatch.setattr(process, "ignore_launcher", lambda: ignored.append(True))

    def share() -> None:
        error = SharedFailure("process 1: oops")
        error.__traceback__ = None
        raise error

    for processes in ("1", "2"):
        monkeypatch.setenv("WORLD_SIZE", processes)
        monkeypatch.setattr(lifecycle, "explain", str)
        with (
            pytest.raises(SharedFailure, match="process 1: oops; once"),
            explain_failure(plan_of(run)),
        ):
            share()

    assert ignored == [True]


def test_a_bug_keeps_its_traceback_and_says_how_to_continue(run, monkeypatch, caplog):
    monkeypatch.setattr(lifecycle, "explain", lambda error: None)
    with pytest.raises(KeyError), explain_failure(plan_of(run)):
        raise KeyError("a bug")

    assert f"--resume {run.path}" in caplog.text


# Words


def test_the_command_that_continues_names_code_again(tmp_path):
    own = RewardConfig(parts=("my file.py:score", "format"))
    config = TrainConfig(reward=own)
    plan = Plan(config, tmp_path / "run")
    assert resume_command(plan) == (
        f"mesotron train --resume {tmp_path / 'run'} --reward 'my file.py:score' format"
    )

    start = Plan(SftConfig(), tmp_path / "run" / "sft", whole=plan)
    assert resume_command(start) == resume_command(plan)
    alone = Plan(SftConfig(), tmp_path / "sft")
    assert resume_command(alone) == f"mesotron sft --resume {tmp_path / 'sft'}"


def test_a_stop_says_whether_the_step_is_saved(run):
    console = Console(record=True, width=300)
    say_stopped(console, run, plan_of(run), 2, None)
    write(run, 2)
    say_stopped(console, run, plan_of(run), 2, "no time is left")
    first, second = console.export_text().splitlines()
    assert "saved" not in first
    assert "saved at step 2: no time is left" in second
    assert all(f"--resume {run.path}" in line for line in (first, second))


def test_the_watchs_records_are_alarms():
    shown: list[tuple[str, str]] = []
    view: Any = SimpleNamespace(
        alarm=lambda text: shown.append(("alarm", text)),
        say=lambda text: shown.append(("say", text)),
    )
    handler = ToView(view)
    for name in ("mesotron.watch", "mesotron"):
        handler.emit(logging.LogRecord(name, logging.WARNING, "", 0, "%d left", (2,), None))

    assert shown == [("alarm", "2 left"), ("say", "2 left")]


def test_a_folder_is_cut_after_the_step_that_training_continues_from(run):
    for step in (1, 2, 3):
        run.append("metrics", {"step": step})

    assert first_step(plan_of(run)) == 0
    with lifecycle.open_folder(plan_of(run, 2), torch.device("cpu")) as opened:
        assert [row["step"] for row in opened.rows("metrics")] == [1, 2]


@pytest.mark.parametrize("save_every", [None, 3])
def test_arguments_of_the_trainer(run, save_every):
    config = TrainConfig(steps=9, save_every=save_every, keep=2, seed=5)
    model: Any = SimpleNamespace(dtype=torch.bfloat16)
    made: dict[str, Any] = {}
    for device in ("cpu", "cuda"):
        made = trainer_arguments(config, torch.device(device), model, run)
        assert made["use_cpu"] is (device == "cpu")
        assert made["dataloader_pin_memory"] is (device == "cuda")

    assert made["save_steps"] == (save_every or 9)
    assert (made["max_steps"], made["save_total_limit"], made["seed"]) == (9, 2, 5)
    assert made["bf16"]
    assert Path(made["output_dir"]) == run.checkpoints
    assert made["logging_nan_inf_filter"] is False

    model.dtype = torch.float32
    assert not trainer_arguments(config, torch.device("cpu"), model, run)["bf16"]


# Lost processes

CLOSED = (
    "[/__w/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[10.77.0.1]:38272. This is typically caused by a remote worker crashing."
)
TIMED_OUT = "[/__w/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv"


def fail(config, path, error):
    plan = SimpleNamespace(path=path, whole=None, config=config)
    with explain_failure(plan):
        raise error


@pytest.mark.parametrize("config", [TrainConfig(), SftConfig()], ids=["train", "sft"])
@pytest.mark.parametrize("variable", ["", "ACCELERATE_MIXED_PRECISION"])
@pytest.mark.parametrize("machines", ["1", "2"])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError(CLOSED), "(Connection closed by peer [10.77.0.1]:38272)"),
        (RuntimeError(TIMED_OUT), "(Timed out waiting 1800000ms for recv)"),
        (torch.distributed.DistNetworkError("no\nroute"), "(DistNetworkError (no)"),
    ],
)
def test_a_lost_process_is_one_sentence_with_the_command_that_continues(
    config, variable, machines, error, reason, tmp_path, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("GROUP_WORLD_SIZE", machines)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    if variable:
        monkeypatch.setenv(variable, "no")

    with pytest.raises(ValueError, match="--resume") as caught:
        fail(config, tmp_path, error)

    sentence = str(caught.value)
    command = "sft" if isinstance(config, SftConfig) else "train"
    assert reason in sentence
    assert f"-m mesotron {command} --resume {tmp_path}" in sentence
    assert ("accelerate launch" in sentence) == bool(variable)
    assert ("every machine" in sentence) == (machines == "2")


def test_one_process_alone_has_lost_no_other(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="RuntimeError") as caught:
        fail(TrainConfig(), tmp_path, RuntimeError(CLOSED))

    assert "lost" not in str(caught.value)
