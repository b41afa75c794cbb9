"""Rollouts, events and verdicts at trackers: their own files are read again, where installed."""

import json
import logging
import os
import sqlite3
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from mesotron.config.train import TrackerName
from mesotron.rlvr import trackers
from mesotron.rlvr.trackers import TRACKERS, Tracked, as_messages, as_text
from mesotron.rlvr.trl_trainer import Sample
from mesotron.watch.callback import Watch

CHAT = [{"role": "user", "content": "What is 2 + 3?"}]
CALL = [
    {"role": "assistant", "tool_calls": [{"name": "add"}]},
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "<b>5</b>"},
]
SAMPLES = [Sample(CHAT, CALL, 1.0, 0.5), Sample("What is 1 + 1?", "x" * 10_000, 0.0, -0.5)]
FALLING = [0.8] * 20 + [0.05] * 20


class Recorder:
    """A tracker that keeps what it gets."""

    fails = False

    def __init__(self, trainer: Any) -> None:
        self.got: list[Any] = []

    def page(self) -> str:
        return "http://here"

    def send_rollouts(self, samples: Any, step: int) -> None:
        if self.fails:
            raise ConnectionError("secret")
        self.got.append(("rollouts", step, len(samples)))

    def send_event(self, event: Any, run: str) -> None:
        self.got.append(("event", event.step, event.detector))

    def send_verdict(self, diagnosis: Any, step: int) -> None:
        self.got.append(("verdict", step, diagnosis.condition))


@pytest.fixture
def recorder(monkeypatch) -> type[Recorder]:
    monkeypatch.setattr(Recorder, "fails", False)
    monkeypatch.setitem(TRACKERS, "trackio", Recorder)
    return Recorder


def state_at(step: int, is_main: bool = True) -> Any:
    return SimpleNamespace(
        global_step=step,
        max_steps=len(FALLING),
        is_world_process_zero=is_main,
        log_history=[],
        best_model_checkpoint=None,
    )


def train(tracked: Tracked, watch: Watch, rewards: list[float], is_main: bool = True) -> None:
    args = SimpleNamespace(output_dir="", load_best_model_at_end=False, save_total_limit=None)
    for callback in (watch, tracked):
        callback.on_train_begin(args, state_at(0, is_main), None)

    for step, reward in enumerate(rewards, 1):
        logs = {"loss": 0.1, "reward": reward, "step": step}
        for callback in (watch, tracked):
            callback.on_log(args, state_at(step, is_main), None, logs=logs)

    last = {"train_runtime": 1.0}
    for callback in (watch, tracked):
        callback.on_log(args, state_at(len(rewards), is_main), None, logs=last)


def make_tracked(watch: Watch, said: list[str]) -> Tracked:
    trainer = SimpleNamespace(samples=lambda number: SAMPLES[:number])
    return Tracked(["trackio"], trainer, watch, "run-1", said.append)


def test_every_choice_has_a_tracker():
    assert {*TRACKERS} == {*get_args(TrackerName)}


def test_what_a_tracker_gets(recorder):
    watch = Watch("off")
    said: list[str] = []
    tracked = make_tracked(watch, said)
    train(tracked, watch, FALLING)

    got = tracked.trackers["trackio"].got
    assert said == ["run page: http://here"]
    assert [item for item in got if item[0] == "rollouts"] == [
        ("rollouts", step, 2) for step in range(1, 41)
    ]
    events = [item[1:] for item in got if item[0] == "event"]
    assert events == [(event.step, event.detector) for event in watch.events]
    assert "reward_collapse" in {detector for _, detector in events}
    assert got[-1] == ("verdict", 40, "dead")


@pytest.mark.parametrize("address", ["http://{}mlflow.example:5000", "postgresql://{}host/runs"])
def test_the_page_of_mlflow_has_no_password(address, monkeypatch):
    info = SimpleNamespace(experiment_id="1", run_id="2")
    client = SimpleNamespace(
        get_tracking_uri=lambda: address.format("ann:secret@"),
        active_run=lambda: SimpleNamespace(info=info),
    )
    monkeypatch.setitem(sys.modules, "mlflow", client)

    page = TRACKERS["mlflow"](None).page()
    assert "secret" not in page
    assert address.format("") in page


