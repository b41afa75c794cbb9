"""Entropies, ratios, clipping and distance to the start of a policy.

Tensors may be on any device; each probe synchronizes once. GMPO's figure 1 (arXiv 2507.20673)
shows why the extremes of the log-ratio matter: they widen long before the mean moves.

Legend: B completions of up to T tokens; `mask` is 1 on their tokens. Logarithms are natural, and
every probe is 0 without tokens.
"""

import torch
from torch import Tensor

# torch.quantile refuses more elements than this.
QUANTILE_LIMIT = 2**24


def trajectory_entropy(entropies: Tensor, mask: Tensor) -> Tensor:
    """[B] mean entropy of each completion in float32, from [B, T] in nats.

    Example:
        >>> trajectory_entropy(torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[1, 1, 0]]))
        tensor([2.])
    """
    inside = _inside(entropies, mask)
    total = torch.where(inside, entropies.float(), 0.0).sum(dim=1)
    return total / inside.sum(dim=1).clamp_min(1)


def entropy_quartiles(entropies: Tensor, mask: Tensor) -> dict[str, float]:
    """Quartiles of the entropy over tokens and over completions.

    A policy that is certain of nearly every token and lost at a few has the mean of an even one.

    Returns:
        entropy/trajectory_q1, _q2, _q3 over completions with tokens and entropy/token_q1, _q2, _q3
        over tokens (every k-th one where there are more than 16 million).
    """
    inside = _inside(entropies, mask)
    names = [f"entropy/{kind}_q{k}" for kind in ("trajectory", "token") for k in (1, 2, 3)]
    tokens = entropies[inside].float()
    if not tokens.numel():
        return dict.fromkeys(names, 0.0)

    trajectories = trajectory_entropy(entropies, mask)[inside.any(dim=1)]
    levels = torch.tensor((0.25, 0.5, 0.75), device=tokens.device)
    stride = -(-tokens.numel() // QUANTILE_LIMIT)
    quartiles = [torch.quantile(trajectories, levels), torch.quantile(tokens[::stride], levels)]

    return dict(zip(names, torch.cat(quartiles).tolist(), strict=True))


def log_ratio_extremes(log_ratio: Tensor, mask: Tensor) -> dict[str, float]:
    """ratio/log_min and ratio/log_max of log pi_new - log pi_old [B, T] over tokens.

    Example:
        >>> log_ratio_extremes(torch.tensor([[0.25, -0.5, 9.0]]), torch.tensor([[1, 1, 0]]))
        {'ratio/log_min': -0.5, 'ratio/log_max': 0.25}
    """
    inside = _inside(log_ratio, mask)
    low = torch.where(inside, log_ratio.float(), torch.inf).amin()
    high = torch.where(inside, log_ratio.float(), -torch.inf).amax()
    ends = torch.where(inside.any(), torch.stack([low, high]), 0.0)

    return dict(zip(("ratio/log_min", "ratio/log_max"), ends.tolist(), strict=True))


def clip_fractions(
    log_ratio: Tensor, mask: Tensor, advantages: Tensor, low: float, high: float
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
    inside = _inside(log_ratio, mask)
    sign = advantages if advantages.dim() == 2 else advantages[:, None]
    below = inside & (log_ratio < low) & (sign < 0)
    above = inside & (log_ratio > high) & (sign > 0)
    shares = torch.stack([below.sum(), above.sum()]) / inside.sum().clamp_min(1)

    return dict(zip(("ratio/clipped_low", "ratio/clipped_high"), shares.tolist(), strict=True))


def kl_to_start(logprobs: Tensor, start_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """kl/start: KL divergence from the model that the run started with, in nats per token.

    Schulman's k3 estimator exp(d) - 1 - d with d = log start - log pi, [B, T], on tokens that pi
    sampled: unbiased and never negative.
    """
    inside = _inside(logprobs, mask)
    d = torch.where(inside, start_logprobs.float() - logprobs.float(), 0.0)
    return {"kl/start": float((d.expm1() - d).sum() / inside.sum().clamp_min(1))}


def _inside(values: Tensor, mask: Tensor) -> Tensor:
    if values.shape != mask.shape:
        raise ValueError(f"mask {tuple(mask.shape)} and values {tuple(values.shape)} must match")
    return mask != 0
