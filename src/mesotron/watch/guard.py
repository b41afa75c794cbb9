"""The guard: what to do about a run that has died. It decides; it touches no trainer.

Its memory is the engine's at each checkpoint: after a rollback the run is judged as it was then, so
that stale rows raise no alarm and the same failure is caught again. The memory can be made anew
from the rows and the acts alone, which is how a resumed run has it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mesotron.config import WatchSettings
from mesotron.watch.detectors import Detector
from mesotron.watch.engine import Engine
from mesotron.watch.events import Act, Event
from mesotron.watch.metrics import Row
from mesotron.watch.remedies import TWO_PART
from mesotron.watch.settings import Outcome


class Memory:
    """Rows through an engine, what came of them, and the engine as it was at each checkpoint.

    Args:
        settings: of the engine.

    Attributes:
        rows, events, acts: everything so far, in order.
        kept: step of a checkpoint -> what the engine remembered there.

    Example:
        >>> memory = Memory()
        >>> memory.keep(0)
        >>> seen = [event for r in [0.7] * 20 + [0.1] * 9 for event in memory.take({"reward": r})]
        >>> memory.undo(0)
        >>> seen[-1].severity, memory.engine.active()
        ('stop', {})
    """

    def __init__(self, settings: WatchSettings | None = None) -> None:
        self.engine = Engine(settings)
        self.rows: list[Row] = []
        self.events: list[Event] = []
        self.acts: list[Act] = []
        self.kept: dict[int, dict[str, Any]] = {}

    @property
    def attempts(self) -> int:
        """How many times the run was gone back."""
        return sum(act.action == "rollback" for act in self.acts)

    def take(self, row: Row) -> list[Event]:
        """Take in one row; returns what is new."""
        self.rows.append(row)
        new = self.engine.update(row)
        self.events += new
        return new

    def keep(self, step: int) -> None:
        """Remember the engine as it is, for a checkpoint of this step."""
        self.kept[step] = self.engine.values()

    def undo(self, step: int) -> None:
        """Judge as at a checkpoint, and forget the later ones: they are of the failure."""
        self.engine.load_values(self.kept[step])
        self.kept = {known: values for known, values in self.kept.items() if known <= step}

    def replay(self, history: Iterable[Row | Act], checkpoints: Collection[int]) -> None:
        """Live through a run's past again.

        Args:
            history: rows, each with its step, and acts, in the order in which they came.
            checkpoints: steps of the checkpoints that are still there.
        """
        past = list(history)
        backs = [item.checkpoint for item in past if isinstance(item, Act)]
        places = sorted({*checkpoints, *(step for step in backs if step is not None)})
        for item in past:
            step = item.step if isinstance(item, Act) else int(item["step"])
            while places and places[0] < step:  # it was written after the rows of its step
                self.keep(places.pop(0))
            if isinstance(item, Act):
                self.done(item)
            else:
                self.take(item)
        for place in places:
            self.keep(place)

    def done(self, act: Act) -> None:
        """Remember an act; after a rollback judge as at the checkpoint."""
        if act.checkpoint is not None and act.checkpoint not in self.kept:
            raise ValueError(
                f"it is said to have gone back from step {act.step} to {act.checkpoint}, which is "
                "not before that: events.jsonl is of another run"
            )
        self.acts.append(act)
        if act.checkpoint is not None:
            self.undo(act.checkpoint)
            if any(change["field"] == TWO_PART.field for change in act.changes):
                self._forget_reward()

    def _forget_reward(self) -> None:
        """Another reward has another scale: no memory may compare the two."""
        for step in sorted(self.kept):  # the last is the one that was gone back to
            self.engine.load_values(self.kept[step])
            self.engine.forget("reward")
            self.keep(step)


def choose_event(events: Sequence[Event], detectors: Sequence[Detector]) -> Event | None:
    """The event to act on: the first fatal one that is not harmless; detectors are in order."""
    harmless = {detector.name for detector in detectors if detector.harmless}
    return next((e for e in events if e.severity == "stop" and e.detector not in harmless), None)


def choose_checkpoint(memory: Memory, event: Event, there: Collection[int]) -> int | None:
    """The last checkpoint from before the evidence began.

    Of all evidence that is still active, if there is one from before that; else of this event's.

    Args:
        memory: of the run.
        event: the one to act on.
        there: steps of the checkpoints that are whole.

    Returns:
        Its step, or None if none is healthy.
    """
    known = memory.kept.keys() & set(there)
    for began in (memory.engine.unwell_since(), event.began):
        healthy = [step for step in known if began is not None and step < max(began, 1)]
        if healthy:
            return max(healthy)
    return None


def why_not(memory: Memory, event: Event, checkpoint: int | None, tries: int, saves: bool) -> str:
    """Why a run cannot be gone back, one sentence; "" if it can."""
    name = event.detector.replace("_", " ")
    if not event.changes:
        return f"no remedy for {name} can be applied by a program, so the run ends"
    if memory.attempts >= tries:
        return f"{name} again after {tries} rollbacks, so the run is given up"
    if not saves:
        return f"{name}, and checkpoints are switched off, so there is nothing to go back to"
    if checkpoint is None:
        return (
            f"{name} began at step {event.began}, and no checkpoint from before that is left, so "
            "there is nothing to go back to"
        )
    return ""


def gone_back(event: Event, attempt: int, checkpoint: int, outcome: Outcome) -> Act:
    """The act of a rollback."""
    return Act(
        step=event.step,
        action="rollback",
        detector=event.detector,
        attempt=attempt,
        checkpoint=checkpoint,
        changes=outcome.changes,
        refused=outcome.refused,
        reason=f"{event.detector.replace('_', ' ')} began at step {event.began}",
        evidence=tuple(asdict(seen) for seen in event.evidence),
    )


def given_up(event: Event, attempt: int, reason: str) -> Act:
    """The act of a stop."""
    return Act(
        step=event.step,
        action="stop",
        detector=event.detector,
        attempt=attempt,
        reason=reason,
        evidence=tuple(asdict(seen) for seen in event.evidence),
    )


def merge(rows: Sequence[Row], events: Iterable[Mapping[str, Any]]) -> list[Row | Act]:
    """The history of a run folder: the rows of metrics.jsonl, and the acts of events.jsonl, each
    after the rows of its step."""
    acts = [Act.from_record(record) for record in events if record.get("kind") == "guard"]
    both: list[Row | Act] = [*rows, *acts]
    return sorted(both, key=lambda item: item.step if isinstance(item, Act) else item["step"])
