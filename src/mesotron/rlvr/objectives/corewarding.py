"""Co-rewarding-II: the anchor, a slow average of the policy, labels alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesotron.rlvr.objectives import PolicyLoss, objective
from mesotron.rlvr.objectives.grpo import grpo

if TYPE_CHECKING:
    from mesotron.rlvr.grpo import LossInputs


@objective(
    "corewarding",
    about="the same; the momentum policy votes alone",
    paper="arXiv 2508.00410, version II",
    trl_loss="grpo",
    epsilon=0.2,
    epsilon_high=0.2,
    beta=0.001,
    voters=("anchor",),
    momentum_schedule="cosine",
)
def corewarding(inputs: LossInputs) -> PolicyLoss:
    return grpo(inputs)
