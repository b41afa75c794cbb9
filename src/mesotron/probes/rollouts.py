"""A rollout batch: its rewards, answers and tokens, and the policy's entropies and ratios.

GMPO's figure 1 (arXiv 2507.20673) shows why the extremes of the log-ratio matter: they widen long
before the mean moves. Tensors may be on any device; each probe synchronizes once.

A group is the completions of one prompt. Legend: P prompts, G completions of each; B = P G rows of
up to T tokens; `mask` is 1 on their tokens. Logarithms are natural, and every probe of tokens is 0
without any.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

QUARTILES = (
    "entropy/trajectory_q1",
    "entropy/trajectory_q2",
    "entropy/trajectory_q3",
    "entropy/token_q1",
    "entropy/token_q2",
    "entropy/token_q3",
)
EXTREMES = (
    "ratio/log_min",
    "ratio/log_max",
)
CLIPPED = (
    "ratio/clipped_low",
    "ratio/clipped_high",
)
# torch.quantile refuses more elements than this.
QUANTILE_LIMIT = 2**24


# Groups, answers and tokens


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
    table = _scored(rewards)  # [P, G]
    signal = {
        "groups/zero_signal": float(_are_equal(table, tolerance).mean()),
        "groups/spread": float(_spread(table).mean()),
        "groups/unscored": float(1 - table.count() / table.size),
    }
    if right is None:
        return signal

    correct = _table(right, "right").astype(bool)
    if correct.shape != table.shape:
        raise ValueError(f"right has shape {correct.shape}, rewards {table.shape}: they must match")

    is_all_right = correct.all(axis=1)  # [P]
    is_all_wrong = ~correct.any(axis=1)
    is_mixed = ~(is_all_right | is_all_wrong)

    return signal | {
        "groups/all_right": float(is_all_right.mean()),
        "groups/all_wrong": float(is_all_wrong.mean()),
        "groups/mixed": float(is_mixed.mean()),
    }


def group_spreads(rewards: Any, tolerance: float = 1e-6) -> np.ndarray:
    """[P] standard deviations of the rewards [P, G], exactly 0 where a group has no signal.

    Example:
        >>> group_spreads([[1.0, 0.0], [0.1, 0.1 + 1e-8]]).tolist()
        [0.5, 0.0]
    """
    table = _scored(rewards)  # [P, G]
    tiny = np.finfo(np.float64).tiny
    spread = np.maximum(_spread(table), tiny)  # a square may underflow; a signal must not become 0

    return np.where(_are_equal(table, tolerance), 0.0, spread)


def _scored(rewards: Any) -> np.ma.MaskedArray:
    """[P, G], masked where a completion was not scored."""
    table = _table(rewards, "rewards").astype(np.float64)
    return np.ma.masked_array(table, np.isnan(table))


def _spread(table: np.ma.MaskedArray) -> np.ndarray:
    """[P] standard deviations; `table.std` takes infinity for missing."""
    count = np.maximum(table.count(axis=1), 1)
    mean = table.filled(0).sum(axis=1) / count

    deviations = (table - mean[:, None]).filled(0)  # [P, G]
    variance = (deviations**2).sum(axis=1) / count
    return np.sqrt(variance)


def _are_equal(table: np.ma.MaskedArray, tolerance: float) -> np.ndarray:
    """[P], whether the rewards of a group are equal."""
    width = table.max(axis=1) - table.min(axis=1)
    return width.filled(0) <= tolerance


def _table(values: Any, name: str) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().cpu().float()

    table = np.asarray(values)
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
    votes: defaultdict[str, float] = defaultdict(float)
    num_answered = 0
    num_distinct = 0
    for group in groups:
        counts = Counter(answer for answer in group if answer is not None)
        if not counts:
            continue

        num_answered += 1
        num_distinct += len(counts)
        for answer, number in counts.items():
            votes[answer] += number / counts.total()

    num_prompts = max(num_answered, 1)
    return {
        "answers/distinct_in_group": num_distinct / num_prompts,
        "answers/top_share": max(votes.values(), default=0.0) / num_prompts,
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

    sizes = np.array([len(ids) for ids in completion_ids], dtype=np.int64)  # [B]
    if not len(sizes) or sizes.max() <= n:
        return {"completions/repetition": 0.0}

    tokens = np.fromiter(chain.from_iterable(completion_ids), np.int64, count=sizes.sum())
    owner = np.repeat(np.arange(len(sizes)), sizes)  # the completion of each token
    grams = number_ngrams(tokens, owner, n)

    # An n-gram must not reach into the next completion.
    first_owner = owner[: len(grams)]
    is_whole = first_owner == owner[n - 1 :]
    grams = grams[is_whole]
    first_owner = first_owner[is_whole]

    first = np.unique(grams, return_index=True)[1]  # each number belongs to one completion
    num_distinct = np.bincount(first_owner[first], minlength=len(sizes))

    num_grams = np.maximum(sizes - n + 1, 1)
    shares = np.where(sizes > n, 1 - num_distinct / num_grams, 0.0)  # [B]
    return {"completions/repetition": float(shares.mean())}


def number_ngrams(tokens: np.ndarray, owner: np.ndarray, n: int) -> np.ndarray:
    """The same number for equal n-grams of one completion, exactly, without a hash.

    A (k+1)-gram is the pair (number of its k-gram, next token), renumbered at each k so that it
    fits into 64 bits.
    """
    width = int(tokens.max()) + 1
    grams = owner * width + tokens
    for k in range(1, n):
        numbers = np.unique(grams[:-1], return_inverse=True)[1]
        grams = numbers * width + tokens[k:]

    return grams


def lengths(
    completion_ids: Sequence[Sequence[int]], truncated: Sequence[bool] | None = None
) -> dict[str, float]:
    """completions/{mean,min,max}_length in tokens and the truncated share, clipped_ratio."""
    sizes = [len(ids) for ids in completion_ids]
    if not sizes:
        raise ValueError("there are no completions: give at least one")

    named = {
        "completions/mean_length": sum(sizes) / len(sizes),
        "completions/min_length": float(min(sizes)),
        "completions/max_length": float(max(sizes)),
    }
    if truncated is not None:
        num_truncated = sum(map(bool, truncated))
        named["completions/clipped_ratio"] = num_truncated / len(sizes)

    return named


# The policy


def trajectory_entropy(entropies: Tensor, mask: Tensor) -> Tensor:
    """[B] mean entropy of each completion in float32, from [B, T] in nats.

    Example:
        >>> trajectory_entropy(torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[1, 1, 0]]))
        tensor([2.])
    """
    inside = _inside(entropies, mask)  # [B, T]
    counted = torch.where(inside, entropies.float(), 0.0)
    num_tokens = inside.sum(dim=1).clamp_min(1)

    return counted.sum(dim=1) / num_tokens


def entropy_quartiles(entropies: Tensor, mask: Tensor) -> dict[str, float]:
    """Quartiles of the entropy over tokens and over completions.

    A policy that is certain of nearly every token and lost at a few has the mean of an even one.

    Returns:
        entropy/trajectory_q1, _q2, _q3 over completions with tokens and entropy/token_q1, _q2, _q3
        over tokens (every k-th one where there are more than 16 million).
    """
    inside = _inside(entropies, mask)  # [B, T]
    tokens = entropies[inside].float()  # [number of tokens]
    if not tokens.numel():
        return dict.fromkeys(QUARTILES, 0.0)

    has_tokens = inside.any(dim=1)
    trajectories = trajectory_entropy(entropies, mask)[has_tokens]
    stride = math.ceil(tokens.numel() / QUANTILE_LIMIT)

    levels = torch.tensor((0.25, 0.5, 0.75), device=tokens.device)
    of_trajectories = torch.quantile(trajectories, levels)
    of_tokens = torch.quantile(tokens[::stride], levels)

    return _named(QUARTILES, torch.cat([of_trajectories, of_tokens]))


def log_ratio_extremes(log_ratio: Tensor, mask: Tensor) -> dict[str, float]:
    """ratio/log_min and ratio/log_max of log pi_new - log pi_old [B, T] over tokens.

    Example:
        >>> log_ratio_extremes(torch.tensor([[0.25, -0.5, 9.0]]), torch.tensor([[1, 1, 0]]))
        {'ratio/log_min': -0.5, 'ratio/log_max': 0.25}
    """
    inside = _inside(log_ratio, mask)  # [B, T]
    values = log_ratio.float()
    low = torch.where(inside, values, torch.inf).amin()
    high = torch.where(inside, values, -torch.inf).amax()

    extremes = torch.stack([low, high])
    extremes = torch.where(inside.any(), extremes, 0.0)
    return _named(EXTREMES, extremes)


def clip_fractions(
    log_ratio: Tensor,
    mask: Tensor,
    advantages: Tensor,
    low: float,
    high: float,
) -> dict[str, float]:
    """Shares of tokens without gradient because of the clip.

    Their ratio is above the window and the advantage positive, or below it and negative.

    Args:
        log_ratio: [B, T], log pi_new - log pi_old of the sampled tokens.
        mask: [B, T], 1 on tokens that train.
        advantages: [B] or [B, T].
        low, high: the window in log space, log(1 -+ epsilon) for PPO's clip.

    Example:
        >>> ratio = torch.tensor([[0.5, -0.5]])
        >>> clip_fractions(ratio, torch.ones(1, 2), torch.tensor([1.0]), -0.2, 0.2)
        {'ratio/clipped_low': 0.0, 'ratio/clipped_high': 0.5}
    """
    inside = _inside(log_ratio, mask)  # [B, T]
    if advantages.dim() == 1:
        advantages = advantages[:, None]  # [B, 1]

    is_below = (log_ratio < low) & (advantages < 0)
    is_above = (log_ratio > high) & (advantages > 0)
    clipped = [
        (inside & is_below).sum(),
        (inside & is_above).sum(),
    ]

    num_tokens = inside.sum().clamp_min(1)
    shares = torch.stack(clipped) / num_tokens
    return _named(CLIPPED, shares)


def kl_to_start(logprobs: Tensor, start_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """kl/start: KL divergence from the model that the run started with, in nats per token.

    Schulman's k3 estimator exp(d) - 1 - d with d = log start - log pi, [B, T], on tokens that pi
    sampled: unbiased and never negative.
    """
    inside = _inside(logprobs, mask)  # [B, T]
    d = start_logprobs.float() - logprobs.float()
    d = torch.where(inside, d, 0.0)

    total = (d.expm1() - d).sum()
    num_tokens = inside.sum().clamp_min(1)
    return {"kl/start": float(total / num_tokens)}


def _named(names: Sequence[str], values: Tensor) -> dict[str, float]:
    """The numbers of a tensor by name; this waits for the device."""
    return dict(zip(names, values.tolist(), strict=True))


def _inside(values: Tensor, mask: Tensor) -> Tensor:
    """[B, T], whether a token counts."""
    if values.shape != mask.shape:
        raise ValueError(f"mask {tuple(mask.shape)} and values {tuple(values.shape)} must match")
    return mask != 0
