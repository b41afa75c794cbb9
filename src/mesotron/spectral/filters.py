"""The filters: lists of odd quintics p(s) = a s + b s^3 + c s^5, applied one after the other.

Muon (Jordan et al. 2024) and Pion (Fan et al. 2026, arXiv 2605.19282) differ by this list alone.
They assume singular values in [0, 1]: a matrix is first divided by a norm that bounds its largest.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

Triple = tuple[float, float, float]
Cutoff = float | Literal["aligned", "noise"]

# Jordan's: the largest slope at zero that keeps sigma in about [0.7, 1.2] after five steps.
QUINTIC: Triple = (3.4445, -4.7750, 2.0315)
CUBIC: Triple = (1.5, -0.5, 0.0)
PROMOTE: Triple = (1.875, -1.25, 0.375)
SUPPRESS: Triple = (0.0, 2.5, -1.5)
# Where suppression neither grows nor shrinks a singular value: s = 2.5 s^3 - 1.5 s^5 at s^2 = 2/3.
FIXED_POINT = math.sqrt(2 / 3)
# A second direction raises the step's cosine with the gradient where (s1 + s2) / sqrt(2) > s1.
ALIGNED = math.sqrt(2) - 1
SMALLEST_AIM = 1e-4  # far below the noise edge of any weight matrix in use


@dataclass(frozen=True)
class Filter:
    """A spectral filter.

    Args:
        name: what a user types.
        steps: the (a, b, c) of each step. Empty for the two kinds below.
        cutoff: a high-pass strength; the triples then follow from each matrix (see `high_pass`).
        suppress: with `cutoff`, how many suppression steps sharpen the edge.
        rank: keep exactly this many directions by an exact SVD (LRMuon): a reference, slow.
    """

    name: str
    steps: tuple[Triple, ...] = ()
    cutoff: float | Literal["noise"] | None = None
    suppress: int = 3
    rank: int | None = None

    def num_steps(self, m: int, n: int) -> int:
        """How many steps an m x n matrix takes; only a cutoff filter's number depends on the shape.
        It promotes until its threshold stands at the fixed point, then suppresses."""
        if self.cutoff is None:
            return len(self.steps)
        # The Schatten-8 norm exceeds the largest singular value by at most min(m, n)^(1/8).

        if self.cutoff == "noise":
            t = noise_edge(m, n)
        else:
            t = self.cutoff * min(m, n) ** -0.125

        return num_promotions(t) + self.suppress

    def steepest_steps(self, m: int, n: int) -> tuple[Triple, ...]:
        """The triples to plan an m x n matrix with; a cutoff filter's own are no steeper."""
        if self.cutoff is None:
            return self.steps

        return (PROMOTE,) * self.num_steps(m, n)


def muon(steps: int = 5) -> Filter:
    """Muon's quintic: every singular value goes to about 1.

    Example:
        >>> muon().steps[0]
        (3.4445, -4.775, 2.0315)

    References: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
    """
    return Filter("muon", (QUINTIC,) * _positive(steps))


def cubic(steps: int = 12) -> Filter:
    """The cubic Newton-Schulz step s <- 1.5 s - 0.5 s^3: two products a step instead of three, and
    quadratic convergence to exactly 1, from sigma = 0.01 in about 12 steps.

    References: Bjorck and Bowie, "An iterative algorithm for computing the best estimate of an
        orthogonal matrix", 1971.
    """
    return Filter("cubic", (CUBIC,) * _positive(steps))


