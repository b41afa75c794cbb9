"""`mesotron.Watch`: the watch inside a trainer, as a plain TrainerCallback of Transformers.

Works in any Trainer, TRL's and this library's too. It reads what is logged and nothing else; it can
warn, or stop the run with a checkpoint. It changes neither weights nor settings.
"""

import logging
from pathlib import Path
from typing import Any, Literal

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mesotron.config import WatchSettings
from mesotron.runs.folder import RunFolder
from mesotron.watch.engine import Engine, is_number
from mesotron.watch.events import Event
from mesotron.watch.story import Story, tell

Guard = Literal["off", "warn", "stop"]
GUARDS = ("off", "warn", "stop")
log = logging.getLogger("mesotron.watch")


class Watch(TrainerCallback):
    """Watches a training run from its own logs.

    On a resumed run it first reads what the run has logged before, so that it judges as if the run
    had never stopped. With several processes each watches alike, and the first one speaks.

    Args:
        guard: warn tells what it sees on the logger "mesotron.watch"; stop also ends the run, with
            a checkpoint, at the first event of that severity; off only keeps the events.
        run: a run folder whose events.jsonl gets every event.
        settings: warm-up, window, patience and noise, in logged rows.

    Attributes:
        events: everything seen so far.
        stopped_by: the event that ended the run, or None.

    Example:
        >>> watch = Watch(guard="stop")
        >>> watch.events
        []
    """

    def __init__(
        self,
        guard: Guard = "warn",
        run: Path | str | None = None,
        settings: WatchSettings | None = None,
    ) -> None:
        if guard not in GUARDS:
            raise ValueError(f"guard {guard!r} is none of {', '.join(GUARDS)}")
        self.guard = guard
        self.run = None if run is None else RunFolder(Path(run))
        self.settings = settings
        self._restart()

    def _restart(self) -> None:
        self.engine = Engine(self.settings)
        self.rows: list[dict[str, float]] = []
        self.events: list[Event] = []
        self.stopped_by: Event | None = None

    def story(self) -> Story | None:
        """The run so far in words, or None before anything was logged."""
        return tell(self.rows, self.engine, self.events) if self.rows else None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Begin anew; on a resumed run, read what it has logged before."""
        self._restart()
        for row in state.log_history:
            self._take(row, int(row.get("step", 0)))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Take in one row; tell of what is new; stop the run if that is the guard."""
        for event in self._take(logs or {}, state.global_step):
            if state.is_world_process_zero:
                self._tell(event)
            if event.severity == "stop" and self.guard == "stop" and self.stopped_by is None:
                self.stopped_by = event
                control.should_training_stop = control.should_save = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Tell the story, if there is one to tell."""
        story = self.story()
        if story and state.is_world_process_zero and self.guard != "off":
            log.log(logging.INFO if story.condition == "healthy" else logging.WARNING, story.text())

    def _take(self, row: dict[str, Any], step: int) -> list[Event]:
        numbers = {key: float(value) for key, value in row.items() if is_number(value)}
        self.rows.append({**numbers, "step": float(step)})
        new = self.engine.update(self.rows[-1])
        self.events += new
        return new

    def _tell(self, event: Event) -> None:
        if self.run is not None:
            self.run.append("events", event.record())
        if self.guard != "off":
            log.warning(event.sentence())
