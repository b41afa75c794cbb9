"""Rewards, answers and tokens of a rollout batch.

A group is the completions of one prompt. Legend: P prompts, G completions of each.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor


def group_signal(
    rewards: Any, tolerance: float = 1e-6, right: Any | None = None
) -> dict[str, float]:
    """Shares of groups with and without a signal, and the mean spread within a group.

    Where all rewards of a group are equal its advantages are zero (arXiv 2605.21125). A group of
    correct answers may differ in a format reward, so `right` splits the groups by their answers.

    Args:
        rewards: [P, G], NaN where a completion was not scored.
        tolerance: rewards closer than this count as equal: sums of floats rarely are.
        right: [P, G] booleans, whether the answer is correct.

    Returns:
        groups/zero_signal (share of groups with equal rewards, or fewer than two), groups/spread
        (mean standard deviation), groups/unscored (share of completions without a reward); with
        `right` also groups/all_right, groups/all_wrong and groups/mixed, which sum to 1.

    Example:
        >>> found = group_signal([[1.0, 0.0], [0.5, 0.5]], right=[[True, False], [False, False]])
        >>> found["groups/zero_signal"], found["groups/mixed"], found["groups/all_wrong"]
        (0.5, 0.5, 0.5)
    """
    table = _scored(rewards)
    out = {
        "groups/zero_signal": float(_are_equal(table, tolerance).mean()),
        "groups/spread": float(_spread(table).mean()),
        "groups/unscored": float(1 - table.count() / table.size),
    }

    if right is None:
        return out

    correct = _table(right, "right").astype(bool)
    if correct.shape != table.shape:
        raise ValueError(f"right has shape {correct.shape}, rewards {table.shape}: they must match")

    every = correct.all(axis=1)
    some = correct.any(axis=1)

    return out | {
        "groups/all_right": float(every.mean()),
        "groups/all_wrong": float((~some).mean()),
        "groups/mixed": float((some & ~every).mean()),
    }


def group_spreads(rewards: Any, tolerance: float = 1e-6) -> np.ndarray:
    """[P] standard deviations of the rewards [P, G], exactly 0 where a group has no signal.

    Example:
        >>> group_spreads([[1.0, 0.0], [0.1, 0.1 + 1e-8]]).tolist()
        [0.5, 0.0]
    """
    table = _scored(rewards)
    # A square may underflow; a signal must not become 0.
    spread = np.maximum(_spread(table), np.finfo(np.float64).tiny)
    return np.where(_are_equal(table, tolerance), 0.0, spread)


def _scored(rewards: Any) -> np.ma.MaskedArray:
    table = _table(rewards, "rewards").astype(np.float64)
    return np.ma.masked_array(table, np.isnan(table))


def _spread(table: np.ma.MaskedArray) -> np.ndarray:
    count = np.maximum(table.count(axis=1), 1)  # `table.std` takes infinity for missing
    mean = table.filled(0).sum(axis=1) / count
    return np.sqrt(((table - mean[:, None]).filled(0) ** 2).sum(axis=1) / count)


def _are_equal(table: np.ma.MaskedArray, tolerance: float) -> np.ndarray:
    return (table.max(axis=1) - table.min(axis=1)).filled(0) <= tolerance


def _table(values: Any, name: str) -> np.ndarray:
    table = np.asarray(values.detach().cpu().float() if isinstance(values, Tensor) else values)
    if table.ndim != 2 or table.size == 0:
        raise ValueError(f"{name} has shape {table.shape}: give [prompts, completions]")
    return table


def answer_diversity(groups: Sequence[Sequence[str | None]]) -> dict[str, float]:
    """Distinct answers within a group, and the share of the most common answer over all prompts.

    One answer for every prompt is how self-rewarded training ends (SRT, arXiv 2505.21444).

    Args:
        groups: the canonical answers to each prompt, None where none was found. Each prompt has
            one vote, divided among its answers.

    Returns:
        answers/distinct_in_group (mean over prompts with an answer) and answers/top_share (1 if
        there is one answer for all); 0 if no answer was found.
    """
    counts = [Counter(answer for answer in group if answer is not None) for group in groups]
    counts = [count for count in counts if count]

    votes: defaultdict[str, float] = defaultdict(float)
    for count in counts:
        for answer, number in count.items():
            votes[answer] += number / count.total()

    prompts = max(len(counts), 1)
    return {
        "answers/distinct_in_group": sum(map(len, counts)) / prompts,
        "answers/top_share": max(votes.values(), default=0.0) / prompts,
    }


def repetition(completion_ids: Sequence[Sequence[int]], n: int = 4) -> dict[str, float]:
    """How much of a completion repeats itself: 1 - distinct n-grams / n-grams.

    Args:
        completion_ids: token ids of each completion, without padding; at most n tokens count 0.
        n: tokens per n-gram.

    Example:
        >>> repetition([[1, 2, 1, 2, 1, 2], [1, 2, 3, 4, 5, 6]], n=2)
        {'completions/repetition': 0.3}
    """
    if n < 1:
        raise ValueError(f"n = {n} must be at least 1")

    sizes = np.array([len(ids) for ids in completion_ids], dtype=np.int64)
    if not len(sizes) or sizes.max() <= n:
        return {"completions/repetition": 0.0}

    tokens = np.fromiter(chain.from_iterable(completion_ids), np.int64, count=sizes.sum())
    owner = np.repeat(np.arange(len(sizes)), sizes)

    # Number the n-grams exactly, without a hash: a (k+1)-gram is the pair (number of its k-gram,
    # next token), renumbered at each k so that it fits into 64 bits.
    width = int(tokens.max()) + 1
    grams = owner * width + tokens
    for k in range(1, n):
        grams = np.unique(grams[:-1], return_inverse=True)[1] * width + tokens[k:]

    inside = owner[: len(grams)]
    whole = inside == owner[n - 1 :]  # an n-gram must not reach into the next completion
    grams = grams[whole]
    inside = inside[whole]
    first = np.unique(grams, return_index=True)[1]  # each number belongs to one completion
    distinct = np.bincount(inside[first], minlength=len(sizes))
    share = np.where(sizes > n, 1 - distinct / np.maximum(sizes - n + 1, 1), 0.0)

    return {"completions/repetition": float(share.mean())}


def lengths(
    completion_ids: Sequence[Sequence[int]], truncated: Sequence[bool] | None = None
) -> dict[str, float]:
    """completions/{mean,min,max}_length in tokens and the truncated share, clipped_ratio."""
    if not (sizes := [len(ids) for ids in completion_ids]):
        raise ValueError("there are no completions: give at least one")

    out = {
        "completions/mean_length": sum(sizes) / len(sizes),
        "completions/min_length": float(min(sizes)),
        "completions/max_length": float(max(sizes)),
    }
    if truncated is not None:
        out["completions/clipped_ratio"] = sum(map(bool, truncated)) / len(sizes)

    return out