def test_only_the_main_process_sends(recorder):
    watch = Watch("off")
    said: list[str] = []
    tracked = make_tracked(watch, said)
    train(tracked, watch, FALLING, is_main=False)
    assert (tracked.trackers["trackio"].got, said) == ([], [])


def test_a_server_that_is_down_ends_no_run(recorder, monkeypatch, caplog):
    monkeypatch.setattr(recorder, "fails", True)
    watch = Watch("off")
    tracked = make_tracked(watch, [])
    with caplog.at_level(logging.WARNING, logger="mesotron"):
        train(tracked, watch, FALLING)

    assert tracked.trackers == {}
    assert caplog.text.count("trackio") == 1
    assert "secret" not in caplog.text


def test_turns_as_messages():
    roles = [turn["role"] for turn in as_messages(CALL, "assistant")]
    assert roles == ["assistant", "tool", "assistant"]
    assert as_messages("hello", "user") == [{"role": "user", "content": "hello"}]
    assert "add" in as_text(CALL)
    assert len(as_text("x" * 10_000)) == trackers.MAX_TEXT


# The trackers themselves, in a process of their own


def drive(name: str, folder: Path, **variables: str) -> dict[str, Any]:
    """What a tracker of this name has in its own files after rollouts, an event and a verdict."""
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")

    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "support.tracker_run", name, str(folder)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_trackio_keeps_tables_traces_and_alerts(tmp_path):
    store = tmp_path / "store"
    said = drive("trackio", tmp_path, TRACKIO_DIR=str(store))
    assert said["pages"] == ["run page: trackio show --project huggingface"]

    (file,) = store.glob("*.db")
    with sqlite3.connect(file) as database:
        rows = [*database.execute("SELECT step, metrics FROM metrics")]
        alerts = [*database.execute("SELECT title, level, step FROM alerts ORDER BY id")]
        traces = [*database.execute("SELECT messages FROM traces")]
    database.close()

    tables = {}
    for step, text in rows:
        values = json.loads(text)
        if "rollouts" in values:
            tables[step] = values["rollouts"]["_value"]

    assert [*tables] == [*range(1, 41)]
    assert tables[1][0]["reward"] == 1.0
    assert len(traces) == 80
    assert {turn["role"] for turn in json.loads(traces[0][0])} >= {"user", "assistant"}
    assert ("run-1 is dead: reward collapse", "error") in [alert[:2] for alert in alerts]
    assert alerts[-1] == ("verdict: dead", "error", 40)


def test_tensorboard_keeps_texts(tmp_path):
    said = drive("tensorboard", tmp_path, TENSORBOARD_LOGGING_DIR=str(tmp_path / "board"))
    assert said["pages"] == [f"run page: tensorboard --logdir {tmp_path / 'board'}"]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "board"), size_guidance={"tensors": 0})
    board.Reload()
    texts = board.Tags()["tensors"]
    assert "rollouts/text_summary" in texts
    assert "watch/reward_collapse/text_summary" in texts
    (verdict,) = board.Tensors("watch/verdict/text_summary")
    assert b"dead" in verdict.tensor_proto.string_val[0]
    rollouts = board.Tensors("rollouts/text_summary")
    assert len(rollouts) == 40
    assert rb"\<b\>5" in rollouts[0].tensor_proto.string_val[0]


def test_mlflow_keeps_artifacts_and_tags(tmp_path):
    store = f"sqlite:///{tmp_path}/mlflow.db"
    said = drive("mlflow", tmp_path, MLFLOW_TRACKING_URI=store)
    assert said["pages"] == [f"run page: mlflow ui --backend-store-uri {store}"]

    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        tags = dict(database.execute("SELECT key, value FROM tags"))
    database.close()

    assert tags["watch.condition"] == "dead"
    rollouts = json.loads(next(tmp_path.rglob("step-000001.json")).read_text())["rollouts"]
    assert [row["reward"] for row in rollouts] == [1.0, 0.0]
    assert [*tmp_path.rglob("step-*-reward_collapse.json")]


def test_wandb_keeps_a_table_and_the_verdict(tmp_path):
    said = drive("wandb", tmp_path, WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    (page,) = said["pages"]
    assert page.startswith("run page: wandb sync ")
    assert Path(page.removeprefix("run page: wandb sync ")).is_dir()
    assert said["condition"] == "dead"
    assert [*tmp_path.rglob("*.table.json")]
