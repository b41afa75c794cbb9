"""Fits the numbers of forecast.json on the fitting half, each source weighed by the square root of
its runs, and other people's sources together as much as ours.

Three quantiles of the gain (and of the held-out score's) are linear in a few terms: linear
programs. They are then widened until runs of sources that were left out lie inside as often as
they should (split conformal). The outcome is two logistic regressions.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog, minimize
from scipy.sparse import csr_matrix, hstack, identity

from benchmarks.forecast.cases import Case
from mesotron.watch.forecast import (
    Terms,
    collapse_terms,
    gain_terms,
    heldout_terms,
    learn_terms,
    reward_range,
    weigh,
)

Array = NDArray[np.float64]
Model = dict[str, Any]
Problem = tuple[list[Terms], Array, Array]  # terms, targets, weights

SHARES = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7)
QUANTILES = {"low": 0.1, "middle": 0.5, "high": 0.9}
MOST_GAIN = 1.0  # of the reward's range; beyond, a gain counts as this
LASSO = 1e-4
RIDGE = 2.0
FOLDS = 6
DIGITS = 5


def fit(cases: Sequence[Case], widths: Model | None = None) -> Model:
    """All coefficients; intervals are as wide as they must be, or widened as those of `widths`."""

    def interval(name: str, some: Sequence[Case], problem: Callable[..., Problem]) -> Model:
        model = fit_quantiles(problem(some))
        if widths is None:
            return model | widen(some, problem)
        return model | {key: widths[name][key] for key in ("widen_low", "widen_high")}

    gain = interval("gain", cases, gain_problem)
    middle = gain["middle"]

    def with_heldout(some: Sequence[Case]) -> Problem:
        return heldout_problem(some, middle)

    scored = [case for case in cases if case.final_score is not None]
    stayed = [case for case in cases if case.outcome != "collapse"]

    return {
        "gain": gain,
        "heldout": interval("heldout", scored, with_heldout),
        "learn": fit_odds(stayed, learn_terms, "learn"),
        "collapse": fit_odds(cases, collapse_terms, "collapse"),
    }


def weights_of(cases: Sequence[Case]) -> Array:
    """A source counts as the square root of its runs, ours together as much as other people's."""
    counts = Counter(case.run.source for case in cases)
    weights = np.array([1 / math.sqrt(counts[case.run.source]) for case in cases])
    public = np.array([case.run.is_public for case in cases])
    for half in (public, ~public):
        if half.any():
            weights[half] /= weights[half].sum()

    return weights / weights.sum()


def gain_problem(cases: Sequence[Case]) -> Problem:
    terms = [gain_terms(case.present) for case in cases]
    gains = np.clip([case.gain for case in cases], -MOST_GAIN, MOST_GAIN)
    return terms, gains, weights_of(cases)


def heldout_problem(cases: Sequence[Case], middle: Mapping[str, float]) -> Problem:
    terms = []
    gains = []
    for case in cases:
        assert case.final_score is not None
        reward_gain = weigh(middle, gain_terms(case.present))
        low, scale = reward_range(case.scores[:, 1])
        now = float(case.scores[-1, 1])
        terms.append(heldout_terms((now - low) / scale, case.present.horizon, reward_gain))
        gains.append((case.final_score - now) / scale)

    return terms, np.clip(gains, -MOST_GAIN, MOST_GAIN), weights_of(cases)


def widen(cases: Sequence[Case], problem: Callable[[Sequence[Case]], Problem]) -> Model:
    """The factors that make quantiles hold for sources that were left out."""
    weights = dict(zip(map(id, cases), weights_of(cases), strict=True))
    below: list[tuple[float, float]] = []  # how much wider the interval had to be, weight
    above: list[tuple[float, float]] = []
    for inside, outside in folds(cases):
        left_out = fit_quantiles(problem(inside))
        every_terms, targets, _ = problem(outside)
        for case, terms, target in zip(outside, every_terms, targets, strict=True):
            low, middle, high = [weigh(left_out[name], terms) for name in QUANTILES]
            weight = weights[id(case)]
            below.append(((middle - target) / max(middle - low, 1e-6), weight))
            above.append(((target - middle) / max(high - middle, 1e-6), weight))

    share = QUANTILES["high"]
    return {
        "widen_low": weighted_quantile(below, share),
        "widen_high": weighted_quantile(above, share),
    }


def folds(cases: Sequence[Case]) -> list[tuple[list[Case], list[Case]]]:
    """Cases of most sources, and those of the others; the largest sources in different folds."""
    counts = Counter(case.run.source for case in cases)
    number = {source: k % FOLDS for k, (source, _) in enumerate(counts.most_common())}

    pairs = []
    for k in range(min(FOLDS, len(counts))):
        inside = [case for case in cases if number[case.run.source] != k]
        outside = [case for case in cases if number[case.run.source] == k]
        pairs.append((inside, outside))

    return pairs


def fit_quantiles(problem: Problem) -> Model:
    terms, targets, weights = problem
    matrix = matrix_of(terms)
    model = {}
    for name, share in QUANTILES.items():
        values = quantile_regression(matrix, targets, weights, share)
        model[name] = named(terms, values)

    return model


def quantile_regression(matrix: Array, targets: Array, weights: Array, share: float) -> Array:
    """The least weighted pinball loss, as a linear program, with a small lasso."""
    count, width = matrix.shape
    sizes = np.abs(matrix).mean(axis=0) + 1e-9
    scaled = csr_matrix(matrix / sizes)
    residuals = identity(count)

    costs = np.concatenate(
        [np.full(2 * width, LASSO), weights * share, weights * (1 - share)],
    )
    equal = hstack([scaled, -scaled, residuals, -residuals], format="csr")
    result = linprog(costs, A_eq=equal, b_eq=targets, bounds=(0, None), method="highs")
    return (result.x[:width] - result.x[width : 2 * width]) / sizes


def fit_odds(cases: Sequence[Case], terms_of: Callable[..., Terms], outcome: str) -> Model:
    """Logistic regression with a ridge on all but the constant."""
    terms = [terms_of(case.present) for case in cases]
    matrix = matrix_of(terms)
    is_outcome = np.array([case.outcome == outcome for case in cases], dtype=float)
    # Cases of one run are not independent: they count for less than their number.
    weights = weights_of(cases) * len(cases) ** 0.9

    def loss(values: Array) -> tuple[float, Array]:
        odds = matrix @ values
        total = (weights * (np.logaddexp(0, odds) - is_outcome * odds)).sum()
        slope = matrix.T @ (weights * (1 / (1 + np.exp(-odds)) - is_outcome))
        slope[1:] += RIDGE * values[1:]
        return total + RIDGE / 2 * (values[1:] ** 2).sum(), slope

    start = np.zeros(matrix.shape[1])
    return named(terms, minimize(loss, start, jac=True, method="L-BFGS-B").x)


def matrix_of(terms: Sequence[Terms]) -> Array:
    return np.array([list(each.values()) for each in terms])


def named(terms: Sequence[Terms], values: Array) -> dict[str, float]:
    return {name: rounded(value) for name, value in zip(terms[0], values, strict=True)}


def weighted_quantile(pairs: Sequence[tuple[float, float]], share: float) -> float:
    values, weights = np.array(sorted(pairs)).T
    reached = np.cumsum(weights) / weights.sum()
    return rounded(max(values[np.searchsorted(reached, share)], 0.5))


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
