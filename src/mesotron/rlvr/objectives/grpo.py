"""GRPO: the clipped ratio of PPO with advantages relative to a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesotron.rlvr.objectives import PolicyLoss, objective

if TYPE_CHECKING:
    from mesotron.rlvr.grpo import LossInputs


@objective(
    "grpo",
    about="mean over tokens, then over sequences",
    paper="arXiv 2402.03300 (DeepSeekMath)",
    epsilon=0.2,
    epsilon_high=0.2,
    beta=0.04,
)
def grpo(inputs: LossInputs) -> PolicyLoss:
    values = inputs.weigh(inputs.clipped())
    return PolicyLoss(inputs.mean_over_sequences(values), inputs.clip_metrics())
