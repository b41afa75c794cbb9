"""Majority vote: GRPO with the most frequent answer of a group as its label."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesotron.rlvr.objectives import PolicyLoss, objective
from mesotron.rlvr.objectives.grpo import grpo

if TYPE_CHECKING:
    from mesotron.rlvr.grpo import LossInputs


@objective(
    "vote",
    about="`grpo`'s or `gmpo`'s; majority-vote pseudo-labels",
    paper="arXiv 2504.16084 (TTRL), 2505.21444 (SRT)",
    trl_loss="grpo",
    epsilon=0.2,
    epsilon_high=0.2,
    beta=0.001,
    voters=("policy",),
)
def vote(inputs: LossInputs) -> PolicyLoss:
    return grpo(inputs)
