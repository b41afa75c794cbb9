"""Dr. GRPO: neither lengths nor the spread of rewards divide, so neither is favored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesotron.rlvr.objectives import PolicyLoss, objective

if TYPE_CHECKING:
    from mesotron.rlvr.grpo import LossInputs


@objective(
    "dr_grpo",
    about="token sum over a constant length",
    paper="arXiv 2503.20783",
    epsilon=0.2,
    epsilon_high=0.2,
    scale_rewards="none",
)
def dr_grpo(inputs: LossInputs) -> PolicyLoss:
    values = inputs.weigh(inputs.clipped())
    return PolicyLoss(inputs.sum_over_length(values), inputs.clip_metrics())
