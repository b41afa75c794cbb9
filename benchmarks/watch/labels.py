"""What became of a run, by a rule that was written down before any run was made.

The rule reads the true correctness of training completions (smoothed), the greedy accuracy on
held-out problems, and whether held-out completions changed at all. It knows no detector and no
threshold of the watch. What it cannot place is called unclear and counts on neither side.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["healthy", "failed", "stalled", "unclear"]
Curve = Sequence[tuple[float, float]]

# Share of the peak: lost at or below the first, kept at or above the second, unclear between.
LOST, KEPT = 0.5, 0.8
# A curve that never reached this had nothing to lose.
SOMETHING = 0.1
# Completions that one point of a smoothed curve rests on, and rows at the least.
COMPLETIONS, ROWS = 400, 5
# Held-out problems: a healthy run may end this much below its start (noise of 100 problems).
SLACK = 0.05


@dataclass(frozen=True, kw_only=True)
class Label:
    """How a run ended.

    Args:
        outcome: failed runs must be stopped, healthy ones must not; stalled ones must be told of.
        why: the clause of the rule that decided.
        onset: the step from which it went wrong: the last one near its peak; None if healthy.
        curve: (step, value) of what was lost, smoothed; empty where nothing was there to lose.
    """

    outcome: Outcome
    why: str
    onset: int | None = None
    curve: Curve = ()

    def lost_at(self, step: int) -> float | None:
        """Share of the peak that was gone at a step; None where nothing was there to lose."""
        if not self.curve:
            return None
        peak = max(value for _, value in self.curve)
        return 1 - min(self.curve, key=lambda point: abs(point[0] - step))[1] / peak


def label(run: dict[str, Any]) -> Label:
    """Apply the rule to a run of the packed corpus; the first clause that holds decides."""
    columns, steps = run["columns"], run["columns"]["step"]
    for name in ("loss", "grad_norm", "reward"):
        for step, value in zip(steps, columns[name]):
            if value is not None and not math.isfinite(value):
                return Label(outcome="failed", why=f"{name} is {value}", onset=int(step))
    width = max(ROWS, math.ceil(COMPLETIONS / run["completions"]))
    correct = smooth(steps, columns["facts/correct"], width)
    reward = smooth(steps, columns["reward"], width)
    greedy = [(0.0, run["before"])] + [
        (step, value)
        for step, value in zip(steps, columns.get("eval/greedy", ()))
        if value is not None
    ]
    for words, curve in (
        ("right answers in training", correct),
        ("held-out accuracy", greedy),
        ("reward", reward),
    ):
        if is_lost(curve):
            # The training curve is the finer one; it dates the loss wherever it shows it.
            return Label(outcome="failed", why=f"{words} lost", onset=onset(curve), curve=curve)
    if run["unchanged"] is not None and run["unchanged"] >= 0.99:
        return Label(outcome="failed", why="nothing changed", onset=int(steps[0]))
    if mean(columns["groups/all_wrong"][-20:]) >= 0.9:
        return Label(outcome="failed", why="nearly every group all wrong", onset=int(steps[0]))
    if run["kind"] == "stall":
        times = columns["time/step"]
        if mean(times[-10:]) >= 3 * mean(times[:20]):
            first = next(step for step, t in zip(steps, times) if t >= 2 * mean(times[:20]))
            return Label(outcome="stalled", why="steps take three times as long", onset=int(first))
    kept = ends_at(correct) >= KEPT * max(value for _, value in correct)
    if kept and greedy[-1][1] >= run["before"] - SLACK:
        return Label(outcome="healthy", why="nothing lost")
    return Label(outcome="unclear", why="some lost, less than half")


def smooth(steps: Sequence[float], values: Sequence[float | None], width: int) -> Curve:
    """Means of `width` rows around each row that has a value; fewer at the ends."""
    known = [(step, value) for step, value in zip(steps, values) if value is not None]
    half = width // 2
    return [
        (step, mean([value for _, value in known[max(k - half, 0) : k + half + 1]]))
        for k, (step, _) in enumerate(known)
    ]


def is_lost(curve: Curve) -> bool:
    """Whether there was something, and less than half of it is left."""
    peak = max(value for _, value in curve)
    return peak >= SOMETHING and ends_at(curve) <= LOST * peak


def ends_at(curve: Curve) -> float:
    """The level at the end: the mean of the last tenth of the points, of the last at the least."""
    last = max(len(curve) // 10, 1)
    return mean([value for _, value in curve[-last:]])


def onset(curve: Curve) -> int:
    """The last step at nine tenths of the peak or more."""
    peak = max(value for _, value in curve)
    return int(max(step for step, value in curve if value >= 0.9 * peak))


def mean(values: Sequence[float | None]) -> float:
    """The mean of what is known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known)