@lru_cache(maxsize=64)
def polar_express(steps: int = 5, lower: float = 1e-3, safety: float = 1.02) -> Filter:
    """Polar Express: each step is the best odd quintic for the interval left by those before it.

    Args:
        steps: number of steps.
        lower: singular values in [lower, 1] are brought to 1 as fast as any quintics can.
        safety: each step but the last is composed with s / safety, against rounding above 1.

    References: Amsel, Persson, Musco, Gower, "The Polar Express", 2025, arXiv 2505.16932.
    """
    low = lower
    high = 1.0

    triples = []
    for k in range(_positive(steps)):
        # A longer interval makes the best quintic so steep that it slows the later steps down.
        a, b, c = _best_quintic(max(low, 0.0240732743 * high), high)
        at_low = _quintic((a, b, c), low)
        at_high = _quintic((a, b, c), high)

        center = 2 / (at_low + at_high)
        low = center * at_low
        high = 2 - center * at_low

        s = safety if k < steps - 1 else 1.0
        triples.append(
            (
                center * a / s,
                center * b / s**3,
                center * c / s**5,
            )
        )

    return Filter("polar_express", tuple(triples))


def pion(promote: int = 0, steps: int = 5) -> Filter:
    """Pion: `promote` steps raise all singular values, `steps - promote` suppress the small ones.

    The limit cutoff, as a fraction of the Frobenius norm, is 0.8165, 0.5230, 0.2957, 0.1605, 0.0860
    for promote = 0..4 of 5. With promote = 0 at most one direction can pass.

    References: Fan et al., "Pion", 2026, arXiv 2605.19282.
    """
    if not 0 <= promote <= _positive(steps):
        raise ValueError(f"promote={promote} must lie between 0 and steps={steps}")
    return Filter("pion", (PROMOTE,) * promote + (SUPPRESS,) * (steps - promote))


def high_pass(cutoff: Cutoff, suppress: int = 3) -> Filter:
    """Pion with a continuous cutoff: directions above it go to 1, those below to 0.

    Promotion and suppression are the two ends of one family of monotone quintics with p(1) = 1 and
    p'(1) = 0, c in [-1.5, 0.375] (`aim`). Each step takes the member that moves the threshold to
    the fixed point of suppression, so it is met exactly; nothing is ever amplified above 1.

    Args:
        cutoff: a fraction of the largest singular value; "aligned": the fraction sqrt(2) - 1, above
            which a second direction makes the step more like the gradient; or "noise": the edge
            that pure noise of this shape reaches, (1/sqrt(m) + 1/sqrt(n)) of the Frobenius norm.
        suppress: suppression steps after the threshold is in place; each one sharpens the edge.
    """
    edge = ALIGNED if cutoff == "aligned" else cutoff
    if edge != "noise" and not (isinstance(edge, int | float) and 0 < edge <= FIXED_POINT):
        raise ValueError(
            f"cutoff={cutoff!r} must be 'aligned', 'noise' or a fraction between 0 and "
            f"{FIXED_POINT:.4f}, the highest that suppression can aim at"
        )

    return Filter("pion", cutoff=edge, suppress=_positive(suppress))


def low_rank(rank: int = 128) -> Filter:
    """LRMuon: the polar factor of the top `rank` directions by an exact SVD; a slow reference."""
    return Filter("low_rank", rank=_positive(rank))


FILTERS: dict[str, Callable[..., Filter]] = {
    "muon": muon,
    "cubic": cubic,
    "polar_express": polar_express,
    "pion": pion,
    "low_rank": low_rank,
}


@lru_cache(maxsize=256)
def make_filter(
    name: str,
    *,
    steps: int | None = None,
    promote: int = 0,
    cutoff: Cutoff | None = None,
    rank: int | None = None,
) -> Filter:
    """A filter from the plain values that a param group, a config or a flag holds.

    Example:
        >>> make_filter("pion", promote=2) == pion(promote=2)
        True
    """
    _check_options(name, steps, promote, cutoff, rank)
    if cutoff is not None and steps is not None:
        return high_pass(cutoff, suppress=steps)
    if cutoff is not None:
        return high_pass(cutoff)

    options = {
        "steps": steps,
        "promote": promote or None,
        "rank": rank,
    }
    return FILTERS[name](**{key: value for key, value in options.items() if value is not None})


