"""KL-Cov: a penalty on the few tokens whose update would lower the entropy most, and no clip."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesotron.rlvr.objectives import PolicyLoss, objective
from mesotron.rlvr.objectives.clip_cov import covariance, mark, num_treated, trained_log_ratio

if TYPE_CHECKING:
    from mesotron.rlvr.grpo import LossInputs

PENALTY = 1.0


@objective(
    "kl_cov",
    about="the same with a penalty on those tokens instead",
    paper="arXiv 2505.22617",
    trl_loss="dapo",
    cov_share=2e-3,
    one_update="has no effect",  # |log ratio| has no gradient at ratio 1
)
def kl_cov(inputs: LossInputs) -> PolicyLoss:
    """Adds |log ratio| to the share of all tokens with the largest covariance.

    References:
        Cui et al., The Entropy Mechanism of Reinforcement Learning, 2025, arXiv 2505.22617.
    """
    import torch

    trains = inputs.mask != 0
    d = trained_log_ratio(inputs)

    cov = covariance(inputs).where(trains, -torch.inf)
    treated = mark(cov.flatten().topk(num_treated(inputs)).indices, trains)
    values = d.exp() * inputs.A - PENALTY * treated * d.abs()

    nothing = torch.zeros_like(trains)
    metrics = inputs.clip_metrics(nothing, nothing)
    metrics["cov/treated"] = inputs.masked_mean(treated)

    return PolicyLoss(inputs.mean_over_update(inputs.weigh(-values)), metrics)
