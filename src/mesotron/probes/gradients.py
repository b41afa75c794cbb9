"""The shape of a gradient: how many directions, how much of it is signal, how heads differ.

The three measures that the Pion paper argues with (arXiv 2605.19282). They cost an SVD or several
backward passes, so that a trainer runs them every so many steps, not at each.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def effective_rank(X: Tensor) -> dict[str, float]:
    """How many directions share a matrix: exp of the entropy of its singular values.

    p_i = sigma_i / sum sigma, erank = exp(-sum p_i log p_i): the singular values themselves, not
    their squares.

    Args:
        X: [m, n], a gradient, an update or a weight; leading dimensions are a batch, averaged.

    Returns:
        gradient/effective_rank, 1 to min(m, n), and gradient/stable_rank = ||X||_F^2 / sigma_1^2,
        which a long tail hardly moves; both 0 for a zero matrix.

    Example:
        >>> round(effective_rank(torch.eye(3))["gradient/effective_rank"], 6)
        3.0

    References:
        Roy and Vetterli, The effective rank, EUSIPCO 2007.
    """
    if X.dim() < 2:
        raise ValueError(f"a shape of {tuple(X.shape)} is no matrix: give at least two dimensions")
    sigma = torch.linalg.svdvals(X.detach().double().reshape(-1, *X.shape[-2:]))
    live = sigma.sum(dim=1) > 0
    sigma = sigma[live]
    if not len(sigma):
        return {"gradient/effective_rank": 0.0, "gradient/stable_rank": 0.0}
    p = sigma / sigma.sum(dim=1, keepdim=True)
    # xlogy: 0 log 0 is 0.
    effective = torch.exp(-torch.xlogy(p, p).sum(dim=1))
    stable = (sigma / sigma.amax(dim=1, keepdim=True)).square().sum(dim=1)
    share = len(sigma) / len(live)
    return {
        "gradient/effective_rank": float(effective.mean()) * share,
        "gradient/stable_rank": float(stable.mean()) * share,
    }


def gradient_snr(parts: Sequence[Tensor] | Sequence[Sequence[Tensor]]) -> dict[str, float]:
    """Signal-to-noise ratio of a gradient, from the gradients of the parts of one batch.

    SNR = ||E g||^2 / E||g - E g||^2 for the gradient g of one part. ||mean g||^2 overstates the
    numerator by the variance over K; that bias is taken off, so that the estimate is right on
    average and may be below zero where there is no signal to see.

    Args:
        parts: K gradients at the same weights, of parts of equal size: each a tensor, or a list of
            tensors in the same order.

    Returns:
        What `snr_from_norms` returns.

    Example:
        >>> gradient_snr([torch.tensor([1.0, 0.5]), torch.tensor([1.0, -0.5])])
        {'gradient/signal': 0.75, 'gradient/noise': 0.5, 'gradient/snr': 1.5}

    References:
        Pion, 2026, arXiv 2605.19282; McCandlish et al., An Empirical Model of Large-Batch
        Training, 2018, arXiv 1812.06162 (its noise scale is 1 / SNR in units of a part).
    """
    lists = [[part] if isinstance(part, Tensor) else list(part) for part in parts]
    squares = [_square(part) for part in lists]
    total = [torch.stack([t.double() for t in tensors]).sum(dim=0) for tensors in zip(*lists)]
    return snr_from_norms(squares, _square(total))


def snr_from_norms(squared_norms: Sequence[float], squared_norm_of_sum: float) -> dict[str, float]:
    """The same from norms alone, for a loop that cannot keep K gradients: they accumulate anyway.

    Args:
        squared_norms: ||g_k||^2 of each of the K parts.
        squared_norm_of_sum: ||sum_k g_k||^2.

    Returns:
        gradient/signal = estimate of ||E g||^2, gradient/noise = estimate of E||g - E g||^2 for one
        part, gradient/snr = their ratio (0 where both vanish; negative if noise alone was seen).

    Example:
        >>> snr_from_norms([1.25, 1.25], 4.0)["gradient/signal"]
        0.75
    """
    K = len(squared_norms)
    if K < 2:
        raise ValueError(f"{K} part has no spread to measure: split the batch into 2 or more")
    own = sum(squared_norms)
    # The mean inner product of two different parts: each part's own noise is not in it.
    signal = (squared_norm_of_sum - own) / (K * (K - 1))
    noise = max((own - squared_norm_of_sum / K) / (K - 1), 0.0)
    # Parts that agree to the last bit have no noise: the ratio is then bounded by round-off.
    floor = 1e-12 * own / K
    ratio = signal / max(noise, floor) if own else 0.0
    return {"gradient/signal": signal, "gradient/noise": noise, "gradient/snr": ratio}


def head_heterogeneity(weight: Tensor, num_heads: int) -> dict[str, float]:
    """How differently the attention heads of one projection are sized.

    The norm of a head of W_Q is an inverse temperature: a filter over the whole matrix moves all
    heads alike, one per head does not.

    Args:
        weight: [heads * head_size, n], a weight, gradient or update of W_Q, W_K or W_V, with the
            heads along its rows as torch keeps them.
        num_heads: heads along the rows (for W_K and W_V the number of key-value heads).

    Returns:
        heads/norm_variance (of the Frobenius norms over heads, as the paper has it) and
        heads/norm_variation (standard deviation over mean; 0 for a zero matrix), which does not
        depend on the size of the model.

    Example:
        >>> head_heterogeneity(torch.tensor([[1.0], [3.0]]), num_heads=2)
        {'heads/norm_variance': 1.0, 'heads/norm_variation': 0.5}
    """
    if num_heads < 1 or weight.dim() != 2 or weight.shape[0] % num_heads:
        raise ValueError(
            f"{num_heads} heads do not divide a weight of shape {tuple(weight.shape)}: give a "
            "matrix with the heads along its rows"
        )
    norms = weight.detach().double().reshape(num_heads, -1).norm(dim=1)
    spread, mean = float(norms.std(correction=0)), float(norms.mean())
    return {
        "heads/norm_variance": spread**2,
        "heads/norm_variation": spread / mean if mean else 0.0,
    }


def _square(tensors: Sequence[Tensor]) -> float:
    """The squared norm of all together, in float64."""
    return float(sum(t.detach().double().square().sum() for t in tensors))
