"""`mesotron watch` as a user types it, and `mesotron.Watch` inside a real Trainer."""

import json
import logging
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from mesotron.config import WatchConfig, WatchSettings
from mesotron.runs.folder import RunFolder
from mesotron.watch.command import run
from mesotron.watch.events import Event
from support.watch_streams import FAILURES, TURN, Row, healthy


def write(path, rows: list[Row]):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# the command -------------------------------------------------------------------------------------


def test_the_story_of_a_log(tmp_path, mesotron):
    log = write(tmp_path / "metrics.jsonl", FAILURES["parser_drift"](3))
    done = mesotron("watch", str(log), "--out", str(tmp_path / "story.json"), "--check")
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    assert "cause: parser drift" in done.stdout
    assert "what to do:" in done.stdout
    assert "not checked" not in done.stdout
    story = json.loads((tmp_path / "story.json").read_text())
    assert story["condition"] == "dead"
    assert story["cause"] == "parser_drift"
    assert story["text"] in done.stdout
    assert {"kind", "step", "detector", "severity", "evidence"} <= set(story["events"][0])


def test_a_healthy_run_exits_with_0(tmp_path, capsys):
    log = write(tmp_path / "a.jsonl", healthy(0))
    assert run(WatchConfig(path=log, check=True)) == 0
    assert "healthy" in capsys.readouterr().out


def test_what_could_not_be_looked_for_is_said(tmp_path, capsys):
    rows = [{"step": k, "reward": 0.5} for k in range(80)]
    run(WatchConfig(path=write(tmp_path / "a.jsonl", rows)))
    out = capsys.readouterr().out
    assert "not checked" in out
    assert "  repetition: repetition" in out


def test_a_name_can_be_given(tmp_path, capsys):
    rows = [{"step": k, "my/score": 0.7 if k < 60 else 0.1} for k in range(100)]
    log = write(tmp_path / "a.jsonl", rows)
    run(WatchConfig(path=log, rename=("reward=my/score",)))
    assert "cause: reward collapse" in capsys.readouterr().out


def test_input_that_cannot_be_used_is_a_sentence(tmp_path, sentence):
    log = write(tmp_path / "a.jsonl", [{"step": 1, "my/score": 1.0}])
    assert "no known metric (it has my/score)" in sentence("watch", str(log))
    assert "did you mean my/score?" in sentence("watch", str(log), "--rename", "reward=my/scor")
    assert "is not one of" in sentence("watch", str(log), "--rename", "prize=my/score")
    log.write_text("{}\n{\n{}\n")
    assert "a.jsonl line 2 is not JSON" in sentence("watch", str(log))


def test_a_short_log_is_judged_by_a_shorter_baseline(tmp_path, capsys):
    """TRL logs every tenth step: 300 steps are 30 rows."""
    rows = [{"step": 10 * k, "reward": 0.7 if k < 18 else 0.05} for k in range(30)]
    run(WatchConfig(path=write(tmp_path / "a.jsonl", rows)))
    out = capsys.readouterr().out
    assert "cause: reward collapse" in out
    assert "short log of 30 rows" in out


def test_following_tells_events_as_they_come_and_ends_with_the_story(tmp_path):
    rows = FAILURES["reward_collapse"](0)
    log = write(tmp_path / "metrics.jsonl", rows[:TURN])
    words = ["watch", str(log), "--follow", "--every", "0.05"]
    # A shell that starts the tests in the background has interrupts ignored, and children inherit.
    code = (
        "import signal\n"
        "from mesotron.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"raise SystemExit(main({words!r}))\n"
    )
    command = [sys.executable, "-c", code]
    live = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with log.open("a") as file:
        for row in rows[TURN:]:
            file.write(json.dumps(row) + "\n")
    assert live.stdout is not None
    first = live.stdout.readline()
    while " stop, " not in first:
        assert first, "the command ended without telling of the stop"
        first = live.stdout.readline()
    live.send_signal(signal.SIGINT)
    rest, _ = live.communicate(timeout=60)
    assert live.returncode == 0
    assert "stopped following" in rest
    assert "cause: reward collapse" in rest


