"""What a filter does to one singular value, where it cuts, and what it costs.

The standard form X <- (a I + b A + c A A) X with A = X X^T takes three products a step. The Gram
form (Gram Newton-Schulz, 2026) iterates m x m matrices (m <= n) and multiplies X once. Rounding in
R = X X^T grows with the squared slopes of the steps, so segments of them recompute R.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from mesotron.spectral import filters
from mesotron.spectral.filters import FIXED_POINT, Filter, Triple, aim, noise_edge

# The largest rounding error of a Gram segment, as a share of the largest singular value.
GRAM_TOLERANCE = 2e-3


def steps_at(filter: Filter, shape: tuple[int, int] | None = None) -> tuple[Triple, ...]:
    """The triples of a filter; of a cutoff filter, those for a matrix whose norm bound is tight."""
    if filter.rank is not None:
        raise ValueError(f"the {filter.name} filter keeps a rank and has no scalar response")
    if filter.cutoff is None:
        return filter.steps

    t = np.float64(_edge(filter, shape))
    triples = []
    for _ in range(filter.num_steps(*(shape or (1, 1)))):
        (a, b, c), t = aim(t)
        triples.append((float(a), float(b), float(c)))

    return tuple(triples)


def _edge(filter: Filter, shape: tuple[int, int] | None) -> float:
    if filter.cutoff != "noise":
        assert filter.cutoff is not None
        return filter.cutoff

    if shape is None:
        raise ValueError("cutoff='noise' depends on the matrix: give its shape (m, n)")

    return noise_edge(*shape)


def response(filter: Filter, sigma: ArrayLike, shape: tuple[int, int] | None = None) -> np.ndarray:
    """f(sigma) for singular values in [0, 1]; `shape` (m, n) is needed by cutoff="noise" alone.

    Example:
        >>> from mesotron.spectral import pion
        >>> response(pion(promote=2), [0.3, 0.25, 0.2]).round(4).tolist()
        [0.8453, 0.3491, 0.0274]
    """
    s = np.asarray(sigma, dtype=np.float64)
    for triple in steps_at(filter, shape):
        s = filters._quintic(triple, s)  # pyright: ignore[reportArgumentType]  # numpy broadcasts
    return np.asarray(s)


def slope_at_zero(filter: Filter, shape: tuple[int, int] | None = None) -> float:
    """f'(0), the gain of the smallest singular values."""
    return math.prod(a for a, _, _ in steps_at(filter, shape))


def limit_cutoff(filter: Filter, shape: tuple[int, int] | None = None) -> float | None:
    """The singular value below which more suppression goes to 0 and above which to 1, or None.

    Example:
        >>> from mesotron.spectral import pion
        >>> [round(limit_cutoff(pion(promote=k)), 4) for k in range(5)]
        [0.8165, 0.523, 0.2957, 0.1605, 0.086]
    """
    if filter.cutoff is not None:
        return min(float(_edge(filter, shape)), FIXED_POINT)
    if filters.SUPPRESS not in filter.steps:
        return None

    promotions = tuple(t for t in filter.steps if t == filters.PROMOTE)
    if not promotions:
        return FIXED_POINT

    return threshold(Filter(filter.name, promotions), FIXED_POINT)


def threshold(filter: Filter, level: float, shape: tuple[int, int] | None = None) -> float:
    """The smallest sigma in [0, 1] with f(sigma) = level, by bisection on the first rising branch.

    Example:
        >>> from mesotron.spectral import pion
        >>> round(threshold(pion(promote=1), 0.5), 3)
        0.492
    """
    grid = np.linspace(0.0, 1.0, 20001)
    above = np.flatnonzero(response(filter, grid, shape) >= level)

    if not len(above):
        raise ValueError(f"the {filter.name} filter never reaches {level} on [0, 1]")

    high = float(grid[above[0]])
    low = max(high - float(grid[1]), 0.0)
    for _ in range(60):
        middle = (low + high) / 2
        if response(filter, middle, shape) >= level:
            high = middle
        else:
            low = middle

    return high


class Segment(NamedTuple):
    """Consecutive steps run in one form, "standard" or "gram"."""

    form: str
    steps: tuple[Triple, ...]


class Cost(NamedTuple):
    """FLOPs per multiply-add of products whose result is symmetric, which need only half of it."""

    square: int = 2  # S S^T, for which many BLAS libraries have a routine
    commuting: int = 2  # S T with commuting symmetric S and T: needs a special kernel


PLAIN = Cost()
SYRK = Cost(square=1)
SYMMETRIC = Cost(square=1, commuting=1)


def standard_flops(m: int, n: int, steps: tuple[Triple, ...], cost: Cost = PLAIN) -> int:
    return plan_flops(m, n, (Segment("standard", steps),), cost)


def plan_flops(m: int, n: int, plan: tuple[Segment, ...], cost: Cost = PLAIN) -> int:
    total = 0
    wide = (cost.square + 2) * m * m * n  # the Gram matrix, and a product with X
    for form, steps in plan:
        num_quintic = sum(1 for *_, c in steps if c)
        total += num_quintic * cost.square * m**3

        if form == "standard":
            total += len(steps) * wide
        else:  # and Q Z and the two of R Z Z, for every step but one
            products = 3 * (len(steps) - 1)
            total += wide + products * cost.commuting * m**3

    return total


def gram_plan(
    steps: tuple[Triple, ...],
    roundoff: float,
    tolerance: float = GRAM_TOLERANCE,
) -> tuple[Segment, ...]:
    """Cut the steps into Gram segments that stay accurate with this unit roundoff of R: an error of
    R grows by the squared slope at zero with each step, up to `tolerance`."""
    segments: list[list[Triple]] = []
    growth = float("inf")
    for triple in steps:
        if growth * roundoff > tolerance:
            segments.append([])
            growth = 1.0

        segments[-1].append(triple)
        growth *= max(triple[0] ** 2, 1.0)

    return tuple(Segment("gram", tuple(s)) for s in segments)


def cheapest_plan(
    m: int,
    n: int,
    steps: tuple[Triple, ...],
    roundoff: float,
    cost: Cost = PLAIN,
    tolerance: float = GRAM_TOLERANCE,
) -> tuple[Segment, ...]:
    """The cheaper of the standard form and the Gram form for this shape, by FLOPs."""
    standard = (Segment("standard", steps),)
    gram = gram_plan(steps, roundoff, tolerance)
    return min(
        standard,
        gram,
        key=lambda plan: plan_flops(
            m,
            n,
            plan,
            cost,
        ),
    )
