"""Intervals and tests for scores of S seeds on the same P problems.

Intervals resample both, and the test of a difference clusters by both. X [S, P] are the scores of
one contender, D [S, P] paired differences of two.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mesotron.evaluate.scores import Score

RESAMPLES = 4000
LEVEL = 0.05


@dataclass(frozen=True)
class ScoreDifference(Score):
    """A mean of paired differences, its 95% interval, and the p-value of its being zero."""

    p: float


def bootstrap(X: np.ndarray, seed: int = 0) -> Score:
    """The mean of X with a percentile interval; seeds and problems are resampled independently
    (Owen, The pigeonhole bootstrap, 2007, arXiv 0712.1111). Rather too narrow with three seeds."""
    S, P = X.shape
    rng = np.random.default_rng(seed)
    seeds = rng.multinomial(S, np.full(S, 1 / S), size=RESAMPLES) / S
    problems = rng.multinomial(P, np.full(P, 1 / P), size=RESAMPLES) / P
    means = np.einsum("rs,sp,rp->r", seeds, X, problems)
    low, high = np.quantile(means, [0.025, 0.975])

    return Score(float(X.mean()), float(low), float(high))


class SeedNoise(NamedTuple):
    """Variance of one seed's mean difference by chance, and its degrees of freedom (0: unknown)."""

    variance: float
    freedom: float


def pool_seeds(differences: Sequence[np.ndarray]) -> SeedNoise:
    """The noise of seeds, pooled over all pairs with several: three seeds say little about their
    own spread. The mean over pairs is the residual of a table of contenders and seeds (Fisher, The
    Design of Experiments, 1935), with (K - 1)(S - 1) degrees of freedom."""
    several = [D for D in differences if len(D) > 1]
    if not several:
        return SeedNoise(0.0, 0.0)

    own = [D.mean(1).var(ddof=1) for D in several]
    contenders = (1 + math.isqrt(1 + 8 * len(several))) // 2  # K (K - 1) / 2 are all pairs of K
    return SeedNoise(float(np.mean(own)), (contenders - 1.0) * (min(map(len, several)) - 1))


def paired_test(D: np.ndarray, pooled: SeedNoise | None = None) -> ScoreDifference:
    """A two-sided t-test of a zero mean, with the variance clustered by seed and by problem.

    V = V_seed + V_problem - V_both, never less than either of the first two: the variances of the
    mean of the S seed means, of the P problem means, and of all S P numbers (Cameron, Gelbach and
    Miller, Robust inference with multiway clustering, 2011), with Satterthwaite's degrees of
    freedom. For one seed V_problem stands alone. V_seed is at least that of `pooled`.
    """
    from scipy.stats import t as student  # slow to import

    S, P = D.shape
    mean = float(D.mean())
    by_seed = variance_of_mean(D.mean(1))
    by_problem = variance_of_mean(D.mean(0))
    both = variance_of_mean(D.ravel()) if S > 1 else 0.0  # for one seed the same as by_problem
    by_seed_freedom = S - 1.0

    if pooled is not None and pooled.freedom and pooled.variance / S >= by_seed:
        by_seed = pooled.variance / S
        by_seed_freedom = pooled.freedom

    variance = max(by_seed, by_problem, by_seed + by_problem - both)
    if variance == 0:
        return ScoreDifference(mean, mean, mean, 1.0 if mean == 0 else 0.0)

    freedom = float(P - 1)
    if by_seed_freedom:
        spread = by_seed**2 / by_seed_freedom
        spread += by_problem**2 / (P - 1) + both**2 / (S * P - 1)
        freedom = min(max(variance**2 / spread, by_seed_freedom), P - 1.0)

    error = math.sqrt(variance)
    half = float(student.ppf(1 - LEVEL / 2, freedom)) * error
    p = 2 * float(student.sf(abs(mean) / error, freedom))

    return ScoreDifference(mean, mean - half, mean + half, p)


def variance_of_mean(x: np.ndarray) -> float:
    if len(x) < 2:
        return 0.0

    return float(x.var(ddof=1) / len(x))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction (1979) for testing all p-values together."""
    order = sorted(range(len(p_values)), key=lambda k: p_values[k])
    corrected = [0.0] * len(p_values)

    largest = 0.0
    for place, k in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - place) * p_values[k]))
        corrected[k] = round(largest, 12)

    return corrected
