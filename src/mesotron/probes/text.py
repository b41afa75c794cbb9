"""What completions look like without reading them: their length, cut ends, and repetition.

All from token ids. The names are those that TRL logs where it logs the same thing.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np


def repetition(completion_ids: Sequence[Sequence[int]], n: int = 4) -> dict[str, float]:
    """How much of a completion was said before in it: 1 - distinct n-grams / n-grams.

    Args:
        completion_ids: token ids of each completion, without padding.
        n: length of the n-grams in tokens.

    Returns:
        completions/repetition, the mean over completions, 0 to nearly 1; a completion of fewer
        than n + 1 tokens has nothing to repeat and counts 0.

    Example:
        >>> repetition([[1, 2, 1, 2, 1, 2], [1, 2, 3, 4, 5, 6]], n=2)
        {'completions/repetition': 0.3}
    """
    if n < 1:
        raise ValueError(f"n = {n} is no length of an n-gram: give 1 or more")
    sizes = np.array([len(ids) for ids in completion_ids], dtype=np.int64)
    if not len(sizes) or sizes.max() <= n:
        return {"completions/repetition": 0.0}
    tokens = np.fromiter(chain.from_iterable(completion_ids), np.int64, count=sizes.sum())
    owner = np.repeat(np.arange(len(sizes)), sizes)
    grams, inside = _number_ngrams(tokens, owner, n)
    # n-grams are numbered apart for each completion, so each number has one owner.
    first = np.unique(grams, return_index=True)[1]
    distinct = np.bincount(inside[first], minlength=len(sizes))
    total = np.maximum(sizes - n + 1, 1)
    share = np.where(sizes > n, 1 - distinct / total, 0.0)
    return {"completions/repetition": float(share.mean())}


def _number_ngrams(tokens: np.ndarray, owner: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """A number for each n-gram, the same where completion and tokens are the same, and its owner.

    Exact, where a hash is not: the (k+1)-gram is the pair (number of its k-gram, next token), and
    pairs are numbered anew at each k, so that they fit into 64 bits.
    """
    width = int(tokens.max()) + 1
    grams = owner * width + tokens
    for k in range(1, n):
        grams = np.unique(grams[:-1], return_inverse=True)[1] * width + tokens[k:]
    inside = owner[: len(grams)]
    whole = inside == owner[n - 1 :]  # an n-gram must not reach into the next completion
    return grams[whole], inside[whole]


def lengths(
    completion_ids: Sequence[Sequence[int]], truncated: Sequence[bool] | None = None
) -> dict[str, float]:
    """Lengths in tokens and the share of completions that the limit cut.

    Args:
        completion_ids: token ids of each completion, without padding.
        truncated: whether the limit cut it; left out of the result if None.

    Returns:
        completions/{mean,min,max}_length; with `truncated` completions/clipped_ratio, 0 to 1.

    Example:
        >>> lengths([[5, 6], [7, 8, 9, 10]], [False, True])["completions/clipped_ratio"]
        0.5
    """
    sizes = [len(ids) for ids in completion_ids]
    if not sizes:
        raise ValueError("there are no completions to measure: give at least one")
    out = {
        "completions/mean_length": sum(sizes) / len(sizes),
        "completions/min_length": float(min(sizes)),
        "completions/max_length": float(max(sizes)),
    }
    if truncated is not None:
        out["completions/clipped_ratio"] = sum(map(bool, truncated)) / len(sizes)
    return out
