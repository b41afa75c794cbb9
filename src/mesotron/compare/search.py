"""Which rates each contender tries: one rule for all, a pure function of the scores so far.

Rates are base * factor^k in AdamW's unit. If the best is at an end, the search goes on beyond it.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

USUAL_RATIO = 0.2  # RMS of AdamW's update divided by its rate, once its moments have settled
MAX_GAIN = 32.0  # a filter may pass almost nothing


class Grid(NamedTuple):
    base: float  # the recipe's rate, in AdamW's unit
    factor: float  # between neighboring rates, above 1
    rates: int  # number that every contender tries
    extend: int  # maximum number beyond an end

    def rate(self, k: int) -> float:
        return float(f"{self.base * self.factor**k:.3g}")


def gain_of(update_ratio: float | None) -> float:
    """A contender's own rate divided by AdamW's for updates of AdamW's size, to two digits."""
    if update_ratio is None:
        return 1.0
    gain = USUAL_RATIO / max(update_ratio, USUAL_RATIO / MAX_GAIN)
    return float(f"{max(gain, 1 / MAX_GAIN):.2g}")


class Search(NamedTuple):
    wanted: tuple[int, ...]  # indices to try, in order, including the known ones
    best: int | None  # the best index once the search is done; None before, or if every cell failed
    extended: int  # how many of `wanted` are beyond the first grid
    edge: Literal["low", "high"] | None  # the end at which the best index lies, if it does
    done: bool  # whether all of `wanted` is known


def search(grid: Grid, known: Mapping[int, float | None]) -> Search:
    # First 0 and the indices nearest to it, upward first.
    wanted = [(k + 1) // 2 * (1 if k % 2 else -1) for k in range(grid.rates)]
    best = None
    edge = None

    done = False
    while not done and all(k in known for k in wanted):
        best = best_index(wanted, known)
        beside = [] if best is None else [k for k in (best + 1, best - 1) if k not in wanted]

        done = not beside or len(wanted) - grid.rates >= grid.extend
        if not done:
            wanted.append(beside[0])

    if done and best is not None:
        edge = "high" if best == max(wanted) else "low" if best == min(wanted) else None

    return Search(
        tuple(wanted),
        best if done else None,
        len(wanted) - grid.rates,
        edge,
        done,
    )


def best_index(tried: list[int], known: Mapping[int, float | None]) -> int | None:
    """The index with the highest smoothed score; among equal ones the nearest to the recipe's rate.
    Smoothed (1/4, 1/2, 1/4), since one seed's lone peak is mostly luck."""
    scored = {k: value for k in tried if (value := known[k]) is not None}

    def smooth(k: int) -> float:
        return (2 * scored[k] + scored.get(k - 1, scored[k]) + scored.get(k + 1, scored[k])) / 4

    return max(scored, key=lambda k: (round(smooth(k), 9), -abs(k), k), default=None)
