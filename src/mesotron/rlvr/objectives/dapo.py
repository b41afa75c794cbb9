"""DAPO: a wider upper clip, and every token of the update counts the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesotron.rlvr.objectives import PolicyLoss, objective

if TYPE_CHECKING:
    from mesotron.rlvr.grpo import LossInputs


@objective(
    "dapo",
    about="mean over all tokens of the batch",
    paper="arXiv 2503.14476",
    epsilon=0.2,
    epsilon_high=0.28,
)
def dapo(inputs: LossInputs) -> PolicyLoss:
    values = inputs.weigh(inputs.clipped())
    return PolicyLoss(inputs.mean_over_update(values), inputs.clip_metrics())
