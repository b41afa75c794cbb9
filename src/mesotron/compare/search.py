"""Which rates each contender tries: one rule for all, a pure function of the scores so far.

Rates are base * factor^k in AdamW's unit, the same for all; `gain` makes a contender's updates as
large as AdamW's at the same rate. If the best rate is at an end of the tried ones, the search is
extended beyond it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# RMS of AdamW's update divided by its rate, once its moments have settled.
USUAL_RATIO = 0.2
# A filter that passes almost nothing would otherwise ask for an unbounded step.
MAX_GAIN = 32.0


@dataclass(frozen=True)
class Grid:
    """The rule.

    Args:
        base: the recipe's rate, in AdamW's unit.
        factor: between neighboring rates, above 1.
        rates: number that every contender tries.
        extend: maximum number beyond an end.
    """

    base: float
    factor: float
    rates: int
    extend: int

    def rate(self, k: int) -> float:
        """The rate at index k, to three digits.

        Example:
            >>> Grid(base=6e-4, factor=2.0, rates=4, extend=2).rate(1)
            0.0012
        """
        return float(f"{self.base * self.factor**k:.3g}")

    def first_indices(self) -> list[int]:
        """The indices that everyone tries: 0 and those nearest to it, upward first.

        Example:
            >>> Grid(base=1.0, factor=2.0, rates=4, extend=2).first_indices()
            [0, 1, -1, 2]
        """
        near = [0]
        for distance in range(1, self.rates):
            near += [distance, -distance]
        return near[: self.rates]


def gain_of(update_ratio: float | None) -> float:
    """A contender's own rate divided by AdamW's for updates of AdamW's size, to two digits.

    Args:
        update_ratio: measured RMS of its updates divided by its rate; None is taken as usual.

    Example:
        >>> gain_of(0.2), gain_of(0.05), gain_of(0.0), gain_of(None)
        (1.0, 4.0, 32.0, 1.0)
    """
    if update_ratio is None:
        return 1.0
    gain = USUAL_RATIO / max(update_ratio, USUAL_RATIO / MAX_GAIN)
    return float(f"{max(gain, 1 / MAX_GAIN):.2g}")


@dataclass(frozen=True)
class Search:
    """State of a contender's search.

    Args:
        wanted: indices to try, in order, including the known ones.
        best: the best index once the search is done; None before, or if every cell failed.
        extended: how many of `wanted` are beyond the first grid.
        edge: the end at which the best index lies, if it does.
        done: whether all of `wanted` is known.
    """

    wanted: tuple[int, ...]
    best: int | None
    extended: int
    edge: Literal["low", "high"] | None
    done: bool


def search(grid: Grid, known: Mapping[int, float | None]) -> Search:
    """What a contender should try, given its scores.

    Args:
        grid: the rule.
        known: index -> mean score of its cells, None if they failed; indices with unfinished cells
            are left out.

    Example:
        >>> grid = Grid(base=1.0, factor=2.0, rates=3, extend=1)
        >>> search(grid, {}).wanted
        (0, 1, -1)
        >>> search(grid, {0: 0.3, 1: 0.5, -1: 0.2}).wanted  # the best is at the end
        (0, 1, -1, 2)
    """
    wanted = grid.first_indices()
    while all(k in known for k in wanted):
        best = best_index(wanted, known)
        if best is None:
            return Search(tuple(wanted), None, len(wanted) - grid.rates, None, True)
        beside = [k for k in (best + 1, best - 1) if k not in wanted]
        if not beside or len(wanted) - grid.rates >= grid.extend:
            edge = "high" if best == max(wanted) else "low" if best == min(wanted) else None
            return Search(tuple(wanted), best, len(wanted) - grid.rates, edge, True)
        wanted.append(beside[0])
    return Search(tuple(wanted), None, len(wanted) - grid.rates, None, False)


def best_index(tried: list[int], known: Mapping[int, float | None]) -> int | None:
    """The index with the highest smoothed score; among equal ones the nearest to the recipe's rate.

    One seed's lone peak is mostly luck, and the last rate before a cliff falls off it with the next
    seed: half of the weight is an index's own score, a quarter each neighbor's. A neighbor that was
    not tried, or crashed, counts as the index itself.

    Example:
        >>> best_index([0, 1, 2, 3], {0: 0.40, 1: 0.45, 2: 0.46, 3: 0.02})
        1
    """
    scored = {k: value for k in tried if (value := known[k]) is not None}

    def smooth(k: int) -> float:
        return (2 * scored[k] + scored.get(k - 1, scored[k]) + scored.get(k + 1, scored[k])) / 4

    return max(scored, key=lambda k: (round(smooth(k), 9), -abs(k), k), default=None)
