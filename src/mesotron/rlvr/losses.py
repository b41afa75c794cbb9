"""Policy losses that TRL does not have, and metrics of the policy: pure functions of tensors.

GMPO (arXiv 2507.20673) takes the geometric mean of the token ratios instead of the arithmetic one,
which an outlier moves little, so the clip may be wide. At ratio 1 its gradient is GRPO's. TRL adds
the KL term, the entropy bonus and the router loss.

Legend: B sequences of up to T tokens; d log-ratio of the new to the old policy; A advantage.
`gather` concatenates a tensor's rows over all processes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from mesotron.probes import trajectory_entropy

Gather = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What the policy term of a loss is computed from."""

    logprobs: Tensor  # [B, T], of the sampled tokens by the policy, with gradient
    old_logprobs: Tensor  # [B, T], by the policy that sampled the batch
    advantages: Tensor  # [B]
    mask: Tensor  # [B, T], 1 on tokens that train; rows may be all 0
    epsilon: float = 0.4  # lower clip width in log space: the ratio may fall to exp(-0.4)
    epsilon_high: float = 0.4  # upper clip width in log space
    delta: float | None = None  # largest ratio of any token (two-sided clipping)
    token_mask: Tensor | None = None  # [B, T], tokens with a gradient; the others have ratio 1
    sequence_weight: Tensor | None = None  # [B] (rollout correction, off-policy mask)


@dataclass(frozen=True)
class LossOutputs:
    """A scalar loss (mean over sequences), and metrics over all processes."""

    loss: Tensor
    metrics: dict[str, float]


def identity(x: Tensor) -> Tensor:
    return x


def gmpo_loss(batch: LossInputs, gather: Gather = identity) -> LossOutputs:
    """The mean over sequences of -A exp(mean_t d'_t), with d' clipped on the side that A pushes to.

    d'_t = min(d_t, epsilon_high) where A > 0 and max(d_t, -epsilon) where A < 0. Clipped tokens
    stay in the mean and give no gradient. Metrics are policy_loss and TRL's clip_ratio/*.

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
    low_clipped = (A < 0)[:, None] & (d < -batch.epsilon)
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
    loss = -(A * weight).mean()
    counts = torch.stack([low_clipped * mask, high_clipped * mask, mask], dim=2).float().sum(dim=1)
    metrics = {"policy_loss": gather(loss.detach()).mean().item()}
    return LossOutputs(loss, metrics | clip_metrics(gather(counts)))


def clip_metrics(counts: Tensor) -> dict[str, float]:
    """TRL's clip_ratio/* from [B, 3] counts of low-clipped, high-clipped and all tokens."""
    low, high = (counts.sum(dim=0)[:2] / counts[:, 2].sum().clamp(min=1)).tolist()
    shares = counts[:, :2] / counts[:, 2:].clamp(min=1)
    return {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
        "clip_ratio/low_min": shares[:, 0].min().item(),
        "clip_ratio/high_max": shares[:, 1].max().item(),
    }


def correction_weight(ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """TRL's correction for a rollout engine, [B, 1] or [B, T], as one factor per sequence [B].
    Per-token ratios become their geometric mean, as GMPO weighs its own; tokens that TRL masked
    (ratio 0) are left out and give no gradient. Also returns the tokens [B, T] that remain."""
    if ratio.shape[1] == 1 and mask.shape[1] != 1:
        return ratio.squeeze(1), torch.ones_like(mask, dtype=torch.bool)
    kept = ratio > 0
    counted = kept & (mask != 0)
    logs = torch.where(counted, ratio, 1.0).log()
    return (logs.sum(dim=1) / counted.sum(dim=1).clamp(min=1)).exp(), kept


def policy_metrics(
    entropies: Tensor, log_ratio: Tensor | None, mask: Tensor, gather: Gather = identity
) -> dict[str, float]:
    """entropy/trajectory_q1 to _q3, ratio/log_min and ratio/log_max; empty if no token trains. All
    [B, T]; `log_ratio` of the new to the old policy is None where they are the same."""
    trains = mask != 0
    H = trajectory_entropy(entropies, mask)
    if log_ratio is None:
        low = high = torch.zeros_like(H)
    else:
        low = torch.where(trains, log_ratio.float(), torch.inf).amin(dim=1)
        high = torch.where(trains, log_ratio.float(), -torch.inf).amax(dim=1)
    rows = torch.stack([H, low, high], dim=1)
    rows = gather(torch.where(trains.any(dim=1, keepdim=True), rows, torch.nan))
    rows = rows[~rows[:, 0].isnan()]
    if not len(rows):
        return {}
    H, low, high = rows.unbind(dim=1)
    quartiles = torch.quantile(H, torch.tensor([0.25, 0.5, 0.75], device=H.device))
    values = torch.cat([quartiles, low.min()[None], high.max()[None]]).tolist()
    names = [f"entropy/trajectory_q{k}" for k in (1, 2, 3)] + ["ratio/log_min", "ratio/log_max"]
    return dict(zip(names, values, strict=True))
