"""How sure the policy is, and how far it has gone: entropies, ratios, clipping, distance to start.

Tensors on any device; each probe waits for the device once. GMPO's figure 1 (arXiv 2507.20673)
shows why the extremes of the log-ratio matter: they widen long before the mean moves.

Legend: B completions of up to T tokens; `mask` is 1 on their tokens. Logarithms are natural.
"""

import torch
from torch import Tensor

QUARTERS = (0.25, 0.5, 0.75)
# torch.quantile refuses more elements than this.
QUANTILE_LIMIT = 2**24


def trajectory_entropy(entropies: Tensor, mask: Tensor) -> Tensor:
    """One entropy for each completion: the mean over its tokens.

    Args:
        entropies: [B, T] in nats, of the whole softmax at each token.
        mask: [B, T], 1 on tokens of the completion.

    Returns:
        [B] in float32; 0 for a completion without tokens.

    Example:
        >>> trajectory_entropy(torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[1, 1, 0]]))
        tensor([2.])
    """
    inside = _inside(entropies, mask)
    total = torch.where(inside, entropies.float(), 0.0).sum(dim=1)
    return total / inside.sum(dim=1).clamp_min(1)


def entropy_quartiles(entropies: Tensor, mask: Tensor) -> dict[str, float]:
    """Quartiles of the entropy over tokens and over completions.

    The mean hides the shape: a policy that is certain of nearly every token and lost at a few has
    the same mean as an even one.

    Args:
        entropies: [B, T] in nats.
        mask: [B, T], 1 on tokens of the completion.

    Returns:
        entropy/trajectory_q1, _q2, _q3 over completions with tokens and entropy/token_q1, _q2, _q3
        over tokens (every k-th one where there are more than 16 million); 0 if there are none.

    Example:
        >>> found = entropy_quartiles(torch.tensor([[1.0, 3.0], [5.0, 7.0]]), torch.ones(2, 2))
        >>> found["entropy/trajectory_q2"], found["entropy/token_q1"]
        (4.0, 2.5)
    """
    inside = _inside(entropies, mask)
    names = [f"entropy/{kind}_q{k}" for kind in ("trajectory", "token") for k in (1, 2, 3)]
    tokens = entropies[inside].float()
    if not tokens.numel():
        return dict.fromkeys(names, 0.0)
    trajectories = trajectory_entropy(entropies, mask)[inside.any(dim=1)]
    levels = torch.tensor(QUARTERS, device=tokens.device)
    stride = -(-tokens.numel() // QUANTILE_LIMIT)
    found = [torch.quantile(trajectories, levels), torch.quantile(tokens[::stride], levels)]
    return dict(zip(names, torch.cat(found).tolist(), strict=True))


def log_ratio_extremes(log_ratio: Tensor, mask: Tensor) -> dict[str, float]:
    """The smallest and the largest log-ratio of the new to the old policy over tokens.

    Args:
        log_ratio: [B, T], log pi_new - log pi_old of the sampled tokens.
        mask: [B, T], 1 on tokens that train.

    Returns:
        ratio/log_min and ratio/log_max; 0 without tokens.

    Example:
        >>> log_ratio_extremes(torch.tensor([[0.25, -0.5, 9.0]]), torch.tensor([[1, 1, 0]]))
        {'ratio/log_min': -0.5, 'ratio/log_max': 0.25}
    """
    inside = _inside(log_ratio, mask)
    values = log_ratio.float()
    low = torch.where(inside, values, torch.inf).amin()
    high = torch.where(inside, values, -torch.inf).amax()
    found = torch.where(inside.any(), torch.stack([low, high]), 0.0)
    return dict(zip(("ratio/log_min", "ratio/log_max"), found.tolist(), strict=True))


def clip_fractions(
    log_ratio: Tensor, mask: Tensor, advantages: Tensor, low: float, high: float
) -> dict[str, float]:
    """Shares of tokens whose gradient the clip takes away, below and above.

    A token is clipped where its ratio has left the window on the side that its advantage pushes
    to: above it with a positive advantage, below it with a negative one.

    Args:
        log_ratio: [B, T], log pi_new - log pi_old of the sampled tokens.
        mask: [B, T], 1 on tokens that train.
        advantages: [B], one for each completion, or [B, T].
        low: lower end of the window in log space, log(1 - epsilon) for PPO's clip.
        high: upper end in log space, log(1 + epsilon).

    Returns:
        ratio/clipped_low and ratio/clipped_high, 0 to 1; 0 without tokens.

    Example:
        >>> ratio = torch.tensor([[0.5, -0.5]])
        >>> clip_fractions(ratio, torch.ones(1, 2), torch.tensor([1.0]), -0.2, 0.2)
        {'ratio/clipped_low': 0.0, 'ratio/clipped_high': 0.5}
    """
    inside = _inside(log_ratio, mask)
    sign = advantages if advantages.dim() == 2 else advantages[:, None]
    below = inside & (log_ratio < low) & (sign < 0)
    above = inside & (log_ratio > high) & (sign > 0)
    found = torch.stack([below.sum(), above.sum()]) / inside.sum().clamp_min(1)
    return dict(zip(("ratio/clipped_low", "ratio/clipped_high"), found.tolist(), strict=True))


def kl_to_start(logprobs: Tensor, start_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """Distance from the model that the run started with, per token.

    KL(pi, start) by the estimator exp(d) - 1 - d with d = log start - log pi on tokens that pi
    sampled: unbiased and never negative (Schulman's k3).

    Args:
        logprobs: [B, T], the policy's log-probabilities of its own samples.
        start_logprobs: [B, T], the start's.
        mask: [B, T], 1 on tokens of the completion.

    Returns:
        kl/start in nats per token; 0 without tokens.

    Example:
        >>> kl_to_start(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2))
        {'kl/start': 0.0}
    """
    inside = _inside(logprobs, mask)
    d = torch.where(inside, start_logprobs.float() - logprobs.float(), 0.0)
    return {"kl/start": float((d.expm1() - d).sum() / inside.sum().clamp_min(1))}


def _inside(values: Tensor, mask: Tensor) -> Tensor:
    """The mask as booleans, of the same shape as the values."""
    if values.shape != mask.shape:
        raise ValueError(
            f"the mask has shape {tuple(mask.shape)}, the values {tuple(values.shape)}: "
            "give one for each token"
        )
    return mask != 0
