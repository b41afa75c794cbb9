"""TRL's BNPO: every token of a micro-batch counts the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesotron.rlvr.objectives import PolicyLoss, objective

if TYPE_CHECKING:
    from mesotron.rlvr.grpo import LossInputs


@objective(
    "bnpo",
    about="mean over the tokens of a micro-batch",
    paper="TRL: the token mean of each micro-batch",
    epsilon=0.2,
    epsilon_high=0.2,
)
def bnpo(inputs: LossInputs) -> PolicyLoss:
    values = inputs.weigh(inputs.clipped())
    return PolicyLoss(inputs.mean_over_micro_batch(values), inputs.clip_metrics())
