"""What a forecast is asked, and what came: a run up to a share of its length, and its end.

The rule is details.md's, which was written before the first forecast.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.forecast.runs import KnownRun
from mesotron.watch.forecast import (
    LEAST_LEVEL,
    LEAST_REWARDS,
    Curve,
    Outcome,
    Present,
    curve_of,
    level_width,
    reward_range,
    see,
)
from mesotron.watch.metrics import Row, canonical

NORMAL_80 = 1.2816
COLLAPSED = 0.5  # share of the best that is left
SOMETHING = 0.1
LEAST_GAIN = 0.05
STANDARD_ERRORS = 2.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run up to a share of its length, and its end.

    Args:
        run: where it comes from.
        share: of the run that is seen.
        steps: the planned end.
        last: the last step that is seen.
        present: what is seen of the reward.
        scores: held-out scores so far.
        end: the reward's end.
        outcome: learn, plateau or collapse.
        naive: half the width of the naive interval.
        final_score: the last held-out score; None if there is none after those seen.
    """

    run: KnownRun
    share: float
    steps: float
    last: float
    present: Present
    scores: Curve
    end: float
    outcome: Outcome
    naive: float
    final_score: float | None

    @property
    def gain(self) -> float:
        """From the present level to the end, in units of the reward's range so far."""
        return (self.end - self.present.low) / self.present.scale - self.present.level

    def seen(self) -> list[Row]:
        return [row for row in self.run.rows if row["step"] <= self.last]


def cases_of(run: KnownRun, shares: Sequence[float]) -> Iterator[Case]:
    """One case for each share at which enough rewards are seen."""
    rows = [finite(row) for row in run.rows]
    rewards = curve_of(rows, "reward")
    scores = curve_of(rows, "heldout")
    if not np.ptp(rewards[:, 1]):
        return

    steps, values = rewards.T
    spacing = (steps[-1] - steps[0]) / (len(steps) - 1)
    elapsed = steps - steps[0] + spacing

    for share in shares:
        count = int((elapsed <= share * elapsed[-1] + 1e-9).sum())
        if count < LEAST_REWARDS or not np.ptp(values[:count]):
            continue

        last = steps[count - 1]
        present = see(values[:count], math.log(elapsed[-1] / elapsed[count - 1]))
        known = scores[scores[:, 0] <= last]
        has_later = len(known) and len(known) < len(scores)

        yield Case(
            run=run,
            share=share,
            steps=float(steps[-1]),
            last=float(last),
            present=present,
            scores=known,
            end=float(values[-last_tenth(len(values)) :].mean()),
            outcome=outcome_of(values, count),
            naive=naive_width(present, count, len(values)),
            final_score=float(scores[-1, 1]) if has_later else None,
        )


def finite(row: Row) -> Row:
    numbers = {name: value for name, value in canonical(row).items() if math.isfinite(value)}
    return numbers | {"step": row["step"]}


def last_tenth(count: int) -> int:
    return max(LEAST_LEVEL, count // 10)


def outcome_of(values: NDArray[np.float64], count: int) -> Outcome:
    """What came after the first `count` rewards."""
    low, scale = reward_range(values)
    scaled = (values - low) / scale

    width = max(LEAST_LEVEL, len(scaled) // 20)
    best = float(np.convolve(scaled, np.ones(width) / width, "valid").max())
    tenth = last_tenth(len(scaled))
    end = float(scaled[-tenth:].mean())
    if best >= SOMETHING and end <= COLLAPSED * best:
        return "collapse"

    third = level_width(count)
    present = float(scaled[:count][-third:].mean())
    noise = math.sqrt(float((np.diff(scaled) ** 2).mean()) / 2)
    error = noise * math.sqrt(1 / third + 1 / tenth)
    if end - present >= max(LEAST_GAIN, STANDARD_ERRORS * error):
        return "learn"

    return "plateau"


def naive_width(present: Present, count: int, total: int) -> float:
    """Half the width of "it stays as it is": the noise of both levels."""
    variance = 1 / level_width(count) + 1 / last_tenth(total)
    return NORMAL_80 * present.scale * present.noise * math.sqrt(variance)
