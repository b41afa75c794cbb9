"""Which rates each contender tries: one rule for all, a pure function of the scores so far.

Rates are base * factor^k in AdamW's unit. If the best is at an end, the search goes on beyond it.
"""

from collections.abc import Mapping, Sequence
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


class GridSearch(NamedTuple):
    wanted: tuple[int, ...]  # indices to try, in order, including the known ones
    best: int | None  # the best index once the search is done; None before, or if every cell failed
    extended: int  # how many of `wanted` are beyond the first grid
    edge: Literal["low", "high"] | None  # the end at which the best index lies, if it does
    done: bool  # whether all of `wanted` is known


def search(grid: Grid, known: Mapping[int, float | None]) -> GridSearch:
    wanted = around_zero(grid.rates)
    best = None
    edge = None

    done = False
    while not done and all(k in known for k in wanted):
        best = best_index(wanted, known)

        if best is None:
            beside = []
        else:
            beside = [k for k in (best + 1, best - 1) if k not in wanted]

        done = not beside or len(wanted) - grid.rates >= grid.extend
        if not done:
            wanted.append(beside[0])

    if done and best is not None:
        edge = edge_of(best, wanted)

    return GridSearch(
        wanted=tuple(wanted),
        best=best if done else None,
        extended=len(wanted) - grid.rates,
        edge=edge,
        done=done,
    )


def around_zero(count: int) -> list[int]:
    """0 and the indices nearest to it, upward first."""
    indices = []
    for number in range(count):
        distance = (number + 1) // 2
        indices.append(distance if number % 2 else -distance)

    return indices


def edge_of(best: int, wanted: Sequence[int]) -> Literal["low", "high"] | None:
    if best == max(wanted):
        return "high"
    if best == min(wanted):
        return "low"

    return None


def best_index(tried: list[int], known: Mapping[int, float | None]) -> int | None:
    """The index with the highest smoothed score; among equal ones the nearest to the recipe's rate.
    Smoothed (1/4, 1/2, 1/4), since one seed's lone peak is mostly luck."""
    scored: dict[int, float] = {}
    for k in tried:
        value = known[k]
        if value is not None:
            scored[k] = value

    def smooth(k: int) -> float:
        own = scored[k]
        return (2 * own + scored.get(k - 1, own) + scored.get(k + 1, own)) / 4

    return max(scored, key=lambda k: (round(smooth(k), 9), -abs(k), k), default=None)
