"""GMPO: the geometric mean of the token ratios instead of the arithmetic one (arXiv 2507.20673).

One outlier moves a geometric mean little, so the clip may be wide. The policy term alone: the KL
term, the entropy bonus and the router loss are the trainer's. It departs from GRPO only where
several updates are made with one rollout: at ratio 1 the gradients are the same.

Legend: B sequences of up to T tokens; d log-ratio of the new to the old policy; A advantage.
"""

from dataclasses import dataclass
from math import log

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What the policy term of a loss is computed from.

    Args:
        logprobs: [B, T], the policy's log-probabilities of the sampled tokens, with gradient.
        old_logprobs: [B, T], those of the policy that the batch was sampled with.
        advantages: [B].
        mask: [B, T], 1 on tokens that train; rows may be all 0.
        epsilon: lower clip width in log space: 0.4 lets the ratio fall to exp(-0.4).
        epsilon_high: upper clip width in log space.
        delta: largest ratio of any token (two-sided clipping, in ratio space); None is no limit.
        token_mask: [B, T], tokens that give a gradient; the others count as ratio 1. None is all.
        sequence_weight: [B], factor of each sequence (rollout correction, off-policy mask).
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    epsilon: float = 0.4
    epsilon_high: float = 0.4
    delta: float | None = None
    token_mask: Tensor | None = None
    sequence_weight: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LossOutputs:
    """A loss and what it saw.

    Args:
        loss: scalar, the mean over the B sequences.
        low_clipped: [B, T] booleans, tokens clipped from below.
        high_clipped: [B, T] booleans, tokens clipped from above.
    """

    loss: Tensor
    low_clipped: Tensor
    high_clipped: Tensor


def gmpo_loss(batch: LossInputs) -> LossOutputs:
    """The mean over sequences of -A exp(mean_t d'_t), with d' clipped on the side that A pushes to.

    d'_t = min(d_t, epsilon_high) where A > 0 and max(d_t, -epsilon) where A < 0. The number of
    tokens in the mean does not shrink where tokens clip: they stay in the weight and give no
    gradient.

    Args:
        batch: see `LossInputs`.

    Returns:
        The loss and which tokens were clipped.

    Example:
        >>> one, zero = torch.ones(1, 2), torch.zeros(1, 2)
        >>> d = torch.tensor([[0.6, 0.2]])
        >>> batch = LossInputs(logprobs=d, old_logprobs=zero, advantages=one[:, 0], mask=one)
        >>> round(gmpo_loss(batch).loss.item(), 4)  # -exp((0.4 + 0.2) / 2)
        -1.3499

    References:
        Zhao et al., Geometric-Mean Policy Optimization, 2025, arXiv 2507.20673.
    """
    A, mask = batch.advantages, batch.mask
    d = torch.where(mask != 0, batch.logprobs - batch.old_logprobs, 0.0)
    upward = (A > 0)[:, None]
    low_clipped = ~upward & (d < -batch.epsilon) & (A < 0)[:, None]
    high_clipped = upward & (d > batch.epsilon_high)
    if batch.delta is not None:
        d = d.clamp(max=log(batch.delta))
    clipped = torch.where(upward, d.clamp(max=batch.epsilon_high), d.clamp(min=-batch.epsilon))
    if batch.token_mask is not None:
        clipped = clipped * batch.token_mask
    mean = clipped.sum(dim=1) / mask.sum(dim=1).clamp(min=1.0)
    # A weight that overflows times an advantage of 0 would be NaN, so such rows get the weight 1.
    weight = torch.where(A == 0, 0.0, mean).exp()
    if batch.sequence_weight is not None:
        weight = weight * batch.sequence_weight
    return LossOutputs(
        loss=-(A * weight).mean(), low_clipped=low_clipped, high_clipped=high_clipped
    )
