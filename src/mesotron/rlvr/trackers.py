"""What `--report-to` adds to the metrics that Transformers sends: the page of the run, rollouts,
events of the watch, and its verdict, in W&B, trackio, TensorBoard or MLflow.

A tracker is a class with five short methods. Transformers' own callback has opened the tracker's
run before ours is asked, and closes it after the last row.
"""

import logging
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from transformers import TrainerCallback

from mesotron.rlvr.trl_trainer import Sample
from mesotron.runs.files import Row
from mesotron.runs.markdown import as_plain, make_table
from mesotron.watch.alerts import LEVELS, STATES
from mesotron.watch.callback import Watch
from mesotron.watch.detectors import Event
from mesotron.watch.diagnosis import Diagnosis

log = logging.getLogger("mesotron")
MOST_ROLLOUTS = 4  # of each step that samples
MAX_TEXT = 4000  # characters of one
COLUMNS = ("step", "prompt", "completion", "reward", "advantage")
STEP = "train/global_step"  # what Transformers calls it there


def cells_of(sample: Sample, step: int) -> Row:
    """A completion as a row of a table."""
    return {
        "step": step,
        "prompt": as_text(sample.prompt),
        "completion": as_text(sample.completion),
        "reward": sample.reward,
        "advantage": sample.advantage,
    }


def as_messages(turns: Any, role: str) -> list[Row]:
    if isinstance(turns, str):
        return [{"role": role, "content": turns[:MAX_TEXT]}]

    messages = []
    for turn in turns:
        content = turn.get("content") or turn.get("tool_calls") or ""
        messages.append({"role": str(turn.get("role", role)), "content": str(content)[:MAX_TEXT]})

    return messages


def as_text(turns: Any) -> str:
    return "\n".join(message["content"] for message in as_messages(turns, ""))


# The trackers


class Tracker(Protocol):
    """One place where people look at runs."""

    def __init__(self, trainer: Any) -> None: ...

    def page(self) -> str:
        """Where the run is seen: an address, or the command that shows it."""
        ...

    def send_rollouts(self, samples: Sequence[Sample], step: int) -> None: ...

    def send_event(self, event: Event, run: str) -> None: ...

    def send_verdict(self, diagnosis: Diagnosis, step: int) -> None: ...


class ToTensorBoard:
    """Texts beside the scalars of its event files."""

    def __init__(self, trainer: Any) -> None:
        callbacks = trainer.callback_handler.callbacks
        (callback,) = [one for one in callbacks if type(one).__name__ == "TensorBoardCallback"]
        self.callback = callback

    def page(self) -> str:
        return f"tensorboard --logdir {self.callback.tb_writer.log_dir}"

    def send_rollouts(self, samples: Sequence[Sample], step: int) -> None:
        rows = []
        for sample in samples:
            row = {
                **cells_of(sample, step),
                "reward": f"{sample.reward:.3g}",
                "advantage": f"{sample.advantage:.3g}",
            }
            rows.append([as_plain(str(value)) for value in row.values()])

        self.write("rollouts", "\n".join(make_table(COLUMNS, rows)), step)

    def send_event(self, event: Event, run: str) -> None:
        self.write(f"watch/{event.detector}", as_plain(event.sentence()), event.step)

    def send_verdict(self, diagnosis: Diagnosis, step: int) -> None:
        self.write("watch/verdict", as_plain(diagnosis.text()), step)

    def write(self, name: str, text: str, step: int) -> None:
        self.callback.tb_writer.add_text(name, text, step)


class ToWandb:
    """A table, alerts, and the verdict in the run's summary."""

    def __init__(self, trainer: Any) -> None:
        self.client: Any = sys.modules["wandb"]

    def page(self) -> str:
        run = self.client.run
        return run.url or f"wandb sync {run.dir.removesuffix('/files')}"

    def send_rollouts(self, samples: Sequence[Sample], step: int) -> None:
        data = [[*cells_of(sample, step).values()] for sample in samples]
        rollouts = self.client.Table(columns=[*COLUMNS], data=data)
        self.client.run.log({"rollouts": rollouts, STEP: step})

    def send_event(self, event: Event, run: str) -> None:
        self.client.run.alert(title_of(event, run), event.sentence(), level=LEVELS[event.severity])

    def send_verdict(self, diagnosis: Diagnosis, step: int) -> None:
        summary = {"watch/condition": diagnosis.condition, "watch/verdict": diagnosis.text()}
        self.client.run.summary.update(summary)


