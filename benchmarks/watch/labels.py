"""The true outcome of a run, by a rule that was fixed before any detector saw the corpus.

Greedy accuracy on a fixed set of held-out problems decides; the true correctness of training
completions, which is noisier (new prompts at each step), says when. The rule knows no detector and
no threshold of the watch. What it cannot place is called unclear and counts on neither side.

Runs of the held-out corpus are judged by 320 problems of their own, which the watch never sees.
Those of the tuning corpus have only the 100 that the watch reads too, and there the right answers
in training may also decide.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

Outcome = Literal["healthy", "failed", "stalled", "unclear"]
Curve = Sequence[tuple[float, float]]

# Share of the best: lost at or below the first, kept at or above the second, unclear between.
LOST = 0.5
KEPT = 0.8
# A curve below this has nothing to lose.
SOMETHING = 0.1
# Prompts that one point of a smoothed training curve rests on, and rows at the least.
PROMPTS = 80
ROWS = 5
# Held-out problems: a healthy run may end this much below its start (noise of its problems).
SLACK = 0.05


@dataclass(frozen=True, kw_only=True)
class Label:
    """How a run ended.

    Args:
        outcome: failed runs must be stopped, healthy ones must not; stalled ones must be told of.
        why: the clause of the rule that decided.
        onset: the step from which it went wrong: the last one near its peak; None if healthy.
        curve: (step, value) of what was lost, smoothed; empty where nothing was there to lose.
        reward: the same of the training reward.
    """

    outcome: Outcome
    why: str
    onset: int | None = None
    curve: Curve = ()
    reward: Curve = ()

    def lost_at(self, step: int) -> float | None:
        """Share of the peak that was gone at a step; None where nothing was there to lose."""
        if not self.curve:
            return None
        return 1 - value_at(self.curve, step) / max(value for _, value in self.curve)

    def reward_lost_at(self, step: int) -> float | None:
        """The same of the training reward and its peak until then: one that is gamed rises."""
        if not self.curve:
            return None
        peak = max(value for at, value in self.reward if at <= max(step, self.reward[0][0]))
        return max(1 - value_at(self.reward, step) / peak, 0.0) if peak > 0 else 1.0

    @property
    def reward_fell(self) -> bool:
        """Whether at most half of the training reward's peak was left in the end: one that is
        gamed has lost nothing, however late it is stopped."""
        peak = max((value for _, value in self.reward), default=1.0)
        return peak <= 0 or (bool(self.reward) and left(self.reward) <= LOST)


def label(run: dict[str, Any]) -> Label:
    """Apply the rule to a run of the packed corpus; the first clause that holds decides."""
    columns = run["columns"]
    steps = run["columns"]["step"]
    for name in ("loss", "grad_norm", "reward"):
        for step, value in zip(steps, columns[name]):
            if value is not None and not math.isfinite(value):
                return Label(
                    outcome="failed",
                    why=f"{name} is {value}",
                    onset=int(step),
                )

    width = max(ROWS, math.ceil(PROMPTS / run["prompts"]))
    correct = smooth(steps, columns["facts/correct"], width)
    reward = smooth(steps, columns["reward"], width)
    greedy = accuracy(run)
    apart = bool(run.get("labels"))
    kept = left(greedy) >= KEPT
    training_lost = is_lost(correct)
    if is_lost(greedy) or (training_lost and not kept and not apart):
        # The training curve is the finer one; it dates the loss wherever it shows it.
        return lost("accuracy lost", correct if training_lost else greedy, reward)
    if is_lost(reward) and not training_lost:
        return lost("reward lost", reward, reward)

    unchanged = run["labels"][-1]["unchanged"] if apart else run["unchanged"]
    if unchanged is not None and unchanged >= 0.99:
        return Label(
            outcome="failed",
            why="nothing changed",
            onset=int(steps[0]),
        )
    if mean(columns["groups/all_wrong"][-20:]) >= 0.9:
        return Label(
            outcome="failed",
            why="nearly every group all wrong",
            onset=int(steps[0]),
        )
    if run["kind"] == "stall" and (slow := slow_from(steps, columns["time/step"])):
        return Label(
            outcome="stalled",
            why="steps take three times as long",
            onset=slow,
        )
    if kept and greedy[-1][1] >= greedy[0][1] - SLACK and (apart or not training_lost):
        return Label(outcome="healthy", why="accuracy kept")

    return Label(outcome="unclear", why=f"{left(greedy):.0%} of the best held-out accuracy left")


def accuracy(run: dict[str, Any]) -> Curve:
    """(step, greedy accuracy), the start first, on the problems that decide."""
    if run.get("labels"):
        return sorted({row["step"]: row["correct"] for row in run["labels"]}.items())

    steps = run["columns"]["step"]
    values = run["columns"]["eval/greedy"]
    return [(0.0, run["before"])] + [(step, x) for step, x in zip(steps, values) if x is not None]


def lost(why: str, curve: Curve, reward: Curve) -> Label:
    """The label of a run that had something and lost it."""
    return Label(
        outcome="failed",
        why=why,
        onset=onset(curve),
        curve=curve,
        reward=reward,
    )


def slow_from(steps: Sequence[float], times: Sequence[float]) -> int | None:
    """The first of the slow steps, if the last ten take three times as long as the first twenty."""
    usual = median(times[:20])
    slow = [int(step) for step, t in zip(steps[20:], times[20:]) if t >= 2 * usual]
    return slow[0] if median(times[-10:]) >= 3 * usual else None


def smooth(steps: Sequence[float], values: Sequence[float | None], width: int) -> Curve:
    """Means of `width` rows around each row that has a value; fewer at the ends."""
    known = [(step, value) for step, value in zip(steps, values) if value is not None]
    half = width // 2

    return [
        (step, mean([value for _, value in known[max(k - half, 0) : k + half + 1]]))
        for k, (step, _) in enumerate(known)
    ]


def value_at(curve: Curve, step: int) -> float:
    """The value of the nearest point."""
    return min(curve, key=lambda point: abs(point[0] - step))[1]


def is_lost(curve: Curve) -> bool:
    """Whether there was something, and at most half of it is left."""
    return max(value for _, value in curve) >= SOMETHING and left(curve) <= LOST


def left(curve: Curve) -> float:
    """The level at the end (the mean of the last fifth of the points) as a share of the best."""
    last = max(len(curve) // 5, 1)
    peak = max(value for _, value in curve)
    return mean([value for _, value in curve[-last:]]) / peak if peak > 0 else 1.0


def onset(curve: Curve) -> int:
    """The last step at nine tenths of the peak or more."""
    peak = max(value for _, value in curve)
    return int(max(step for step, value in curve if value >= 0.9 * peak))


def mean(values: Sequence[float | None]) -> float:
    """The mean of the known values."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known)
