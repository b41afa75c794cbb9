"""Scores with their intervals: Wilson, Student, bootstrap, pass@k and the majority vote."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mesotron.answers.majority import leaders

Z95 = 1.959963984540054  # normal quantile of a two-sided 95% interval
RESAMPLES = 2000
FEW = 20  # a bootstrap of fewer numbers is too narrow


@dataclass(frozen=True)
class Score:
    """A mean over problems with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def wilson(right: int, total: int) -> Score:
    """The share `right / total` with Wilson's interval (1927), which is valid near 0 and 1 too."""
    if not 0 <= right <= total or total == 0:
        raise ValueError(f"{right} right of {total} is not a share of at least one problem")

    share = right / total
    z2 = Z95**2 / total
    middle = (share + z2 / 2) / (1 + z2)
    half = Z95 * math.sqrt(share * (1 - share) / total + z2 / (4 * total)) / (1 + z2)

    # At 0 and 1 the ends equal the share up to rounding.
    low = min(share, max(0.0, middle - half))
    high = max(share, min(1.0, middle + half))
    return Score(share, low, high)


def bootstrap(
    values: Sequence[float], seed: int = 0, *, signed: bool = False, share: bool = False
) -> Score:
    """The mean of one number per problem with a 95% interval.

    Shares of right and wrong have Wilson's, few numbers Student's, others a percentile bootstrap.

    Args:
        values: one number per problem.
        seed: of the bootstrap.
        signed: differences, which may be negative although none of these is.
        share: chances, whose mean lies between 0 and 1.
    """
    x = np.asarray(values, dtype=np.float64)
    mean = float(x.mean())
    if len(set(values)) == 1:
        return of_equal(mean, len(x), signed)

    if set(values) == {0.0, 1.0} and not signed:
        return wilson(int(x.sum()), len(x))

    from scipy import stats  # slow to import

    if len(x) < FEW:
        half = float(stats.t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x)))
        if share:
            return Score(mean, max(mean - half, 0.0), min(mean + half, 1.0))

        return Score(mean, mean - half, mean + half)

    result = stats.bootstrap(
        (x,),
        np.mean,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    low, high = result.confidence_interval
    return Score(mean, float(low), float(high))


def of_equal(value: float, count: int, signed: bool) -> Score:
    """Equal numbers have no spread to go by. All right, all wrong or all alike may still be luck;
    of other numbers nothing is known."""
    chance = wilson(0, count).high
    if value == 1:
        return Score(value, 1 - chance, 1.0)
    if value == -1:
        return Score(value, -1.0, chance - 1)
    if value == 0:
        return Score(value, -chance if signed else 0.0, chance)

    return Score(value, value, value)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased pass@k (arXiv 2107.03374): 1 - C(n - c, k) / C(n, k), n samples, c of them right."""
    all_wrong = math.comb(num_samples - num_right, k) / math.comb(num_samples, k)
    return 1.0 - all_wrong


def majority_right(answers: Sequence[tuple[str | None, bool]]) -> float:
    """Whether the most frequent of (answer, is right) pairs is right; for a tie, the share of
    winners that are."""
    winners, _ = leaders(answer for answer, _ in answers)
    if not winners:
        return 0.0

    is_right = dict(answers)
    return sum(is_right[winner] for winner in winners) / len(winners)


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... and the limit itself: the k for which pass@k is reported."""
    powers = []
    k = 1
    while k < limit:
        powers.append(k)
        k *= 2

    return [*powers, limit]