def _check_options(
    name: str,
    steps: int | None,
    promote: int,
    cutoff: Cutoff | None,
    rank: int | None,
) -> None:
    """Refuse an option of another filter."""
    if name not in FILTERS:
        raise ValueError(f"unknown filter {name!r}: choose one of {', '.join(FILTERS)}")
    if rank is not None and name != "low_rank":
        raise ValueError(f"rank={rank} belongs to the low_rank filter, not to {name!r}")

    if cutoff is not None:
        if name != "pion" or promote:
            raise ValueError(f"cutoff={cutoff!r} belongs to the pion filter without promote")
        return

    if promote and name != "pion":
        raise ValueError(f"promote={promote} belongs to the pion filter, not to {name!r}")
    if steps is not None and name == "low_rank":
        raise ValueError(f"steps={steps}: the low_rank filter has none, it is an exact SVD")


def noise_edge(m: int, n: int) -> float:
    """The largest singular value of m x n independent noise, as a share of its Frobenius norm.

    References: Marchenko and Pastur, 1967: sigma_max -> sqrt(m) + sqrt(n), ||.||_F -> sqrt(m n).

    Example:
        >>> round(noise_edge(128, 2048), 4)
        0.1105
    """
    return 1 / math.sqrt(m) + 1 / math.sqrt(n)


def aim(t: Any) -> tuple[tuple[Any, Any, Any], Any]:
    """The triple that moves a threshold t one step toward suppression's fixed point, and the new t.

    With f_0 the cubic step, the family is f_c(s) = f_0(s) + c s (1 - s^2)^2, linear in c, so the
    member with f_c(t) = sqrt(2/3) is found in closed form and clipped to the monotone range. `t` is
    in [0, 1]: a numpy scalar, or an array or tensor with one threshold per matrix.

    Example:
        >>> (a, b, c), t = aim(np.float64(FIXED_POINT))  # in place already: pure suppression
        >>> float(round(a, 6)), float(round(b, 6)), float(round(c, 6))
        (0.0, 2.5, -1.5)
    """
    t = t.clip(SMALLEST_AIM, FIXED_POINT)
    slack = t * (1 - t * t) ** 2
    base = 1.5 * t - 0.5 * t**3
    c = ((FIXED_POINT - base) / slack).clip(-1.5, 0.375)

    return (1.5 + c, -(0.5 + 2 * c), c), base + c * slack


@lru_cache(maxsize=1024)
def num_promotions(t: float) -> int:
    """How many steps of `aim` bring the threshold t to the fixed point."""
    place = np.float64(t)
    count = 0
    while place < FIXED_POINT - 1e-9:
        _, place = aim(place)
        count += 1

    return count


def _positive(count: int) -> int:
    if count < 1:
        raise ValueError(f"{count} is not a usable number of steps or ranks: give at least 1")
    return count


def _quintic(triple: Triple, s: float) -> float:
    a, b, c = triple
    return s * (a + s * s * (b + c * s * s))


def _best_quintic(low: float, high: float) -> Triple:
    """The odd quintic nearest to 1 on [low, high] in the maximum norm, by the Remez exchange: its
    error alternates between its extremes at both ends and the stationary points between them."""
    if high - low < 1e-6 * high:  # one point: p(s) = s (15 - 10 s^2 + 3 s^4) / 8 about the middle
        s = (low + high) / 2
        return (
            1.875 / s,
            -1.25 / s**3,
            0.375 / s**5,
        )

    a = b = c = 0.0
    points = low + (high - low) * np.array([0.0, 0.25, 0.75, 1.0])
    for _ in range(50):
        powers = points[:, None] ** np.array([1, 3, 5])
        errors = [1, -1, 1, -1]
        a, b, c, _error = np.linalg.solve(np.column_stack([powers, errors]), np.ones(4))

        # Where p'(s) = a + 3 b s^2 + 5 c s^4 is zero.
        root = math.sqrt(max(9 * b * b - 20 * a * c, 0.0))
        squares = [(-3 * b - root) / (10 * c), (-3 * b + root) / (10 * c)]
        middle = np.sqrt(np.array(squares))

        moved = np.array([low, *middle, high])
        if np.abs(moved - points).max() < 1e-13 * high:
            break

        points = moved

    return float(a), float(b), float(c)
