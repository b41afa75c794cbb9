"""What is logged of each rollout and of each loss: probes on gathered rewards, facts and tokens.

Pure functions of what the trainer has at hand: none needs a forward pass of its own.

Legend: P prompts, G completions of each; B completions of up to T tokens in a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from mesotron.probes import answer_diversity, group_signal, repetition
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
        >>> import torch
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


def in_groups(items: Sequence[Item], size: int) -> list[list[Item]]:
    """Items in rows of one size; [] for a size of 0 or no items.

    Example:
        >>> in_groups("abcd", 2)
        [['a', 'b'], ['c', 'd']]
    """
    return [list(items[k : k + size]) for k in range(0, len(items), size)] if size else []
