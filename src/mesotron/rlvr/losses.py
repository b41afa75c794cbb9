"""Policy losses that TRL does not have, and metrics of the policy: pure functions of tensors.

GMPO (arXiv 2507.20673) takes the geometric mean of the token ratios instead of the arithmetic one,
which an outlier moves little, so the clip may be wide. At ratio 1 its gradient is GRPO's. Clip-Cov
and KL-Cov (arXiv 2505.22617) hold back the tokens that lower the entropy most. TRL adds the KL
term, the entropy bonus and the router loss.

Legend: B sequences of up to T tokens; d log-ratio of the new to the old policy; A advantage.
`gather` concatenates a tensor's rows over all processes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
    token_weight: Tensor | None = None  # [B, T] or [B, 1] (rollout correction)
    num_tokens: Tensor | float = 1.0  # that a mean over tokens divides by
    cov_share: float = 0.0  # of the tokens that Clip-Cov and KL-Cov change


@dataclass(frozen=True)
class LossOutputs:
    """A scalar loss, and metrics over all processes."""

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
    A = batch.advantages
    mask = batch.mask
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


COV_RANGE = (1.0, 5.0)  # covariances of tokens that Clip-Cov may leave out
KL_COV_COEF = 1.0


def cov_loss(batch: LossInputs, gather: Gather = identity, penalty: bool = False) -> LossOutputs:
    """Clip-Cov or, with `penalty`, KL-Cov: a mean over tokens that treats a few of them otherwise.

    The covariance of a token is (A - mean A) (log p - mean log p) over the batch: tokens with a
    large one lower the entropy. Clip-Cov leaves `cov_share` of all tokens out of the clipped loss,
    drawn from those with a covariance in (1, 5). KL-Cov clips nothing and adds |d| to the tokens
    with the largest. At least one token is treated, as in the authors' code.

    References:
        Cui et al., The Entropy Mechanism of Reinforcement Learning, 2025, arXiv 2505.22617.
    """
    trains = batch.mask != 0
    T = batch.mask.shape[1]
    A = batch.advantages[:, None].expand(-1, T)
    logprobs = batch.logprobs.detach()
    d = torch.where(trains, batch.logprobs - batch.old_logprobs, 0.0)
    plain = d.exp() * A
    clipped = plain if penalty else d.exp().clamp(1 - batch.epsilon, 1 + batch.epsilon_high) * A
    cov = (A - A[trains].mean()) * (logprobs - logprobs[trains].mean())
    total = int(trains.sum())

    number = min(max(1, int(batch.cov_share * total)), total)
    if penalty:
        chosen = torch.where(trains, cov, -torch.inf).flatten().topk(number).indices
    else:
        free = trains & (clipped >= plain) & (cov > COV_RANGE[0]) & (cov < COV_RANGE[1])
        candidates = free.flatten().nonzero().squeeze(1)
        chosen = candidates[torch.randperm(len(candidates), device=d.device)[:number]]

    treated = torch.zeros_like(d).flatten().index_fill(0, chosen, 1.0).view_as(d)
    value = torch.min(plain, clipped)
    value = value - KL_COV_COEF * treated * d.abs() if penalty else value * (1 - treated)

    sequence = None if batch.sequence_weight is None else batch.sequence_weight[:, None]
    for weight in (batch.token_weight, batch.token_mask, sequence):
        value = value if weight is None else value * weight

    loss = -torch.where(trains, value, 0.0).sum() / batch.num_tokens
    low = (clipped < plain) & (A < 0)
    high = (clipped < plain) & (A > 0)
    kinds = [low * trains, high * trains, trains, treated]
    counts = gather(torch.stack([kind.float() for kind in kinds], dim=2).sum(dim=1))
    share = (counts[:, 3].sum() / counts[:, 2].sum().clamp(min=1)).item()
    metrics = {"policy_loss": gather(loss.detach()).mean().item(), "cov/treated": share}

    return LossOutputs(loss, metrics | clip_metrics(counts[:, :3]))


def own_loss(name: str, geometric: bool) -> Callable[[LossInputs, Gather], LossOutputs] | None:
    """The policy loss of an objective that TRL does not have."""
    covariances = {"clip_cov": cov_loss, "kl_cov": partial(cov_loss, penalty=True)}
    return gmpo_loss if geometric else covariances.get(name)


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
