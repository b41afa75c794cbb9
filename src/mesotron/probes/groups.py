"""What the groups of a rollout batch can teach: how many have rewards that differ at all.

A group is the completions of one prompt. Where all its rewards are alike, its advantages are zero
and it teaches nothing (the advantage collapse of arXiv 2605.21125). The comparison has a
tolerance: sums of floats are rarely equal to the last bit.

Legend: P prompts, G completions of each.
"""

from typing import Any

import numpy as np
from torch import Tensor


def group_signal(
    rewards: Any, tolerance: float = 1e-6, right: Any | None = None
) -> dict[str, float]:
    """Shares of groups with and without a signal, and the mean spread within a group.

    A completion without a reward (NaN) is not counted; a group with fewer than two rewards has no
    signal. `right` splits the groups by their answers, which rewards alone cannot tell: a group
    whose completions are all right may still differ in a format or length reward.

    Args:
        rewards: [P, G], NaN where a completion was not scored.
        tolerance: rewards closer than this are alike, in the reward's unit.
        right: [P, G] booleans, whether the answer is right; the split is left out if None.

    Returns:
        groups/zero_signal (share of groups whose rewards are alike), groups/spread (mean over
        groups of the standard deviation), groups/unscored (share of completions without a reward);
        with `right` also groups/all_right, groups/all_wrong and groups/mixed, which sum to 1.

    Example:
        >>> found = group_signal([[1.0, 0.0], [0.5, 0.5]], right=[[True, False], [False, False]])
        >>> found["groups/zero_signal"], found["groups/mixed"], found["groups/all_wrong"]
        (0.5, 0.5, 0.5)

    References:
        Advantage collapse in group-relative policy optimization, 2026, arXiv 2605.21125.
    """
    table = _table(rewards, "rewards").astype(np.float64)
    scored = ~np.isnan(table)
    out = {
        "groups/zero_signal": float(_alike(table, scored, tolerance).mean()),
        "groups/spread": float(_spread(table, scored).mean()),
        "groups/unscored": float(1 - scored.mean()),
    }
    return out if right is None else out | _split(_table(right, "right"), table.shape)


def group_spreads(rewards: Any, tolerance: float = 1e-6) -> np.ndarray:
    """How much the rewards of each group differ.

    Args:
        rewards: [P, G], NaN where a completion was not scored.
        tolerance: rewards closer than this are alike.

    Returns:
        [P] standard deviations, 0 exactly where a group has no signal.

    Example:
        >>> group_spreads([[1.0, 0.0], [0.1, 0.1 + 1e-8]]).tolist()
        [0.5, 0.0]
    """
    table = _table(rewards, "rewards").astype(np.float64)
    scored = ~np.isnan(table)
    # A square may vanish, a signal does not.
    spread = np.maximum(_spread(table, scored), np.finfo(np.float64).tiny)
    return np.where(_alike(table, scored, tolerance), 0.0, spread)


def _alike(table: np.ndarray, scored: np.ndarray, tolerance: float) -> np.ndarray:
    """Which groups have rewards that are all alike, [P]."""
    low = np.where(scored, table, np.inf).min(axis=1)
    high = np.where(scored, table, -np.inf).max(axis=1)
    # With no reward at all, -inf - inf is -inf: alike, as it should be.
    return high - low <= tolerance


def _spread(table: np.ndarray, scored: np.ndarray) -> np.ndarray:
    """Standard deviation of each group's rewards, [P]; 0 where there are fewer than two."""
    count = np.maximum(scored.sum(axis=1), 1)
    values = np.where(scored, table, 0.0)
    mean = values.sum(axis=1) / count
    away = np.where(scored, values - mean[:, None], 0.0)
    return np.sqrt((away**2).sum(axis=1) / count)


def _split(right: np.ndarray, shape: tuple[int, ...]) -> dict[str, float]:
    if right.shape != shape:
        raise ValueError(f"right has shape {right.shape}, rewards {shape}: give one for each")
    right = right.astype(bool)
    every, some = right.all(axis=1), right.any(axis=1)
    return {
        "groups/all_right": float(every.mean()),
        "groups/all_wrong": float((~some).mean()),
        "groups/mixed": float((some & ~every).mean()),
    }


def _table(values: Any, name: str) -> np.ndarray:
    """[P, G] as numpy, from nested lists, numpy or a tensor on any device."""
    array = values.detach().cpu().float().numpy() if isinstance(values, Tensor) else values
    table = np.asarray(array)
    if table.ndim != 2 or table.size == 0:
        raise ValueError(
            f"{name} has shape {table.shape}: give one row for each prompt and one column for "
            "each completion"
        )
    return table
