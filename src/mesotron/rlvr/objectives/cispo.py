"""CISPO: a capped ratio without gradient times the log-likelihood, so no token is left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesotron.rlvr.objectives import PolicyLoss, objective

if TYPE_CHECKING:
    from mesotron.rlvr.grpo import LossInputs


@objective(
    "cispo",
    about="capped ratio times log-likelihood",
    paper="arXiv 2506.13585; cap of arXiv 2510.13786",
    epsilon_high=5.0,
)
def cispo(inputs: LossInputs) -> PolicyLoss:
    cap = inputs.settings.epsilon_high
    weights = inputs.ratio.clamp(max=cap).detach()
    values = inputs.weigh(-weights * inputs.A * inputs.logprobs)

    is_capped = (inputs.ratio > cap) & (inputs.A > 0)
    metrics = {"cispo_clip_ratio": inputs.masked_mean(is_capped.float())}

    return PolicyLoss(inputs.mean_over_update(values), metrics)
