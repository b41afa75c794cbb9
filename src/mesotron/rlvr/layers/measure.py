"""What is logged of each rollout and of each loss: probes on gathered rewards, facts and tokens.

Pure functions of what the trainer has at hand: none needs a forward pass of its own.

Legend: P prompts, G completions of each; B completions of up to T tokens in a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from mesotron.probes import answer_diversity, group_signal, repetition, trajectory_entropy
from mesotron.rlvr.answers.facts import Facts, summarise

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A rollout batch as all processes see it together, group by group.

    Args:
        rewards: [P, G], what the completions earned; NaN where one was left out.
        facts: P G of them; empty without a judge.
        tolerance: rewards closer than this are alike.
    """

    rewards: Tensor
    facts: Sequence[Facts]
    tolerance: float


def measure_rollout(scored: Scored) -> dict[str, float]:
    """groups/*, and with facts also facts/* and answers/*.

    Example:
        >>> rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
        >>> scored = Scored(rewards=rewards, facts=[], tolerance=1e-6)
        >>> measure_rollout(scored)["groups/zero_signal"]
        0.5
    """
    facts, size = scored.facts, scored.rewards.shape[1]
    if not facts:
        return group_signal(scored.rewards, scored.tolerance)
    graded = any(fact.graded for fact in facts)
    right = in_groups([fact.correct for fact in facts], size) if graded else None
    answers = in_groups([fact.answer for fact in facts], size)
    found = group_signal(scored.rewards, scored.tolerance, right)
    return found | summarise(facts) | answer_diversity(answers)


def measure_repetition(completion_ids: Sequence[Sequence[int]]) -> float:
    """completions/repetition of one process's completions."""
    return repetition(completion_ids)["completions/repetition"]


def trajectory_figures(entropies: Tensor, log_ratio: Tensor | None, mask: Tensor) -> Tensor:
    """Entropy and extreme log-ratios of each completion, for `measure_policy`.

    Args:
        entropies: [B, T] in nats.
        log_ratio: [B, T] of the new to the old policy; None where both are the same.
        mask: [B, T], 1 on tokens that train.

    Returns:
        [B, 3]: mean entropy, smallest and largest log-ratio; NaN for completions without tokens.
    """
    inside = mask != 0
    H = trajectory_entropy(entropies, mask)
    if log_ratio is None:
        low = high = torch.zeros_like(H)
    else:
        low = torch.where(inside, log_ratio.float(), torch.inf).amin(dim=1)
        high = torch.where(inside, log_ratio.float(), -torch.inf).amax(dim=1)
    figures = torch.stack([H, low, high], dim=1)
    return torch.where(inside.any(dim=1, keepdim=True), figures, torch.nan)


def measure_policy(figures: Tensor) -> dict[str, float]:
    """entropy/trajectory_q1 to _q3 and ratio/log_min, ratio/log_max.

    Args:
        figures: [any, 3] from `trajectory_figures`, of all processes.

    Returns:
        Five numbers; none if no completion has tokens.

    Example:
        >>> measure_policy(torch.tensor([[1.0, -0.5, 0.25], [3.0, 0.0, 0.5]]))["ratio/log_max"]
        0.5
    """
    figures = figures[~figures[:, 0].isnan()]
    if not len(figures):
        return {}
    H, low, high = figures.unbind(dim=1)
    quarters = torch.quantile(H, torch.tensor([0.25, 0.5, 0.75], device=H.device))
    found = torch.cat([quarters, low.min()[None], high.max()[None]]).tolist()
    names = [f"entropy/trajectory_q{k}" for k in (1, 2, 3)] + ["ratio/log_min", "ratio/log_max"]
    return dict(zip(names, found, strict=True))


def in_groups(items: Sequence[Item], size: int) -> list[list[Item]]:
    """Items in rows of one size; [] for a size of 0 or no items.

    Example:
        >>> in_groups("abcd", 2)
        [['a', 'b'], ['c', 'd']]
    """
    return [list(items[k : k + size]) for k in range(0, len(items), size)] if size else []