def test_following_ends_by_itself_when_nothing_comes(tmp_path, capsys):
    log = write(tmp_path / "a.jsonl", healthy(0, steps=30))
    started = time.monotonic()
    assert run(WatchConfig(path=log, follow=True, every=0.01, idle=0.05)) == 0
    assert time.monotonic() - started >= 0.05
    assert "steps 0-29 healthy" in capsys.readouterr().out


def test_the_watch_imports_no_framework(tmp_path):
    log = write(tmp_path / "a.jsonl", healthy(0, steps=30))
    code = (
        "import sys; from mesotron.cli import main; main(['watch', sys.argv[1]]); "
        "print(sorted({'torch', 'jax', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(log)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


# the callback ------------------------------------------------------------------------------------

SETTINGS = WatchSettings(warmup=4, window=2, patience=2)
FALL = 12


class Line(nn.Module):
    """One weight, and the loss that Trainer asks a model for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.weight - x) ** 2).mean()}


def trainer(folder, watch, steps: int = 30):
    """A Trainer of Transformers that also logs a reward which falls at step FALL."""
    from transformers import Trainer, TrainingArguments

    class Rewarded(Trainer):
        def log(self, logs, *args, **kwargs):
            if "loss" in logs:
                logs["reward"] = 0.7 if self.state.global_step < FALL else 0.05
            super().log(logs, *args, **kwargs)

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, logging_steps=1, use_cpu=True, report_to="none",
        save_strategy="steps", save_steps=10, disable_tqdm=True, save_only_model=False,
    )  # fmt: skip
    data = [{"x": torch.ones(1)} for _ in range(64)]
    return Rewarded(model=Line(), args=arguments, train_dataset=data, callbacks=[watch])


@pytest.fixture
def make_watch():
    from mesotron import Watch

    return Watch


def severities(events: list[Event]) -> list[tuple[int, str, str]]:
    return [(event.step, event.detector, event.severity) for event in events]


def test_stop_ends_a_trainer_with_a_checkpoint_and_the_story(tmp_path, make_watch, caplog):
    folder = RunFolder.create(tmp_path / "run", config={}, environment={})
    watch = make_watch(guard="stop", run=folder.path, settings=SETTINGS)
    with caplog.at_level(logging.INFO, logger="mesotron.watch"):
        trainer(tmp_path / "out", watch).train()
    assert watch.stopped_by is not None
    step = watch.stopped_by.step
    assert FALL < step < FALL + 8
    assert (tmp_path / "out" / f"checkpoint-{step}" / "trainer_state.json").exists()
    written = folder.rows("events")
    assert written[-1]["severity"] == "stop"
    assert written[-1]["changes"][0]["field"] == "optim.lr"
    assert "cause: reward collapse" in caplog.messages[-1]


def test_warn_lets_the_run_go_on_and_off_is_silent(tmp_path, make_watch, caplog):
    for guard in ("warn", "off"):
        caplog.clear()
        watch = make_watch(guard=guard, settings=SETTINGS)
        run = trainer(tmp_path / guard, watch)
        run.train()
        assert run.state.global_step == 30
        assert "stop" in [event.severity for event in watch.events]
        assert bool(caplog.messages) == (guard == "warn")


def test_a_resumed_run_is_watched_as_if_it_had_never_stopped(tmp_path, make_watch):
    whole = make_watch(settings=SETTINGS)
    trainer(tmp_path / "out", whole).train()
    resumed = make_watch(settings=SETTINGS)
    trainer(tmp_path / "out", resumed).train(
        resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-10")
    )
    assert severities(resumed.events) == severities(whole.events)
    assert resumed.engine.state()["tracks"]["reward"] == whole.engine.state()["tracks"]["reward"]


def test_a_guard_that_is_none_is_refused(make_watch):
    with pytest.raises(ValueError, match="guard 'shout' is not one of off, warn, stop"):
        make_watch(guard="shout")
