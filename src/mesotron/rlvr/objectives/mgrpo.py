"""M-GRPO: policy and anchor, a slow average of it, vote together on the label."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesotron.rlvr.objectives import PolicyLoss, objective
from mesotron.rlvr.objectives.grpo import grpo

if TYPE_CHECKING:
    from mesotron.rlvr.grpo import LossInputs


@objective(
    "mgrpo",
    about="the same; policy and momentum policy vote",
    paper="arXiv 2512.13070",
    trl_loss="grpo",
    epsilon=0.2,
    epsilon_high=0.2,
    beta=0.005,
    voters=("policy", "anchor"),
)
def mgrpo(inputs: LossInputs) -> PolicyLoss:
    return grpo(inputs)
