"""`mesotron.Watch`: the watch inside a trainer, as a plain TrainerCallback of Transformers.

Works in any Trainer, TRL's and this library's too. It reads what is logged and nothing else; it can
warn, stop the run with a checkpoint, or go back to a healthy checkpoint and on with a remedy.
With several processes the first one decides and all act alike.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mesotron.config import WatchSettings
from mesotron.config.watch import GuardName
from mesotron.runs.folder import RunFolder
from mesotron.watch import guard as decisions
from mesotron.watch.engine import Engine, is_number
from mesotron.watch.events import ACT, Act, Event
from mesotron.watch.guard import Memory
from mesotron.watch.metrics import Row
from mesotron.watch.pace import rise_to_come, smaller_by
from mesotron.watch.remedies import SMALLER_STEP, Change, prescribe
from mesotron.watch.rollback import go_back, refuse_what_cannot_go_back, whole_checkpoints
from mesotron.watch.settings import Settings, apply, settings_of
from mesotron.watch.story import Story, tell

GUARDS = get_args(GuardName)
log = logging.getLogger("mesotron.watch")


class Watch(TrainerCallback):
    """Watches a training run from its own logs.

    On a resumed run it first reads what the run has logged before, so that it judges as if the run
    had never stopped, and the remedies of earlier rollbacks are in force.

    Args:
        guard: warn tells what it sees on the logger "mesotron.watch"; stop also ends the run, with
            a checkpoint, at the first event of that severity; rollback instead goes back to the
            last checkpoint from before the failure began, applies the detector's remedy and goes
            on; off only keeps the events.
        run: a run folder whose events.jsonl gets every event.
        settings: warm-up, window, patience and noise, in logged rows.
        trainer: whose weights and settings a rollback changes; needed for that alone.
        tries: rollbacks before a run is given up.
        more: settings that this trainer can be told beyond those of `settings.settings_of`.

    Attributes:
        stopped_by: the event that ended the run, or None.

    Example:
        >>> watch = Watch(guard="stop")
        >>> watch.events
        []
    """

    def __init__(
        self,
        guard: GuardName = "warn",
        run: Path | str | None = None,
        settings: WatchSettings | None = None,
        *,
        trainer: Any = None,
        tries: int = 3,
        more: Settings | None = None,
    ) -> None:
        if guard not in GUARDS:
            raise ValueError(f"guard {guard!r} is none of {', '.join(GUARDS)}")
        if guard == "rollback":
            check_rollback(trainer, tries)
        self.guard = guard
        self.run = None if run is None else RunFolder(Path(run))
        self.settings = settings
        self.trainer, self.tries, self.more = trainer, tries, more or {}
        self._restart()

    def _restart(self) -> None:
        self.memory = Memory(self.settings)
        self.stopped_by: Event | None = None
        self._waiting: list[Event] = []

    @property
    def engine(self) -> Engine:
        """What judges the rows."""
        return self.memory.engine

    @property
    def events(self) -> list[Event]:
        """Everything seen so far."""
        return self.memory.events

    @property
    def acts(self) -> list[Act]:
        """Everything done so far."""
        return self.memory.acts

    def story(self) -> Story | None:
        """The run so far in words, or None before anything was logged."""
        memory = self.memory
        if not memory.rows:
            return None
        return tell(memory.rows, memory.engine, memory.events, acts=memory.acts)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Begin anew; on a resumed run, live through what it has logged before."""
        self._restart()
        there = self._checkpoints() if state.global_step else ()
        known = [step for step in there if step <= state.global_step]
        self.memory.replay(past(state), known)
        if self.guard in ("stop", "rollback") and state.is_world_process_zero:
            for name, severity in self.engine.active().items():
                if severity == "stop":
                    log.warning(still_dead(name))
        if self.guard != "rollback":
            return
        self._put_in_force()
        if not state.global_step and self._saves:
            # A run that fails before its first checkpoint has its start to go back to.
            self.trainer._save_checkpoint(self.trainer.model, trial=None)
            self.memory.keep(0)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        model: Any = None,
        **_: Any,
    ) -> None:
        """Take in one row; tell of what is new; act if the guard is to."""
        logs = logs or {}
        new = self.memory.take(as_row(logs, state.global_step))
        spoiled = self.guard == "rollback" and are_spoiled(self.trainer.model, logs)
        if spoiled:  # patience would sample from them
            new = [self.engine.condemn("nonfinite"), *new]
            self.events.append(new[0])
        if state.is_world_process_zero:
            for event in new:
                self._tell(event)
        self._waiting += new
        if "loss" not in logs:  # of an evaluation; every process comes here with a step's row
            return
        waiting, self._waiting = self._waiting, []
        event = decisions.choose_event(waiting, self.engine.detectors)
        if self.guard == "stop":
            sick = model is not None and are_spoiled(model, logs)
            self._stop(agreed(event), control, can_save=not sick)
        elif self.guard == "rollback":
            self._go_back(agreed(event), state, control, can_save=not spoiled)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Remember what was known at this checkpoint, and forget those that were removed."""
        if self.guard == "rollback":
            there = {path.name for path in self._root.glob("checkpoint-*")}
            gone = [step for step in self.memory.kept if f"checkpoint-{step}" not in there]
            for step in gone:
                del self.memory.kept[step]
            # Another process may still be writing it.
            self.memory.keep(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Tell the story, if there is one to tell."""
        story = self.story()
        if story and state.is_world_process_zero and self.guard != "off":
            log.log(logging.INFO if story.condition == "healthy" else logging.WARNING, story.text())

    # Acting

    def _stop(self, event: Event | None, control: TrainerControl, can_save: bool = True) -> None:
        if event is not None and self.stopped_by is None:
            self.stopped_by = event
            control.should_training_stop = True
            control.should_save = can_save

    def _go_back(
        self, event: Event | None, state: TrainerState, control: TrainerControl, can_save: bool
    ) -> None:
        """Go back and on, or give up; what was done is kept where a resumed run finds it."""
        if event is None:
            return
        memory = self.memory
        # The first process alone reads the checkpoints through.
        chosen, why = agreed(self._choose(event) if state.is_world_process_zero else None)
        if why:
            act = decisions.given_up(event, memory.attempts, why)
            self._stop(event, control, can_save and self._saves)
        else:
            go_back(self.trainer, self._root / f"checkpoint-{chosen}")
            number = memory.attempts + 1
            smaller = self._smaller_step(event, state, number)
            wanted = tuple(Change(**change) for change in event.changes)
            outcome = apply(prescribe(wanted, number, smaller), self._can_change(), smaller)
            act = decisions.gone_back(event, number, chosen, outcome)
            control.should_save = True  # a run killed from now on goes on from here
        memory.done(act)
        kept: Any = {"step": state.global_step, ACT: act.record()}
        state.log_history.append(kept)
        if state.is_world_process_zero:
            self._tell(act)

    def _smaller_step(self, event: Event, state: TrainerState, number: int) -> Change:
        """The step size at which the rest of the run is half the way that led to the failure."""
        begun = max((act.step for act in self.acts if act.action == "rollback"), default=0)
        now, last = state.global_step, state.max_steps
        well = (now if event.began is None else event.began) - begun
        rise = rise_to_come(self.trainer, begun, now, last)
        return replace(SMALLER_STEP, value=smaller_by(well, last - now, rise, number))

    def _choose(self, event: Event) -> tuple[int | None, str]:
        """The checkpoint to go back to, or why there is none."""
        chosen = decisions.choose_checkpoint(self.memory, event, self._checkpoints())
        return chosen, decisions.why_not(self.memory, event, chosen, self.tries, self._saves)

    def _put_in_force(self) -> None:
        """Tell a resumed trainer what its checkpoint does not hold of earlier remedies."""
        settings = self._can_change()
        for change in (change for act in self.acts for change in act.changes):
            setting = settings[change["field"]]
            if not setting.in_checkpoint:
                setting.write(change["new"])

    def _can_change(self) -> Settings:
        return settings_of(self.trainer) | self.more

    @property
    def _saves(self) -> bool:
        return self.trainer.args.save_strategy != "no"

    @property
    def _root(self) -> Path:
        return Path(self.trainer.args.output_dir)

    def _checkpoints(self) -> set[int]:
        return whole_checkpoints(self._root) if self.guard == "rollback" else set()

    def _tell(self, told: Event | Act) -> None:
        if self.run is not None:
            self.run.append("events", told.record())
        if self.guard != "off":
            log.warning(told.sentence())


