"""What a filter costs, and in which form it is cheapest.

Standard form: X <- (a I + b A + c A A) X with A = X X^T, three products a step, two of them of size
m x m x n. Gram form (Gram Newton-Schulz, 2026): only the m x m matrices R = X X^T and Q are
iterated and X is multiplied once, at the end. Rounding in R grows with the squared slopes of the
steps, so in low precision the steps are cut into segments, each of which forms R from X anew.

Legend: m <= n.
"""

from __future__ import annotations

from typing import NamedTuple

from mesotron.spectral.filters import Triple

# The largest rounding error that a Gram segment may make of R's, as a share of the largest singular
# value. In float32 Muon's five steps stay below it in one segment; Polar Express takes two.
GRAM_TOLERANCE = 2e-3


class Segment(NamedTuple):
    """Consecutive steps run in one form, "standard" or "gram"."""

    form: str
    steps: tuple[Triple, ...]


class Cost(NamedTuple):
    """FLOPs per multiply-add of products whose result is symmetric, which need only half of it.

    Args:
        square: of S S^T, for which many BLAS libraries have a routine.
        commuting: of S T with commuting symmetric S and T, which takes a kernel of one's own.
    """

    square: int = 2
    commuting: int = 2


PLAIN = Cost()
SYRK = Cost(square=1)
SYMMETRIC = Cost(square=1, commuting=1)


def standard_flops(m: int, n: int, steps: tuple[Triple, ...], cost: Cost = PLAIN) -> int:
    """FLOPs of the standard form.

    Example:
        >>> from mesotron.spectral import muon
        >>> standard_flops(1, 1, muon().steps)
        30
    """
    gram, apply = cost.square * m * m * n, 2 * m * m * n
    return sum(gram + _square_flops(m, triple, cost) + apply for triple in steps)


def gram_flops(m: int, n: int, steps: tuple[Triple, ...], cost: Cost = PLAIN) -> int:
    """FLOPs of one Gram segment: the Gram matrix, m x m products, one product with X."""
    squares = sum(_square_flops(m, triple, cost) for triple in steps)
    # Q Z and the two of R Z Z, for every step but one.
    chain = 3 * cost.commuting * m**3 * (len(steps) - 1)
    return cost.square * m * m * n + squares + chain + 2 * m * m * n


def plan_flops(m: int, n: int, plan: tuple[Segment, ...], cost: Cost = PLAIN) -> int:
    """FLOPs of a whole plan."""
    count = {"standard": standard_flops, "gram": gram_flops}
    return sum(count[segment.form](m, n, segment.steps, cost) for segment in plan)


def gram_plan(
    steps: tuple[Triple, ...], roundoff: float, tolerance: float = GRAM_TOLERANCE
) -> tuple[Segment, ...]:
    """Cut the steps into Gram segments that stay accurate with this unit roundoff of R.

    Inside a segment an error e in R becomes a^2 e after each step but the last, a being the slope
    at zero; a segment ends before that passes `tolerance`.

    Example:
        >>> from mesotron.spectral import muon, polar_express
        >>> [len(s.steps) for s in gram_plan(muon().steps, 2**-24)]
        [5]
        >>> [len(s.steps) for s in gram_plan(polar_express().steps, 2**-24)]
        [4, 1]
    """
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
    standard, gram = (Segment("standard", steps),), gram_plan(steps, roundoff, tolerance)
    return min(standard, gram, key=lambda plan: plan_flops(m, n, plan, cost))


def _square_flops(m: int, triple: Triple, cost: Cost) -> int:
    """A A, which a cubic step does not need."""
    return cost.square * m**3 if triple[2] else 0
