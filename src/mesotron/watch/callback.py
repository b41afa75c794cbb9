"""`mesotron.Watch`: the watch as a TrainerCallback for any Trainer of Transformers or TRL.

It reads only what is logged. With several processes the first one decides and all act alike.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from mesotron.config import GuardName, RunWatchConfig, WatchSettings
from mesotron.runs.folder import RunFolder
from mesotron.watch import guard as decide
from mesotron.watch import settings as live
from mesotron.watch.alerts import Alerts
from mesotron.watch.detectors import (
    ACTION_KEY,
    SMALLER_STEP,
    Action,
    Change,
    Detector,
    Event,
    load_detectors,
    with_own,
)
from mesotron.watch.diagnosis import Diagnosis, diagnose_run, why_unknown
from mesotron.watch.engine import Engine, Monitor, is_number
from mesotron.watch.metrics import Row
from mesotron.watch.settings import Settings

GUARDS = get_args(GuardName)
ACTING = ("stop", "rollback")
log = logging.getLogger("mesotron.watch")


class Watch(TrainerCallback):
    """Watches a training run through its own logs.

    On resume it first reads what the run has logged before, so that it judges as if the run had
    never stopped, and applies the remedies of earlier rollbacks again.

    Args:
        guard: warn logs each event on the logger "mesotron.watch"; stop also ends the run, with a
            checkpoint, at the first event of that severity; rollback instead restores the last
            checkpoint from before the failure, applies the detector's remedy and continues; off
            only collects the events.
        run: a run folder, to whose events.jsonl every event is appended.
        settings: warmup, window, patience and noise, in logged rows.
        trainer: required for guard="rollback".
        tries: rollbacks before the run is stopped.
        more: settings that this trainer can change beyond those of `settings.settings_of`.
        precision: the guard acts only on alarms that are at least as likely to be right.
        detectors: your own, before ours, or a TOML file of them (`detectors.load_detectors`).
        alerts: channels that get every event, as in "slack:$SLACK_URL" (see `alerts`).
        price: dollars per hour of the machine, for the alerts.

    Attributes:
        stopped_by: the event that ended the run, or None.
    """

    def __init__(  # noqa: PLR0913  # settings by name
        self,
        guard: GuardName = "warn",
        run: Path | str | None = None,
        settings: WatchSettings | None = None,
        *,
        trainer: Any = None,
        tries: int = 3,
        more: Settings | None = None,
        precision: float = RunWatchConfig.precision,
        detectors: Sequence[Detector] | Path | str = (),
        alerts: Sequence[str] = (),
        price: float | None = None,
    ) -> None:
        if guard not in GUARDS:
            raise ValueError(f"guard {guard!r} is not one of {', '.join(GUARDS)}")
        if guard == "rollback":
            live.check_rollback(trainer, tries)
        if isinstance(detectors, Path | str):
            detectors = load_detectors(Path(detectors))

        self.guard = guard
        self.settings = settings
        self.run = None if run is None else RunFolder(Path(run))
        self.trainer = trainer
        self.tries = tries
        self.more = more or {}
        self.precision = precision
        self.detectors = with_own(detectors)
        self.alerts = alerts_of(self.run, alerts, price)
        self._restart()

    def _restart(self) -> None:
        self.monitor = Monitor(self.settings, self.detectors)
        self._saved: list[int] = []  # steps of the checkpoints
        self.stopped_by: Event | None = None
        self._pending: list[Event] = []  # since the last training row

    # What it knows

    @property
    def engine(self) -> Engine:
        return self.monitor.engine

    @property
    def events(self) -> list[Event]:
        """All events so far."""
        return self.monitor.events

    @property
    def actions(self) -> list[Action]:
        """All actions of the guard so far."""
        return self.monitor.actions

    def state(self) -> str:
        """The state of the run so far in a few words, such as "warn: entropy collapse"."""
        words = []
        for name, severity in self.engine.active().items():
            words.append(f"{severity}: {name.replace('_', ' ')}")

        count = self.monitor.num_rollbacks
        if count:
            words.append("1 rollback" if count == 1 else f"{count} rollbacks")

        if words:
            return ", ".join(words)

        is_unknown = why_unknown(self.engine, len(self.monitor.rows)) is not None
        return "not known yet" if is_unknown else "healthy so far"

    def diagnosis(self) -> Diagnosis | None:
        """The diagnosis of the run so far, or None before anything was logged."""
        if self.monitor.rows:
            return diagnose_run(self.monitor)

        return None

    @property
    def last_healthy_checkpoint(self) -> int | None:
        """Step of the last checkpoint from before everything harmful that is active."""
        onset = self.engine.unhealthy_since()
        if onset is None:
            return max(self._saved, default=None)

        healthy = []
        for step in self._saved:
            if step < max(onset, 1):
                healthy.append(step)

        return max(healthy, default=None)

    # What the trainer calls

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Start fresh; on a resumed run, replay what it has logged before."""
        self._restart()
        output = getattr(args, "output_dir", None) or ""
        if not self.alerts.run:
            self.alerts.run = Path(output).name

        if state.global_step and self.guard != "off" and output:
            self._saved = _checkpoints_until(state.global_step, Path(output))

        checkpoints = self._saved if self.guard == "rollback" else ()
        self.monitor.replay(_history(state), checkpoints)
        if self.guard in ACTING and state.is_world_process_zero:
            self._name_old_stops()

        if self.guard == "rollback":
            self._apply_earlier_remedies()
            if not state.global_step and self._saves:
                # A run that fails before its first checkpoint can go back to its start.
                self.trainer._save_checkpoint(self.trainer.model, trial=None)
                self.monitor.save(0)

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        model: Any = None,
        **_: Any,
    ) -> None:
        """Take one row, report new events, and act on them if the guard is to."""
        logs = logs or {}
        self._clear_running_loss(logs)

        events = self.monitor.update(_as_row(logs, state.global_step))
        is_broken = self.guard in ACTING and has_broken_weights(model, logs)
        if is_broken:  # with patience the next step would sample from them
            events = self._stop_for_weights(events)

        if state.is_world_process_zero:
            for event in events:
                self._report(event)

        self._pending += events
        self._protect(args, state)
        if "train_runtime" in logs and self._saved and self.stopped_by is None:
            # With a limit of one checkpoint Transformers now removes all but the best.
            self._name_best(args, state, max(self._saved))

        # Not after an evaluation: every process gets here with a training row.
        if "loss" in logs and self.guard in ACTING:
            self._act(state, control, can_save=not is_broken)
        if "loss" in logs:
            self._pending = []

    def on_save(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Keep the engine's state for this checkpoint; drop those of deleted checkpoints."""
        names = {path.name for path in Path(args.output_dir).glob("checkpoint-*")}
        left = [step for step in self._saved if f"checkpoint-{step}" in names]
        self._saved = [*left, state.global_step]  # another process may still be writing this one
        self._protect(args, state)

        if self.guard == "rollback":
            for step in [*self.monitor.snapshots]:
                if f"checkpoint-{step}" not in names:
                    del self.monitor.snapshots[step]
            self.monitor.save(state.global_step)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Log the diagnosis: one line if the run is healthy."""
        diagnosis = self.diagnosis()
        if diagnosis and state.is_world_process_zero and self.guard != "off":
            lines = [diagnosis.text()]
            if diagnosis.remedy:
                lines += diagnosis.explanation()[: 2 if diagnosis.cause else 1]
            log.warning("; ".join(lines))

        self.alerts.close()

    # On resume

    def _name_old_stops(self) -> None:
        for name, severity in self.engine.active().items():
            if severity == "stop":
                title = name.replace("_", " ")
                log.warning(f"resumed after a stop for {title}: not stopped for that again")

    def _apply_earlier_remedies(self) -> None:
        settings = self._settings()
        for action in self.actions:
            for change in action.changes:
                setting = settings[change["field"]]
                if not setting.in_checkpoint:
                    setting.write(change["new"])

    # On a row

    def _clear_running_loss(self, logs: Mapping[str, Any]) -> None:
        """Transformers subtracts the running loss from itself, and NaN - NaN stays NaN."""
        running = getattr(self.trainer, "_tr_loss", None)
        if running is not None and not math.isfinite(logs.get("loss") or 0.0):
            running.zero_()

    def _stop_for_weights(self, events: list[Event]) -> list[Event]:
        """The events with a stop for weights that are not finite in place of its warning."""
        stop = self.engine.force_stop("nonfinite")
        self.events.append(stop)
        return [stop, *(event for event in events if event.detector != stop.detector)]

    def _report(self, item: Event | Action) -> None:
        if self.run is not None:
            self.run.append("events", item.record())
        if self.guard != "off":
            log.warning(item.sentence())
        if isinstance(item, Event) and self.alerts.channels:
            self.alerts.send(item)

    def _protect(self, args: Any, state: TrainerState) -> None:
        """Let `save_total_limit` keep the last healthy checkpoint, as it keeps the best one."""
        step = self.last_healthy_checkpoint
        if step is not None:
            self._name_best(args, state, step)

    def _name_best(self, args: Any, state: TrainerState, step: int) -> None:
        if self.guard == "off" or args is None or args.load_best_model_at_end:
            return
        if args.save_total_limit:
            state.best_model_checkpoint = str(Path(args.output_dir) / f"checkpoint-{step}")

    # The guard

    def _act(self, state: TrainerState, control: TrainerControl, can_save: bool) -> None:
        """Act on what was found since the last training row; all processes alike."""
        event = decide.choose_event(self._pending, self.engine.detectors, self.precision)
        event = broadcast(event)
        if event is None:
            return

        if self.guard == "stop":
            self._stop(event, control, can_save)
        else:
            self._roll_back(event, state, control, can_save)

    def _stop(self, event: Event, control: TrainerControl, can_save: bool) -> None:
        if self.stopped_by is None:
            self.stopped_by = event
            control.should_training_stop = True
            control.should_save = can_save

    def _roll_back(
        self, event: Event, state: TrainerState, control: TrainerControl, can_save: bool
    ) -> None:
        """Roll back and continue, or stop; the action is kept where a resumed run finds it."""
        # Only the first process verifies the checkpoints.
        choice = self._choose(event) if state.is_world_process_zero else None
        checkpoint, why = broadcast(choice)

        evidence = tuple(asdict(item) for item in event.evidence)
        if why:
            action = Action(
                step=event.step,
                detector=event.detector,
                evidence=evidence,
                action="stop",
                attempt=self.monitor.num_rollbacks,
                reason=why,
            )
            self._stop(event, control, can_save and self._saves)
        else:
            live.roll_back(self.trainer, self._root / f"checkpoint-{checkpoint}")
            changes, refused = self._apply_remedy(event, state)
            action = Action(
                step=event.step,
                detector=event.detector,
                evidence=evidence,
                action="rollback",
                attempt=self.monitor.num_rollbacks + 1,
                reason=f"{event.title} began at step {event.began}",
                checkpoint=checkpoint,
                changes=changes,
                refused=refused,
            )
            control.should_save = True  # a run killed from now on resumes from here

        self._keep(action, state)

    def _choose(self, event: Event) -> tuple[int | None, str]:
        """The checkpoint to go back to, or why there is none."""
        complete = live.complete_checkpoints(self._root)
        checkpoint = decide.choose_checkpoint(self.monitor, event, complete)
        why = decide.why_give_up(
            self.monitor,
            event,
            checkpoint,
            self.tries,
            self._saves,
        )

        return checkpoint, why

    def _apply_remedy(self, event: Event, state: TrainerState) -> tuple[live.Records, live.Records]:
        """Change the trainer's settings; returns the changes and refusals."""
        number = self.monitor.num_rollbacks + 1
        smaller = self._smaller_step(event, state, number)
        wanted = [Change(**change) for change in event.changes]
        remedy = decide.prescribe(wanted, number, smaller)

        return live.apply(remedy, self._settings(), smaller)

    def _smaller_step(self, event: Event, state: TrainerState, number: int) -> Change:
        """The step size at which the rest of the run moves half as far as what led to failure."""
        first = max((action.step for action in self.actions if action.is_rollback), default=0)
        now = state.global_step
        last = state.max_steps
        began = now if event.began is None else event.began

        rise = live.schedule_rise(self.trainer, first, now, last)
        factor = decide.lr_factor(began - first, last - now, rise, number)
        return replace(SMALLER_STEP, value=factor)

    def _keep(self, action: Action, state: TrainerState) -> None:
        self.monitor.add_action(action)
        entry: Any = {"step": state.global_step, ACTION_KEY: action.record()}
        state.log_history.append(entry)
        if state.is_world_process_zero:
            self._report(action)

    def _settings(self) -> Settings:
        return live.settings_of(self.trainer) | self.more

    @property
    def _saves(self) -> bool:
        return self.trainer.args.save_strategy != "no"

    @property
    def _root(self) -> Path:
        return Path(self.trainer.args.output_dir)


def alerts_of(run: RunFolder | None, channels: Sequence[str], price: float | None) -> Alerts:
    """The alerts of a run, with its name and the page of its report."""
    if run is None:
        return Alerts(channels, price=price)

    page = run.path.resolve() / "report.html"
    return Alerts(
        channels,
        run=run.path.name,
        link=str(page),
        price=price,
    )


def has_broken_weights(model: torch.nn.Module | None, logs: Mapping[str, Any]) -> bool:
    """Whether a weight of any process is not finite; checked only if loss or gradient is not."""
    is_finite = all(math.isfinite(logs.get(name) or 0.0) for name in ("loss", "grad_norm"))
    if model is None or is_finite:
        return False

    broken = any(_is_broken(p.detach()) for p in model.parameters() if p.requires_grad)
    return any(gather_object([broken]))  # each process sees its own shard


def _is_broken(weight: torch.Tensor) -> bool:
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    return not bool(local.isfinite().all())


def broadcast(decision: Any) -> Any:
    """The first process's decision, in every process."""
    return broadcast_object_list([decision])[0]


def _as_row(logs: Mapping[str, Any], step: int) -> Row:
    numbers = {}
    for key, x in logs.items():
        if is_number(x):
            numbers[key] = float(x)

    return numbers | {"step": float(step)}


def _checkpoints_until(step: int, folder: Path) -> list[int]:
    complete = live.complete_checkpoints(folder)
    return sorted(each for each in complete if each <= step)


def _history(state: TrainerState) -> Iterator[Row | Action]:
    for row in state.log_history:
        record: Any = row.get(ACTION_KEY)
        if record:
            yield Action.from_record(record)
        else:
            yield _as_row(row, int(row.get("step", 0)))
