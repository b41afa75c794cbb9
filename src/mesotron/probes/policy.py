"""Entropies, ratios, clipping and distance to the start of a policy.

Tensors may be on any device; each probe synchronizes once. GMPO's figure 1 (arXiv 2507.20673)
shows why the extremes of the log-ratio matter: they widen long before the mean moves.

Legend: B completions of up to T tokens; `mask` is 1 on their tokens. Logarithms are natural, and
every probe is 0 without tokens.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

QUARTILES = (
    "entropy/trajectory_q1",
    "entropy/trajectory_q2",
    "entropy/trajectory_q3",
    "entropy/token_q1",
    "entropy/token_q2",
    "entropy/token_q3",
)
EXTREMES = (
    "ratio/log_min",
    "ratio/log_max",
)
CLIPPED = (
    "ratio/clipped_low",
    "ratio/clipped_high",
)
# torch.quantile refuses more elements than this.
QUANTILE_LIMIT = 2**24


def trajectory_entropy(entropies: Tensor, mask: Tensor) -> Tensor:
    """[B] mean entropy of each completion in float32, from [B, T] in nats.

    Example:
        >>> trajectory_entropy(torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[1, 1, 0]]))
        tensor([2.])
    """
    inside = _inside(entropies, mask)  # [B, T]
    counted = torch.where(inside, entropies.float(), 0.0)
    num_tokens = inside.sum(dim=1).clamp_min(1)

    return counted.sum(dim=1) / num_tokens


def entropy_quartiles(entropies: Tensor, mask: Tensor) -> dict[str, float]:
    """Quartiles of the entropy over tokens and over completions.

    A policy that is certain of nearly every token and lost at a few has the mean of an even one.

    Returns:
        entropy/trajectory_q1, _q2, _q3 over completions with tokens and entropy/token_q1, _q2, _q3
        over tokens (every k-th one where there are more than 16 million).
    """
    inside = _inside(entropies, mask)  # [B, T]
    tokens = entropies[inside].float()  # [number of tokens]
    if not tokens.numel():
        return dict.fromkeys(QUARTILES, 0.0)

    has_tokens = inside.any(dim=1)
    trajectories = trajectory_entropy(entropies, mask)[has_tokens]
    stride = math.ceil(tokens.numel() / QUANTILE_LIMIT)

    levels = torch.tensor((0.25, 0.5, 0.75), device=tokens.device)
    of_trajectories = torch.quantile(trajectories, levels)
    of_tokens = torch.quantile(tokens[::stride], levels)

    return _named(QUARTILES, torch.cat([of_trajectories, of_tokens]))


def log_ratio_extremes(log_ratio: Tensor, mask: Tensor) -> dict[str, float]:
    """ratio/log_min and ratio/log_max of log pi_new - log pi_old [B, T] over tokens.

    Example:
        >>> log_ratio_extremes(torch.tensor([[0.25, -0.5, 9.0]]), torch.tensor([[1, 1, 0]]))
        {'ratio/log_min': -0.5, 'ratio/log_max': 0.25}
    """
    inside = _inside(log_ratio, mask)  # [B, T]
    values = log_ratio.float()
    low = torch.where(inside, values, torch.inf).amin()
    high = torch.where(inside, values, -torch.inf).amax()

    extremes = torch.stack([low, high])
    extremes = torch.where(inside.any(), extremes, 0.0)
    return _named(EXTREMES, extremes)


def clip_fractions(
    log_ratio: Tensor,
    mask: Tensor,
    advantages: Tensor,
    low: float,
    high: float,
) -> dict[str, float]:
    """Shares of tokens without gradient because of the clip.

    Their ratio is above the window and the advantage positive, or below it and negative.

    Args:
        log_ratio: [B, T], log pi_new - log pi_old of the sampled tokens.
        mask: [B, T], 1 on tokens that train.
        advantages: [B] or [B, T].
        low, high: the window in log space, log(1 -+ epsilon) for PPO's clip.

    Example:
        >>> ratio = torch.tensor([[0.5, -0.5]])
        >>> clip_fractions(ratio, torch.ones(1, 2), torch.tensor([1.0]), -0.2, 0.2)
        {'ratio/clipped_low': 0.0, 'ratio/clipped_high': 0.5}
    """
    inside = _inside(log_ratio, mask)  # [B, T]
    if advantages.dim() == 1:
        advantages = advantages[:, None]  # [B, 1]

    is_below = (log_ratio < low) & (advantages < 0)
    is_above = (log_ratio > high) & (advantages > 0)
    clipped = [
        (inside & is_below).sum(),
        (inside & is_above).sum(),
    ]

    num_tokens = inside.sum().clamp_min(1)
    shares = torch.stack(clipped) / num_tokens
    return _named(CLIPPED, shares)


def kl_to_start(logprobs: Tensor, start_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """kl/start: KL divergence from the model that the run started with, in nats per token.

    Schulman's k3 estimator exp(d) - 1 - d with d = log start - log pi, [B, T], on tokens that pi
    sampled: unbiased and never negative.
    """
    inside = _inside(logprobs, mask)  # [B, T]
    d = start_logprobs.float() - logprobs.float()
    d = torch.where(inside, d, 0.0)

    total = (d.expm1() - d).sum()
    num_tokens = inside.sum().clamp_min(1)
    return {"kl/start": float(total / num_tokens)}


def _named(names: Sequence[str], values: Tensor) -> dict[str, float]:
    """The numbers of a tensor by name; this waits for the device."""
    return dict(zip(names, values.tolist(), strict=True))


def _inside(values: Tensor, mask: Tensor) -> Tensor:
    """[B, T], whether a token counts."""
    if values.shape != mask.shape:
        raise ValueError(f"mask {tuple(mask.shape)} and values {tuple(values.shape)} must match")
    return mask != 0