def still_dead(name: str) -> str:
    """What to know of a run that is continued although the guard had ended it."""
    return (
        f"this run was dead of {name.replace('_', ' ')} when it was left, and goes on with the "
        "same settings: the guard will not end it for that again"
    )


def check_rollback(trainer: Any, tries: int) -> None:
    """Refuse at the start what could not be done at the alarm."""
    if trainer is None:
        raise ValueError(
            "guard='rollback' changes a trainer's weights: give it, as in "
            "trainer.add_callback(mesotron.Watch(guard='rollback', trainer=trainer))"
        )
    if tries < 1:
        raise ValueError(f"tries {tries} leaves no rollback: give 1 or more, or guard='stop'")
    refuse_what_cannot_go_back(trainer)


def are_spoiled(model: torch.nn.Module, logs: Mapping[str, Any]) -> bool:
    """Whether a weight is not a finite number; looked for where loss or gradient was not."""
    if all(math.isfinite(logs.get(name) or 0.0) for name in ("loss", "grad_norm")):
        return False
    params = [p.detach() for p in model.parameters() if p.requires_grad]
    held = [p.to_local() if isinstance(p, DTensor) else p for p in params]
    return anywhere(not all(bool(w.isfinite().all()) for w in held))


def as_row(logs: Mapping[str, Any], step: int) -> Row:
    """The numbers of what was logged, with their step."""
    return {key: float(x) for key, x in logs.items() if is_number(x)} | {"step": float(step)}


def past(state: TrainerState) -> Iterator[Row | Act]:
    """What a resumed run has logged and done before."""
    for row in state.log_history:
        acted: Any = row.get(ACT)
        yield Act.from_record(acted) if acted else as_row(row, int(row.get("step", 0)))


def anywhere(seen: bool) -> bool:
    """Whether any process has seen it: of a sharded weight each sees its own part."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return seen
    held = [False] * dist.get_world_size()
    dist.all_gather_object(held, seen)
    return any(held)


def agreed(decision: Any) -> Any:
    """The first process's decision in every process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return decision
    held = [decision]
    dist.broadcast_object_list(held, src=0)
    return held[0]
