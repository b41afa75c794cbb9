"""Clip-Cov: DAPO's loss without a few tokens whose update would lower the entropy most.

The covariance of a token is (A - mean A) (log p - mean log p) over the batch: a large one lowers
the entropy of the policy. KL-Cov (kl_cov.py) penalizes such tokens instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesotron.rlvr.objectives import PolicyLoss, objective

if TYPE_CHECKING:
    from torch import Tensor

    from mesotron.rlvr.grpo import LossInputs

COV_RANGE = (1.0, 5.0)  # covariances of tokens that may be left out


@objective(
    "clip_cov",
    about="`dapo`'s without a few tokens of high covariance",
    paper="arXiv 2505.22617",
    trl_loss="dapo",
    epsilon=1.0,
    epsilon_high=1.0,
    cov_share=2e-4,
)
def clip_cov(inputs: LossInputs) -> PolicyLoss:
    """Leaves a share of all tokens out, drawn from those with a covariance in (1, 5).

    At least one token is left out, as in the authors' code.

    References:
        Cui et al., The Entropy Mechanism of Reinforcement Learning, 2025, arXiv 2505.22617.
    """
    import torch

    settings = inputs.settings
    trains = inputs.mask != 0
    ratio = trained_log_ratio(inputs).exp()

    plain = ratio * inputs.A
    clipped = ratio.clamp(1 - settings.epsilon, 1 + settings.epsilon_high) * inputs.A
    is_clipped = clipped < plain

    cov = covariance(inputs)
    candidates = trains & ~is_clipped & (cov > COV_RANGE[0]) & (cov < COV_RANGE[1])
    places = candidates.flatten().nonzero().squeeze(1)
    drawn = torch.randperm(len(places), device=places.device)[: num_treated(inputs)]
    left_out = mark(places[drawn], trains)

    values = torch.min(plain, clipped) * (1 - left_out)
    metrics = inputs.clip_metrics(is_clipped & (inputs.A < 0), is_clipped & (inputs.A > 0))
    metrics["cov/treated"] = inputs.masked_mean(left_out)

    return PolicyLoss(inputs.mean_over_update(inputs.weigh(-values)), metrics)


def trained_log_ratio(inputs: LossInputs) -> Tensor:
    """[B, T], 0 on tokens that do not train."""
    return (inputs.logprobs - inputs.old_logprobs).where(inputs.mask != 0, 0.0)


def covariance(inputs: LossInputs) -> Tensor:
    """[B, T], of advantage and log-probability over the tokens that train."""
    trains = inputs.mask != 0
    A = inputs.A.expand_as(inputs.mask)
    logprobs = inputs.logprobs.detach()

    return (A - A[trains].mean()) * (logprobs - logprobs[trains].mean())


def num_treated(inputs: LossInputs) -> int:
    total = int((inputs.mask != 0).sum())
    return min(max(1, int(inputs.settings.cov_share * total)), total)


def mark(places: Tensor, like: Tensor) -> Tensor:
    """[B, T], 1 at flat places and 0 elsewhere."""
    marks = like.new_zeros(like.numel()).float()
    return marks.index_fill(0, places, 1.0).view(like.shape)
