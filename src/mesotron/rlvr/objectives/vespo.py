"""VESPO: the log-likelihood, weighted by a smooth function of the whole sequence's ratio."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import TYPE_CHECKING

from mesotron.rlvr.objectives import PolicyLoss, objective

if TYPE_CHECKING:
    from torch import Tensor

    from mesotron.rlvr.grpo import LossInputs

# Bounds of log-ratios.
LOWEST = log(1e-8)
HIGHEST = 20.0


@objective(
    "vespo",
    about="smooth weight of the whole sequence's ratio",
    paper="arXiv 2602.10693",
    weighs_sequences=True,
    options={"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
)
def vespo(inputs: LossInputs, **shape: float) -> PolicyLoss:
    weight = gamma_weight(inputs, **shape)  # [B, 1]
    values = -weight * inputs.A * inputs.logprobs

    # The weight accounts for the sampler already.
    values = replace(inputs, sampler_ratio=None).weigh(values)
    metrics = {"vespo/phi_seq_mean": inputs.masked_mean(weight)}

    return PolicyLoss(inputs.mean_over_update(values), metrics)


def gamma_weight(
    inputs: LossInputs,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Tensor:
    """exp(lambda) w^k exp(-lambda w) for the sequence's ratio w, 1 at w = 1; no gradient."""
    import torch

    d = (inputs.logprobs.detach() - inputs.old_logprobs).clamp(-HIGHEST, HIGHEST)
    log_w = (d * inputs.mask).sum(-1, keepdim=True)
    if inputs.sampler_ratio is not None:
        log_w = log_w + inputs.sampler_ratio.log().clamp(LOWEST, HIGHEST).sum(-1, keepdim=True)

    log_w = log_w.clamp(LOWEST, HIGHEST)
    upward = inputs.A >= 0
    k = torch.where(upward, k_pos, k_neg)
    rate = torch.where(upward, lambda_pos, lambda_neg).clamp(min=1e-4)

    log_phi = rate + k * log_w - rate * log_w.exp()
    return log_phi.exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
