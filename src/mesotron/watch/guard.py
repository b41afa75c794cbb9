"""The guard's decisions about a dead run: which checkpoint, which remedy, or why to give up.

`Monitor` keeps the engine's state at each checkpoint: after a rollback the run is judged from
there, so old rows raise no alarm and the same failure is caught again. A resumed run rebuilds it.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mesotron.config import WatchSettings
from mesotron.runs.folder import RunFolder
from mesotron.watch.detectors import DETECTORS, TWO_PART, Change, Detector
from mesotron.watch.diagnosis import Diagnosis, diagnose
from mesotron.watch.engine import Engine, is_number
from mesotron.watch.events import Action, Event
from mesotron.watch.metrics import canonical, sources
from mesotron.watch.rows import Row

# The steps to come may move the weights by this share of the distance that led to the failure.
SAFETY = 0.5
# The smallest factor of one rollback: over a long run the distance is no good measure.
SMALLEST = 1 / 16


class Monitor:
    """An engine with its rows, events and actions, and its state at each checkpoint."""

    def __init__(
        self, settings: WatchSettings | None = None, detectors: Sequence[Detector] = DETECTORS
    ) -> None:
        self.engine = Engine(settings, detectors)
        self.rows: list[Row] = []
        self.events: list[Event] = []
        self.actions: list[Action] = []
        self.judged: set[str] = set()
        self.snapshots: dict[int, dict[str, Any]] = {}  # by the checkpoint's step

    @property
    def num_rollbacks(self) -> int:
        return sum(action.action == "rollback" for action in self.actions)

    def update(self, row: Row) -> list[Event]:
        row = self._judged(row)
        self.rows.append(row)
        new = self.engine.update(row)
        self.events += new

        return new

    def _judged(self, row: Row) -> Row:
        """The row without the scores of problem sets that the first evaluation did not have: a
        mean over other sets is no fall. TRL logs each set as eval_reward, next to its runtime."""
        scores = sources(row).get("heldout")
        if not scores:
            return row

        names = {key for key in row if re.fullmatch(r"eval[/_].+_runtime", key)}
        self.judged = self.judged or {*scores, *names}
        other = scores if names - self.judged else [key for key in scores if key not in self.judged]

        return {key: x for key, x in row.items() if key not in other}

    def diagnosis(self, notes: Sequence[str] = ()) -> Diagnosis:
        return diagnose(
            self.rows,
            self.engine,
            self.events,
            notes,
            self.actions,
        )

    def save(self, step: int) -> None:
        self.snapshots[step] = self.engine.state()

    def restore(self, step: int) -> None:
        """Go back to the state at a checkpoint and drop the later ones."""
        self.engine.load_state(self.snapshots[step])
        self.snapshots = {at: state for at, state in self.snapshots.items() if at <= step}

    def replay(self, history: Iterable[Row | Action], checkpoints: Collection[int]) -> None:
        """Rebuild the state from the rows and actions of a run, and its existing checkpoints."""
        past = list(history)
        restored = [item.checkpoint for item in past if isinstance(item, Action)]

        to_save = sorted({*checkpoints, *(step for step in restored if step is not None)})
        for item in past:
            step = item.step if isinstance(item, Action) else int(item["step"])
            while to_save and to_save[0] < step:  # it was written after the rows of its step
                self.save(to_save.pop(0))

            if isinstance(item, Action):
                self.add_action(item)
            else:
                self.update(item)

        for step in to_save:
            self.save(step)

    def add_action(self, action: Action) -> None:
        """Record an action; after a rollback continue from the state at its checkpoint."""
        if action.checkpoint is not None and action.checkpoint not in self.snapshots:
            raise ValueError(
                f"a rollback from step {action.step} to {action.checkpoint} does not go back: "
                "events.jsonl belongs to another run"
            )

        self.actions.append(action)
        if action.checkpoint is None:
            return

        self.restore(action.checkpoint)
        if any(change["field"] == TWO_PART.field for change in action.changes):
            # Another reward has another scale: no snapshot may compare the two.
            for step in sorted(self.snapshots):  # the last is the one that was restored
                self.engine.load_state(self.snapshots[step])
                self.engine.forget("reward")
                self.save(step)


class LoopWatch:
    """The watch beside a loop without callbacks: it writes what it finds to the run folder, says
    it, and keeps the first event that must stop the run."""

    def __init__(self, run: RunFolder, guard: str, say: Callable[[str], None]) -> None:
        self.run = run
        self.guard = guard
        self.say = say
        self.monitor = Monitor()
        self.stopped_by: Event | None = None

    def replay(self) -> None:
        """Process the rows written before a resume, without reporting their events again."""
        for row in self.run.rows("metrics"):
            self.monitor.update(row)

    def update(self, row: dict[str, Any]) -> None:
        for event in self.monitor.update(row):
            self.run.append("events", event.record())
            if self.guard != "off":
                self.say(event.sentence())

            if self.guard == "stop" and event.severity == "stop":
                self.stopped_by = self.stopped_by or event


def merge_history(rows: Sequence[Row], events: Iterable[Mapping[str, Any]]) -> list[Row | Action]:
    """Rows of metrics.jsonl and actions of events.jsonl, each after the rows of its step."""
    actions = [Action.from_record(record) for record in events if record.get("kind") == "guard"]
    items: list[Row | Action] = [*rows, *actions]
    return sorted(items, key=lambda item: item.step if isinstance(item, Action) else item["step"])


def choose_event(
    events: Sequence[Event], detectors: Sequence[Detector], precision: float = 0.0
) -> Event | None:
    """The event to act on: the first fatal one that is not harmless and as likely to be right as
    the guard must be; an uncertain one is only reported."""
    harmless = {detector.name for detector in detectors if detector.harmless}
    return next(
        (
            e
            for e in events
            if e.severity == "stop"
            and e.detector not in harmless
            and (e.confidence is None or e.confidence >= precision)
        ),
        None,
    )


def choose_checkpoint(monitor: Monitor, event: Event, complete: Collection[int]) -> int | None:
    """The last of the complete checkpoints before the onset of every active failure; if there is
    none, before the onset of this event; else None. An evaluation that had already fallen then
    rules out the checkpoints after the last good one."""
    known = monitor.snapshots.keys() & set(complete)
    good = last_good_evaluation(monitor)
    for onset in (monitor.engine.unhealthy_since(), event.began):
        healthy = [step for step in known if onset is not None and step < max(onset, 1)]
        if healthy:
            return max([step for step in healthy if step <= good] or healthy)

    return None


def last_good_evaluation(monitor: Monitor) -> float:
    """The step of the last held-out score that is not clearly below the best; infinity if there is
    none, or no later score."""
    scores: list[tuple[int, float]] = []
    for row in monitor.rows:
        score = canonical({key: x for key, x in row.items() if is_number(x)}).get("heldout")
        while scores and scores[-1][0] >= row["step"]:  # a rollback repeats steps
            scores.pop()

        if score is not None:
            scores.append((int(row["step"]), score))

    best = max((score for _, score in scores), default=0.0)
    problems = monitor.engine.tracks["heldout"].trials if scores else None

    # Twice the standard error of a difference, at most; a tenth where the problems are not known.
    noise = (2 / problems) ** 0.5 if problems else abs(best) / 10
    good = [step for step, score in scores if score >= best - noise]

    return good[-1] if good and good[-1] < scores[-1][0] else float("inf")


def why_give_up(
    monitor: Monitor, event: Event, checkpoint: int | None, tries: int, saves: bool
) -> str:
    """Why a run cannot be rolled back, one sentence; "" if it can."""
    name = event.detector.replace("_", " ")
    if not event.changes:
        return f"{name} has no automatic remedy"
    if monitor.num_rollbacks >= tries:
        return f"{name} again after {tries} rollbacks"
    if not saves:
        return f"{name}, and checkpoints are off, so there is nothing to go back to"
    if checkpoint is None:
        return f"{name} began at step {event.began}, and no earlier checkpoint is left"

    return ""


def prescribe(changes: Sequence[Change], number: int, smaller: Change) -> tuple[Change, ...]:
    """The remedy of the n-th try: a factor is raised to the n-th power, a minimum doubled each
    time, and from the second try on the step size is lowered (`smaller`) in any case."""
    remedy = []
    for change in changes:
        if change.act == "multiply":
            change = replace(change, value=change.value**number)
        elif change.act == "at_least":
            change = replace(change, value=change.value * 2 ** (number - 1))

        remedy.append(smaller if change.field == smaller.field else change)

    if number > 1 and smaller not in remedy:
        remedy.append(smaller)

    return tuple(remedy)


def lr_factor(steps: int, left: int, rise: float = 1.0, number: int = 1) -> float:
    """What to multiply the learning rate by after a rollback, at most a half.

    A policy is ruined by how far its weights have moved, more than by any one step: in
    benchmarks/watch Muon does it within 10 to 20 steps at a rate of 6e-3 and within 40 at 1.5e-3.
    `steps` led to the failure, `left` are to come, at a mean scheduled rate `rise` times as high;
    the first rollback (`number`) halves at least, the second quarters.
    """
    lasting = max(SAFETY * steps / max(left, 1), SMALLEST)
    return min(lasting, 0.5**number) / max(rise, 1.0)
