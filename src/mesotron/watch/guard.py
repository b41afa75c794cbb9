"""The guard's decisions about a dead run: which checkpoint, which remedy, or why to give up."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mesotron.runs.folder import RunFolder
from mesotron.watch.detectors import Change, Detector, Event
from mesotron.watch.engine import Monitor, is_number
from mesotron.watch.metrics import canonical

# The steps to come may move the weights by this share of the distance that led to the failure.
SAFETY = 0.5
# The smallest factor of one rollback: over a long run the distance is no good measure.
SMALLEST = 1 / 16


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


def choose_event(
    events: Sequence[Event], detectors: Sequence[Detector], precision: float = 0.0
) -> Event | None:
    """The event to act on: the first fatal one that is not harmless and as likely to be right as
    the guard must be; an uncertain one is only reported."""
    harmless = set()
    for detector in detectors:
        if detector.harmless:
            harmless.add(detector.name)

    for event in events:
        is_sure = event.confidence is None or event.confidence >= precision
        if event.severity == "stop" and is_sure and event.detector not in harmless:
            return event

    return None


def choose_checkpoint(monitor: Monitor, event: Event, complete: Collection[int]) -> int | None:
    """The last of the complete checkpoints before the onset of every active failure; if there is
    none, before the onset of this event; else None. An evaluation that had already fallen then
    rules out the checkpoints after the last good one."""
    known = monitor.snapshots.keys() & set(complete)
    last_good = last_good_evaluation(monitor)
    for onset in (monitor.engine.unhealthy_since(), event.began):
        if onset is None:
            continue

        healthy = [step for step in known if step < max(onset, 1)]
        good = [step for step in healthy if step <= last_good]
        if healthy:
            return max(good or healthy)

    return None


def last_good_evaluation(monitor: Monitor) -> float:
    """The step of the last held-out score that is not clearly below the best; infinity if there is
    none, or no later score."""
    scores = heldout_scores(monitor.rows)
    if not scores:
        return math.inf

    best = max(scores.values())
    least = best - score_noise(monitor, best)
    good = [step for step, score in scores.items() if score >= least]
    last = [*scores][-1]

    if not good or good[-1] >= last:
        return math.inf

    return good[-1]


def heldout_scores(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Step -> held-out score; a rollback repeats steps, and the later ones count."""
    scores: dict[int, float] = {}
    for row in rows:
        for step in reversed([*scores]):
            if step < row["step"]:
                break
            del scores[step]

        numbers = {key: x for key, x in row.items() if is_number(x)}
        score = canonical(numbers).get("heldout")
        if score is not None:
            scores[int(row["step"])] = score

    return scores


def score_noise(monitor: Monitor, best: float) -> float:
    """Twice the standard error of a difference, at most; a tenth of the best score where the
    number of problems is not known."""
    problems = monitor.engine.tracks["heldout"].trials
    if problems:
        return math.sqrt(2 / problems)

    return abs(best) / 10


def why_give_up(
    monitor: Monitor, event: Event, checkpoint: int | None, tries: int, saves: bool
) -> str:
    """Why a run cannot be rolled back, one sentence; "" if it can."""
    if not event.changes:
        return f"{event.title} has no automatic remedy"
    if monitor.num_rollbacks >= tries:
        return f"{event.title} again after {tries} rollbacks"
    if not saves:
        return f"{event.title}, and checkpoints are off, so there is nothing to go back to"
    if checkpoint is None:
        return f"{event.title} began at step {event.began}, and no earlier checkpoint is left"

    return ""


def prescribe(changes: Sequence[Change], number: int, smaller: Change) -> tuple[Change, ...]:
    """The remedy of the n-th try: a factor is raised to the n-th power, a minimum doubled each
    time, and from the second try on the step size is lowered (`smaller`) in any case."""
    remedy = []
    for change in changes:
        if change.field == smaller.field:
            remedy.append(smaller)
        elif change.act == "multiply":
            remedy.append(replace(change, value=change.value**number))
        elif change.act == "at_least":
            remedy.append(replace(change, value=change.value * 2 ** (number - 1)))
        else:
            remedy.append(change)

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
    most = 0.5**number
    return min(lasting, most) / max(rise, 1.0)
