"""Which rates each contender tries: one rule for all, as a pure function of what is known so far.

Rates are base * factor^k in AdamW's unit, the same for everybody; `gain` is what makes a
contender's updates as large as AdamW's at the same rate. If the best rate lies at an end of what
was tried, the contender goes on beyond it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# What AdamW's update has, as a share of its rate, once its moments have settled.
USUAL_RATIO = 0.2
# A filter that passes next to nothing would ask for a step without end.
LARGEST_GAIN = 32.0


@dataclass(frozen=True)
class Grid:
    """The rule.

    Args:
        base: the recipe's rate, in AdamW's unit.
        factor: between neighbouring rates, above 1.
        rates: how many every contender tries.
        extend: how many more it may try at an end.
    """

    base: float
    factor: float
    rates: int
    extend: int

    def rate(self, k: int) -> float:
        """The rate of a notch, to three digits.

        Example:
            >>> Grid(base=6e-4, factor=2.0, rates=4, extend=2).rate(1)
            0.0012
        """
        return float(f"{self.base * self.factor**k:.3g}")

    def first_notches(self) -> list[int]:
        """The notches that everybody tries: 0 and those nearest to it, upward first.

        Example:
            >>> Grid(base=1.0, factor=2.0, rates=4, extend=2).first_notches()
            [0, 1, -1, 2]
        """
        near = [0]
        for distance in range(1, self.rates):
            near += [distance, -distance]
        return near[: self.rates]


def gain_of(update_ratio: float | None) -> float:
    """What a contender's own rate must be over AdamW's for updates of AdamW's size; two digits.

    Args:
        update_ratio: RMS of its updates over its rate, as measured; None is taken as usual.

    Example:
        >>> gain_of(0.2), gain_of(0.05), gain_of(0.0), gain_of(None)
        (1.0, 4.0, 32.0, 1.0)
    """
    if update_ratio is None:
        return 1.0
    wanted = USUAL_RATIO / max(update_ratio, USUAL_RATIO / LARGEST_GAIN)
    return float(f"{max(wanted, 1 / LARGEST_GAIN):.2g}")


@dataclass(frozen=True)
class Search:
    """Where a contender's search stands.

    Args:
        wanted: notches to try, in order; those known are among them.
        best: the best notch once nothing more is wanted; None before, or if every cell failed.
        extended: how many of `wanted` lie beyond the first grid.
        edge: the end at which the best notch lies, if it does.
        done: whether all that is wanted is known.
    """

    wanted: tuple[int, ...]
    best: int | None
    extended: int
    edge: Literal["low", "high"] | None
    done: bool


def search(grid: Grid, known: Mapping[int, float | None]) -> Search:
    """What a contender is to try, given what it has tried.

    Args:
        grid: the rule.
        known: notch -> mean score of its cells, None if they failed; a notch with an open cell is
            left out.

    Example:
        >>> grid = Grid(base=1.0, factor=2.0, rates=3, extend=1)
        >>> search(grid, {}).wanted
        (0, 1, -1)
        >>> search(grid, {0: 0.3, 1: 0.5, -1: 0.2}).wanted  # the best lies at the end
        (0, 1, -1, 2)
    """
    wanted = grid.first_notches()
    while all(k in known for k in wanted):
        best = best_notch(wanted, known)
        if best is None:
            return Search(tuple(wanted), None, len(wanted) - grid.rates, None, True)
        beside = [k for k in (best + 1, best - 1) if k not in wanted]
        if not beside or len(wanted) - grid.rates >= grid.extend:
            edge = "high" if best == max(wanted) else "low" if best == min(wanted) else None
            return Search(tuple(wanted), best, len(wanted) - grid.rates, edge, True)
        wanted.append(beside[0])
    return Search(tuple(wanted), None, len(wanted) - grid.rates, None, False)


def best_notch(tried: list[int], known: Mapping[int, float | None]) -> int | None:
    """The notch with the highest score together with its neighbours; of equal ones the nearest to
    the recipe's rate.

    One seed's lone peak is mostly luck, and the last rate before the cliff falls off it with the
    next seed: half of the weight is a notch's own score, a quarter each neighbour's. A neighbour
    that was not tried, or crashed, counts as the notch itself.

    Example:
        >>> best_notch([0, 1, 2, 3], {0: 0.40, 1: 0.45, 2: 0.46, 3: 0.02})
        1
    """
    scored = {k: value for k in tried if (value := known[k]) is not None}

    def together(k: int) -> float:
        return (2 * scored[k] + scored.get(k - 1, scored[k]) + scored.get(k + 1, scored[k])) / 4

    return max(scored, key=lambda k: (round(together(k), 9), -abs(k), k), default=None)
