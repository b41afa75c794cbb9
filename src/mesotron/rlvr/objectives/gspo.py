"""GSPO: GRPO with one ratio per sequence, the geometric mean of its tokens'."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesotron.rlvr.objectives import PolicyLoss, objective
from mesotron.rlvr.objectives.grpo import grpo

if TYPE_CHECKING:
    from mesotron.rlvr.grpo import LossInputs


@objective(
    "gspo",
    about="one ratio per sequence",
    paper="arXiv 2507.18071",
    trl_loss="grpo",
    epsilon=3e-4,
    epsilon_high=4e-4,
    level="sequence",
    one_update="equals grpo",
)
def gspo(inputs: LossInputs) -> PolicyLoss:
    return grpo(inputs)
