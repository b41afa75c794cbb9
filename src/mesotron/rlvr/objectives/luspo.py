"""LUSPO: GSPO whose sequences are weighted by their length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesotron.rlvr.objectives import PolicyLoss, objective

if TYPE_CHECKING:
    from mesotron.rlvr.grpo import LossInputs


@objective(
    "luspo",
    about="`gspo`'s, each sequence weighted by its length",
    paper="arXiv 2602.05261",
    epsilon=0.002,
    epsilon_high=0.0025,
    level="sequence",
)
def luspo(inputs: LossInputs) -> PolicyLoss:
    values = inputs.weigh(inputs.clipped())
    return PolicyLoss(inputs.sum_over_sequences(values), inputs.clip_metrics())
