"""Scores of sampled answers and their intervals: pass@k, majority@k, Wilson and bootstrap.

pass@k is the unbiased estimate of Chen et al., Evaluating Large Language Models Trained on Code
(2021), arXiv:2107.03374. Pure functions of numbers; nothing here knows a model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# The normal quantile of a two-sided 95 % interval.
Z95 = 1.959963984540054
RESAMPLES = 2000


@dataclass(frozen=True)
class Score:
    """A share of problems with its 95 % interval over problems."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def wilson(right: int, total: int) -> Score:
    """The share `right / total` with Wilson's interval, which holds near 0 and 1 too.

    Example:
        >>> print(wilson(0, 10))
        0.000 [0.000, 0.278]

    References:
        Wilson, Probable inference, the law of succession, and statistical inference (1927).
    """
    if not 0 <= right <= total or total == 0:
        raise ValueError(
            f"{right} right of {total} is no share: there must be at least one problem"
        )
    share, z2 = right / total, Z95**2 / total
    middle = (share + z2 / 2) / (1 + z2)
    half = Z95 * math.sqrt(share * (1 - share) / total + z2 / (4 * total)) / (1 + z2)
    # At 0 and 1 the ends meet the share but for rounding.
    return Score(share, min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half)))


def bootstrap(values: Sequence[float], seed: int = 0) -> Score:
    """The mean over problems with a percentile bootstrap interval, problems drawn with replacement.

    Args:
        values: one number for each problem.
        seed: of the resampling.

    Example:
        >>> print(bootstrap([1.0, 1.0, 1.0]))
        1.000 [1.000, 1.000]
    """
    if not values:
        raise ValueError("there is no problem to take the mean over")
    x = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(len(x), size=(RESAMPLES, len(x)))
    low, high = np.quantile(x[picks].mean(axis=1), [0.025, 0.975])
    return Score(float(x.mean()), float(low), float(high))


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """The chance that k of these samples, drawn without replacement, hold a right one.

    1 - C(n - c, k) / C(n, k), the unbiased estimate from n samples of which c are right.

    Example:
        >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 1, 4)
        (0.25, 0.5, 1.0)
    """
    if not 1 <= k <= num_samples or not 0 <= num_right <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples with {num_right} right is not defined")
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority_right(answers: Sequence[str | None], right: Sequence[bool]) -> float:
    """Whether the answer given most often is right; a tie counts by the share of it that is.

    Samples without an answer do not vote; with no vote at all the result is 0.

    Args:
        answers: canonical answers of one problem's samples, None where there is none.
        right: whether each sample is right.

    Example:
        >>> majority_right(["7", "7", "9", None], [True, True, False, False])
        1.0
        >>> majority_right(["7", "9"], [True, False])
        0.5
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    verdict = {a: ok for a, ok in zip(answers, right, strict=True) if a is not None}
    winners = [verdict[answer] for answer, count in votes.items() if count == most]
    return sum(winners) / len(winners)


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... and the limit itself: the k for which pass@k is shown."""
    return sorted({2**i for i in range(limit.bit_length()) if 2**i <= limit} | {limit})
