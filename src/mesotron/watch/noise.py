"""The level of a few noisy values, and how large their noise is.

The noise is measured by second differences x - 2y + z, in which neither a level nor a trend shows.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

# In normal noise of deviation 1, |x - 2y + z| has this mean once its largest tenth is left out...
TRIMMED_BEND = 1.611
# ... and the trimmed mean of 5 values has this times the error of their mean; of more, less.
TRIMMED_ERROR = 1.07
TRIM = 0.2  # share of a window at each end
MEDIAN_BEND = 1.652  # median of |x - 2y + z| in normal noise of deviation 1
BEND_VARIANCE = 6  # variance of x - 2y + z: 1 + 4 + 1
# Rows per block and blocks, for noise that lasts longer than one row.
BLOCK = 5
MIN_BLOCKS = 12
LARGEST = 1e150  # larger numbers overflow in comparisons


def trimmed_mean(values: Sequence[float]) -> float:
    """The mean without the highest and the lowest fifth."""
    cut = int(TRIM * len(values))
    if not cut:
        return sum(values) / len(values)

    kept = sorted(values)[cut : len(values) - cut]
    return sum(kept) / len(kept)


def median(values: Sequence[float]) -> float:
    """As statistics.median, in half the time."""
    ordered = sorted(values)
    half = len(values) // 2
    if len(values) % 2:
        return ordered[half]

    return (ordered[half - 1] + ordered[half]) / 2


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of the noise, whatever the level and the trend.

    The largest tenth of the bends is left out, so that a sudden fall does not count; few values get
    a surcharge.
    """
    sizes = sorted(_bends(values))
    if not sizes:
        return 0.0

    num_large = len(sizes) // 10
    kept = sizes[: len(sizes) - num_large]
    surcharge = 1 + 1 / math.sqrt(len(sizes))

    return sum(kept) / len(kept) / TRIMMED_BEND * surcharge


def slow_deviation(values: Sequence[float]) -> float:
    """The same from the means of blocks of rows, times the root of their size.

    It is larger than `deviation` where the noise lasts longer than one row, as with a curriculum.
    It takes the median of the bends, since a fall may be as long as some blocks.
    """
    num = len(values) // BLOCK
    if num < MIN_BLOCKS:
        return 0.0

    last = values[-num * BLOCK :]
    means = []
    for start in range(0, num * BLOCK, BLOCK):
        means.append(sum(last[start : start + BLOCK]) / BLOCK)

    return median(_bends(means)) / MEDIAN_BEND * math.sqrt(BLOCK)


def _bends(values: Sequence[float]) -> list[float]:
    return [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:])]


@lru_cache(maxsize=4096)
def expected_maximum(num: int) -> float:
    """Of so many normal values of deviation 1 (Blom 1958)."""
    if num <= 1:
        return 0.0

    share = (num - 0.375) / (num + 0.25)
    return NormalDist().inv_cdf(share)


def bernoulli_variance(share: float) -> float:
    return max(share * (1 - share), 0.0)  # 0 for what is not a share


def is_finite(value: float) -> bool:
    return math.isfinite(value) and abs(value) < LARGEST