class ToTrackio:
    """A table, traces of the conversations, and alerts; the verdict is an alert too."""

    def __init__(self, trainer: Any) -> None:
        self.client: Any = sys.modules["trackio"]

    def page(self) -> str:
        variables = self.client.context_vars
        space = variables.current_space_id.get()
        if space:
            return f"https://huggingface.co/spaces/{space}"

        return f"trackio show --project {variables.current_project.get()}"

    def send_rollouts(self, samples: Sequence[Sample], step: int) -> None:
        data = []
        traces = []
        for sample in samples:
            data.append([*cells_of(sample, step).values()])
            turns = [*as_messages(sample.prompt, "user")]
            turns += as_messages(sample.completion, "assistant")
            earned = {"step": step, "reward": sample.reward, "advantage": sample.advantage}
            traces.append(self.client.Trace(turns, metadata=earned))

        table = self.client.Table(columns=[*COLUMNS], data=data)
        # With a step, so that the next row counts on from it: the axis is that of the run.
        self.client.log({"rollouts": table, "traces": traces, STEP: step}, step=step)

    def send_event(self, event: Event, run: str) -> None:
        level = LEVELS[event.severity].lower()
        self.alert(title_of(event, run), event.sentence(), level, event.step)

    def send_verdict(self, diagnosis: Diagnosis, step: int) -> None:
        levels = {"dead": "error", "drifting": "warn"}
        level = levels.get(diagnosis.condition, "info")
        self.alert(f"verdict: {diagnosis.condition}", diagnosis.text(), level, step)

    def alert(self, title: str, text: str, level: str, step: int) -> None:
        run = self.client.context_vars.current_run.get()
        run.alert(title, text, level=self.client.AlertLevel(level), step=step)


class ToMlflow:
    """Rollouts and events as artifacts, the verdict as tags."""

    def __init__(self, trainer: Any) -> None:
        self.client: Any = sys.modules["mlflow"]

    def page(self) -> str:
        # Without a password, which the run's log would keep.
        address = re.sub(r"//[^/]*@", "//", self.client.get_tracking_uri())
        info = self.client.active_run().info
        if address.startswith("http"):
            return f"{address}/#/experiments/{info.experiment_id}/runs/{info.run_id}"

        return f"mlflow ui --backend-store-uri {address}"

    def send_rollouts(self, samples: Sequence[Sample], step: int) -> None:
        rows = [cells_of(sample, step) for sample in samples]
        self.client.log_dict({"rollouts": rows}, f"rollouts/step-{step:06}.json")

    def send_event(self, event: Event, run: str) -> None:
        name = f"watch/step-{event.step:06}-{event.detector}.json"
        self.client.log_dict(event.record(), name)

    def send_verdict(self, diagnosis: Diagnosis, step: int) -> None:
        tags = {"watch.condition": diagnosis.condition, "watch.verdict": diagnosis.text()}
        self.client.set_tags(tags)


TRACKERS: dict[str, type[Tracker]] = {
    "wandb": ToWandb,
    "trackio": ToTrackio,
    "tensorboard": ToTensorBoard,
    "mlflow": ToMlflow,
}


def title_of(event: Event, run: str) -> str:
    return f"{run} {STATES[event.severity]}: {event.title}"[:63]


# During training


class Tracked(TrainerCallback):
    """Sends to the trackers; must come after the watch. One that fails is named once and left."""

    def __init__(
        self,
        names: Sequence[str],
        trainer: Any,
        watch: Watch,
        run: str,
        say: Callable[[str], None],
    ) -> None:
        self.trackers = {name: TRACKERS[name](trainer) for name in names}
        self.trainer = trainer
        self.watch = watch
        self.run = run
        self.say = say
        self._seen: set[tuple[int, str, str]] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._new_events()  # those of a resumed run were sent
        if state.is_world_process_zero:
            self._each(lambda tracker: self.say(f"run page: {tracker.page()}"))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not state.is_world_process_zero:
            return

        logs = logs or {}
        if "reward" in logs and "loss" in logs:  # this step sampled
            samples = self.trainer.samples(MOST_ROLLOUTS)
            if samples:
                self._each(lambda tracker: tracker.send_rollouts(samples, state.global_step))

        for event in self._new_events():
            self._each(lambda tracker, event=event: tracker.send_event(event, self.run))

        diagnosis = self.watch.diagnosis()
        if "train_runtime" in logs and diagnosis is not None:  # the last row
            self._each(lambda tracker: tracker.send_verdict(diagnosis, state.global_step))

    def _new_events(self) -> list[Event]:
        new = []
        for event in self.watch.events:
            key = (event.step, event.detector, event.severity)
            if key not in self._seen:
                self._seen.add(key)
                new.append(event)

        return new

    def _each(self, send: Callable[[Any], None]) -> None:
        for name, tracker in [*self.trackers.items()]:
            try:
                send(tracker)
            except Exception as error:  # a server that is down must not end the run
                del self.trackers[name]
                log.warning(f"{name} gets no more rollouts and events: {type(error).__name__}")
