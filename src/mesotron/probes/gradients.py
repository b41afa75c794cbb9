"""The shape of a gradient: effective rank, signal-to-noise ratio, differences between heads.

The three measures of the Pion paper (arXiv 2605.19282); they cost an SVD or backward passes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def effective_rank(X: Tensor) -> dict[str, float]:
    """How many directions share a matrix: exp of the entropy of its singular values.

    erank = exp(-sum p_i log p_i), p_i = sigma_i / sum sigma (Roy and Vetterli, EUSIPCO 2007).

    Args:
        X: [..., m, n], a gradient, an update or a weight; leading dimensions are averaged.

    Returns:
        gradient/effective_rank, 1 to min(m, n), and gradient/stable_rank = ||X||_F^2 / sigma_1^2,
        which a long tail hardly moves; both 0 for a zero matrix.
    """
    if X.dim() < 2:
        raise ValueError(f"shape {tuple(X.shape)} is not a matrix: give at least two dimensions")

    m, n = X.shape[-2:]
    matrices = X.detach().double().reshape(-1, m, n)
    sigma = torch.linalg.svdvals(matrices)  # [matrices, min(m, n)]
    num_matrices = len(sigma)

    total = sigma.sum(dim=1, keepdim=True)
    is_nonzero = total[:, 0] > 0
    sigma = sigma[is_nonzero]

    p = sigma / total[is_nonzero]
    entropy = -torch.xlogy(p, p).sum(dim=1)  # 0 log 0 is 0
    effective_ranks = torch.exp(entropy)

    largest = sigma.amax(dim=1, keepdim=True)
    stable_ranks = (sigma / largest).square().sum(dim=1)

    return {
        "gradient/effective_rank": float(effective_ranks.sum()) / num_matrices,
        "gradient/stable_rank": float(stable_ranks.sum()) / num_matrices,
    }


def gradient_snr(parts: Sequence[Tensor] | Sequence[Sequence[Tensor]]) -> dict[str, float]:
    """Signal-to-noise ratio of a gradient, from the gradients of the parts of one batch.

    SNR = ||E g||^2 / E||g - E g||^2 for the gradient g of one part. The bias of ||mean g||^2 is
    removed, so the estimate may be negative. The noise scale of arXiv 1812.06162 is 1 / SNR parts.

    Args:
        parts: K gradients at the same weights, of parts of equal size: tensors or lists of them.

    Example:
        >>> gradient_snr([torch.tensor([1.0, 0.5]), torch.tensor([1.0, -0.5])])
        {'gradient/signal': 0.75, 'gradient/noise': 0.5, 'gradient/snr': 1.5}
    """
    lists = [[part] if isinstance(part, Tensor) else list(part) for part in parts]
    norms = [squared_norm(part) for part in lists]

    total = []
    for tensors in zip(*lists):  # of one parameter, from each part
        stacked = torch.stack([t.double() for t in tensors])
        total.append(stacked.sum(dim=0))

    return snr_from_norms(norms, squared_norm(total))


def snr_from_norms(squared_norms: Sequence[float], squared_norm_of_sum: float) -> dict[str, float]:
    """`gradient_snr` from norms, for a loop that accumulates its gradients.

    Args:
        squared_norms: ||g_k||^2 of each of the K parts.
        squared_norm_of_sum: ||sum_k g_k||^2.

    Returns:
        gradient/signal = estimate of ||E g||^2, gradient/noise = estimate of E||g - E g||^2 for one
        part, gradient/snr = their ratio (0 where both vanish).
    """
    K = len(squared_norms)
    if K < 2:
        raise ValueError(f"{K} part has no spread: split the batch into 2 or more")

    own = sum(squared_norms)
    num_pairs = K * (K - 1)

    # The mean inner product of two different parts: their own noise is not in it.
    signal = (squared_norm_of_sum - own) / num_pairs
    noise = (own - squared_norm_of_sum / K) / (K - 1)
    noise = max(noise, 0.0)

    ratio = 0.0
    if own:
        floor = 1e-12 * own / K  # identical parts have no noise but rounding errors
        ratio = signal / max(noise, floor)

    return {
        "gradient/signal": signal,
        "gradient/noise": noise,
        "gradient/snr": ratio,
    }


def head_heterogeneity(weight: Tensor, num_heads: int) -> dict[str, float]:
    """How much the norms of the attention heads of one projection differ.

    The norm of a head of W_Q is an inverse temperature.

    Args:
        weight: [heads * head_size, n], a weight, gradient or update of W_Q, W_K or W_V.
        num_heads: heads along the rows (for W_K and W_V the number of key-value heads).

    Returns:
        heads/norm_variance (of the Frobenius norms, as in the paper) and heads/norm_variation
        (standard deviation over mean; 0 for a zero matrix), which is independent of model size.
    """
    if num_heads < 1 or weight.dim() != 2 or weight.shape[0] % num_heads:
        raise ValueError(f"{num_heads} heads do not divide the rows of {tuple(weight.shape)}")

    heads = weight.detach().double().reshape(num_heads, -1)  # [heads, head_size * n]
    norms = heads.norm(dim=1)
    spread = float(norms.std(correction=0))
    mean = float(norms.mean())

    return {
        "heads/norm_variance": spread**2,
        "heads/norm_variation": spread / mean if mean else 0.0,
    }


def squared_norm(tensors: Sequence[Tensor]) -> float:
    """||.||^2 of all the tensors together."""
    squares = [t.detach().double().square().sum() for t in tensors]
    return float(sum(squares))
