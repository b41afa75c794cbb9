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
        return 1 - value_at(self.curve, step) / peak_of(self.curve)

    def reward_lost_at(self, step: int) -> float | None:
        """The same of the training reward and its peak until then: one that is gamed rises."""
        if not self.curve:
            return None

        until = max(step, self.reward[0][0])
        peak = peak_of([point for point in self.reward if point[0] <= until])
        if peak <= 0:
            return 1.0
        return max(1 - value_at(self.reward, step) / peak, 0.0)

    @property
    def reward_fell(self) -> bool:
        """Whether at most half of the training reward's peak was left in the end: one that is
        gamed has lost nothing, however late it is stopped."""
        if not self.reward:
            return False
        return peak_of(self.reward) <= 0 or left(self.reward) <= LOST


def label(run: dict[str, Any]) -> Label:
    """Apply the rule to a run of the packed corpus; the first clause that holds decides."""
    return nonfinite(run) or lost(run) or dead(run) or stalled(run) or sound(run)


def failed(why: str, onset: float) -> Label:
    return Label(outcome="failed", why=why, onset=int(onset))


def nonfinite(run: dict[str, Any]) -> Label | None:
    """A number that is none, at the first of its steps."""
    columns = run["columns"]
    for name in ("loss", "grad_norm", "reward"):
        for step, value in known(columns["step"], columns[name]):
            if not math.isfinite(value):
                return failed(f"{name} is {value}", step)
    return None


def lost(run: dict[str, Any]) -> Label | None:
    """Accuracy or the reward had something and lost it."""
    correct = smoothed(run, "facts/correct")
    reward = smoothed(run, "reward")
    greedy = accuracy(run)
    training_lost = is_lost(correct)
    training_decides = not run.get("labels") and left(greedy) < KEPT

    if is_lost(greedy) or (training_lost and training_decides):
        # The training curve is the finer one; it dates the loss wherever it shows it.
        return lost_label("accuracy lost", correct if training_lost else greedy, reward)
    if is_lost(reward) and not training_lost:
        return lost_label("reward lost", reward, reward)
    return None


def lost_label(why: str, curve: Curve, reward: Curve) -> Label:
    """The label of a run that had something and lost it."""
    return Label(outcome="failed", why=why, onset=onset(curve), curve=curve, reward=reward)


def dead(run: dict[str, Any]) -> Label | None:
    """A run that never learned: its answers did not change, or no group had a right one."""
    columns = run["columns"]

    if run.get("labels"):
        unchanged = run["labels"][-1]["unchanged"]
    else:
        unchanged = run["unchanged"]

    if unchanged is not None and unchanged >= 0.99:
        return failed("nothing changed", columns["step"][0])
    if mean(columns["groups/all_wrong"][-20:]) >= 0.9:
        return failed("nearly every group all wrong", columns["step"][0])
    return None


def stalled(run: dict[str, Any]) -> Label | None:
    """A run that was made to slow down and did."""
    if run["kind"] != "stall":
        return None

    slow = slow_from(run["columns"]["step"], run["columns"]["time/step"])
    if slow is None:
        return None
    return Label(outcome="stalled", why="steps take three times as long", onset=slow)


def sound(run: dict[str, Any]) -> Label:
    """What nothing went wrong in: healthy if it kept its accuracy, else unclear."""
    greedy = accuracy(run)
    kept = left(greedy) >= KEPT and greedy[-1][1] >= greedy[0][1] - SLACK
    if kept and (run.get("labels") or not is_lost(smoothed(run, "facts/correct"))):
        return Label(outcome="healthy", why="accuracy kept")
    return Label(outcome="unclear", why=f"{left(greedy):.0%} of the best held-out accuracy left")


def accuracy(run: dict[str, Any]) -> Curve:
    """(step, greedy accuracy), the start first, on the problems that decide."""
    if run.get("labels"):
        return sorted({row["step"]: row["correct"] for row in run["labels"]}.items())
    return [(0.0, run["before"]), *known(run["columns"]["step"], run["columns"]["eval/greedy"])]


def known(steps: Sequence[float], values: Sequence[float | None]) -> list[tuple[float, float]]:
    """The points that have a value."""
    pairs = zip(steps, values, strict=True)
    return [(step, value) for step, value in pairs if value is not None]


def slow_from(steps: Sequence[float], times: Sequence[float]) -> int | None:
    """The first of the slow steps, if the last ten take three times as long as the first twenty."""
    usual = median(times[:20])
    if median(times[-10:]) < 3 * usual:
        return None
    return next(int(step) for step, t in zip(steps[20:], times[20:], strict=True) if t >= 2 * usual)


def smoothed(run: dict[str, Any], name: str) -> Curve:
    """A training curve whose points rest on enough prompts."""
    width = max(ROWS, math.ceil(PROMPTS / run["prompts"]))
    return smooth(run["columns"]["step"], run["columns"][name], width)


def smooth(steps: Sequence[float], values: Sequence[float | None], width: int) -> Curve:
    """Means of `width` rows around each row that has a value; fewer at the ends."""
    points = known(steps, values)
    half = width // 2

    curve = []
    for k, (step, _) in enumerate(points):
        around = points[max(k - half, 0) : k + half + 1]
        curve.append((step, mean([value for _, value in around])))
    return curve


def value_at(curve: Curve, step: int) -> float:
    """The value of the nearest point."""
    return min(curve, key=lambda point: abs(point[0] - step))[1]


def peak_of(curve: Curve) -> float:
    return max(value for _, value in curve)


def is_lost(curve: Curve) -> bool:
    """Whether there was something, and at most half of it is left."""
    return peak_of(curve) >= SOMETHING and left(curve) <= LOST


def left(curve: Curve) -> float:
    """The level at the end (the mean of the last fifth of the points) as a share of the best."""
    peak = peak_of(curve)
    if peak <= 0:
        return 1.0

    last = curve[-max(len(curve) // 5, 1) :]
    return mean([value for _, value in last]) / peak


def onset(curve: Curve) -> int:
    """The last step at nine tenths of the peak or more."""
    peak = peak_of(curve)
    return int(max(step for step, value in curve if value >= 0.9 * peak))


def mean(values: Sequence[float | None]) -> float:
    """The mean of the known values."""
    found = [value for value in values if value is not None]
    return sum(found) / len(found)
