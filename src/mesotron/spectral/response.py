"""The scalar map of a filter: what it does to one singular value, and where it cuts.

An odd polynomial in X acts on the singular values alone, X (X^T X)^j = U S^(2j+1) V^T, so
everything about a filter can be read from this map. A filter with `rank` has none: it looks at the
whole spectrum.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from mesotron.spectral.filters import (
    FIXED_POINT,
    PROMOTE,
    SUPPRESS,
    Filter,
    Triple,
    _quintic,
    aim,
    noise_edge,
)


def steps_at(filter: Filter, shape: tuple[int, int] | None = None) -> tuple[Triple, ...]:
    """The triples of a filter; those of a cutoff filter for a matrix whose normaliser is tight.

    Args:
        filter: the filter.
        shape: (m, n), needed by cutoff="noise" alone.
    """
    if filter.rank is not None:
        raise ValueError(
            f"the {filter.name} filter keeps directions by rank and has no scalar response"
        )
    if filter.cutoff is None:
        return filter.steps
    if filter.cutoff == "noise":
        if shape is None:
            raise ValueError(
                "cutoff='noise' depends on the matrix: give its shape, for example (128, 2048)"
            )
        t = np.float64(noise_edge(*shape))
    else:
        t = np.float64(filter.cutoff)
    triples = []
    for _ in range(filter.num_steps(*(shape or (1, 1)))):
        (a, b, c), t = aim(t)
        triples.append((float(a), float(b), float(c)))
    return tuple(triples)


def response(filter: Filter, sigma: ArrayLike, shape: tuple[int, int] | None = None) -> np.ndarray:
    """f(sigma) for singular values of a normalised matrix.

    Args:
        filter: the filter.
        sigma: values in [0, 1], any array shape.
        shape: (m, n), needed by cutoff="noise" alone.

    Example:
        >>> from mesotron.spectral import pion
        >>> response(pion(promote=2), [0.3, 0.25, 0.2]).round(4).tolist()
        [0.8453, 0.3491, 0.0274]
    """
    s = np.asarray(sigma, dtype=np.float64)
    for triple in steps_at(filter, shape):
        s = _quintic(triple, s)  # pyright: ignore[reportArgumentType]  # numpy broadcasts
    return np.asarray(s)


def slope_at_zero(filter: Filter, shape: tuple[int, int] | None = None) -> float:
    """f'(0), the gain of the smallest singular values."""
    return math.prod(a for a, _, _ in steps_at(filter, shape))


def limit_cutoff(filter: Filter, shape: tuple[int, int] | None = None) -> float | None:
    """The singular value below which more suppression goes to 0 and above which to 1; None without
    suppression.

    Example:
        >>> from mesotron.spectral import pion
        >>> [round(limit_cutoff(pion(promote=k)), 4) for k in range(5)]
        [0.8165, 0.523, 0.2957, 0.1605, 0.086]
    """
    if filter.cutoff is not None:
        edge = noise_edge(*shape) if filter.cutoff == "noise" and shape else filter.cutoff
        if edge == "noise":
            raise ValueError(
                "cutoff='noise' depends on the matrix: give its shape, for example (128, 2048)"
            )
        return min(float(edge), FIXED_POINT)
    if SUPPRESS not in filter.steps:
        return None
    promotions = Filter(filter.name, tuple(t for t in filter.steps if t == PROMOTE))
    return threshold(promotions, FIXED_POINT) if promotions.steps else FIXED_POINT


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
