"""Long columns as few points: rows are put into buckets, and each keeps mean, least and largest.

A run of 2,000 rows and a plot of 300 pixels: the mean tells the course, the two ends keep a spike
of one step visible. All columns of a run share their buckets, so they share their x as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mesotron.report.read import Column, Run

# x axis -> the columns that tell it (the first that a run has), whether they add up, and a factor.
AXES: dict[str, tuple[tuple[str, bool, float], ...]] = {
    "minutes": (("time/seconds", False, 1 / 60), ("time/step", True, 1 / 60),
                ("step_time", True, 1 / 60)),
    "tokens": (("num_tokens", False, 1.0),),
    "env steps": (("time/env_steps", False, 1.0),),
}  # fmt: skip


@dataclass(frozen=True)
class Buckets:
    """Which rows go into which point.

    Args:
        edges: the first row of each bucket, and the number of rows at the end.
    """

    edges: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether every row is a point of its own."""
        return self.edges[-1] == len(self.edges) - 1

    def middles(self, column: Sequence[float]) -> list[float]:
        """The value of the row in the middle of each bucket; of the first and last, the ends."""
        last = len(self.edges) - 2
        places = [(a + b - 1) // 2 for a, b in zip(self.edges, self.edges[1:])]
        if last > 0:
            places[0], places[-1] = 0, self.edges[-1] - 1
        return [column[place] for place in places]

    def means(self, column: Column) -> Column:
        """The mean of the finite values of each bucket, None where there is none."""
        return [sum(part) / len(part) if part else None for part in self._parts(column)]

    def lows(self, column: Column) -> Column:
        """The least of each bucket."""
        return [min(part, default=None) for part in self._parts(column)]

    def highs(self, column: Column) -> Column:
        """The largest of each bucket."""
        return [max(part, default=None) for part in self._parts(column)]

    def _parts(self, column: Column) -> list[list[float]]:
        cut = (column[a:b] for a, b in zip(self.edges, self.edges[1:]))
        return [[x for x in part if x is not None and math.isfinite(x)] for part in cut]


def make_buckets(num_rows: int, most: int) -> Buckets:
    """At most `most` buckets of nearly equal size.

    Example:
        >>> make_buckets(5, 2).edges
        (0, 2, 5)
        >>> make_buckets(5, 2).means([1.0, 3.0, None, 4.0, 8.0])
        [2.0, 6.0]
    """
    count = min(num_rows, most)
    return Buckets(tuple(k * num_rows // count for k in range(count + 1)) if count else (0,))


def axes_of(run: Run, buckets: Buckets) -> dict[str, list[float]]:
    """Every x axis that a run can be drawn over, at the points of its buckets."""
    found = {"steps": buckets.middles(run.steps)}
    for name, sources in AXES.items():
        source = next((each for each in sources if each[0] in run.columns), None)
        if source is not None:
            found[name] = buckets.middles(axis(run.columns[source[0]], *source[1:]))
    return found


def axis(column: Column, adds_up: bool, factor: float) -> list[float]:
    """A column as an x axis: a gap repeats what was before it.

    Example:
        >>> axis([2.0, None, 4.0], True, 0.5)
        [1.0, 1.0, 3.0]
    """
    out, total = [], 0.0
    for value in column:
        if value is not None and math.isfinite(value):
            total = total + value if adds_up else value
        out.append(total * factor)
    return out


def describe(column: Column, steps: Sequence[float]) -> dict[str, Any]:
    """First, last, least and largest finite value, where these are, and how many are not finite.

    Example:
        >>> describe([1.0, float("nan"), 3.0, 2.0], [1, 2, 3, 4])["high"]
        (3.0, 3)
    """
    known = [(x, s) for x, s in zip(column, steps) if x is not None and math.isfinite(x)]
    broken = [int(s) for x, s in zip(column, steps) if x is not None and not math.isfinite(x)]
    found: dict[str, Any] = {"broken": broken, "count": len(known)}
    if known:
        found |= {"first": known[0], "last": known[-1], "low": min(known), "high": max(known)}
    return found
