"""The IQR filter of M-GRPO (arXiv 2512.13070): too certain trajectories neither vote nor train.

Within each prompt's group, a trajectory whose entropy is below Q1 - k IQR is dropped; high outliers
stay. At least three quarters survive by construction.

Legend: P prompts, G trajectories of each; H entropy of a trajectory, mean over tokens, in nats.
"""

import torch
from torch import Tensor

# Quartiles of fewer trajectories than this say nothing.
SMALLEST_GROUP = 4


def low_entropy_outliers(H: Tensor, k: float | None) -> Tensor:
    """Which trajectories have a suspiciously low entropy for their group.

    Args:
        H: [P, G], NaN where a trajectory has no tokens (such are never outliers).
        k: width in interquartile ranges, at least 0; None drops nothing.

    Returns:
        [P, G] booleans. Groups of fewer than 4 drop nothing; nor do equal entropies, since the
        comparison is strict.

    Example:
        >>> low_entropy_outliers(torch.tensor([[0.1, 1.0, 1.1, 1.2, 1.3]]), k=0.75)
        tensor([[ True, False, False, False, False]])

    References:
        Bai et al., M-GRPO: Stabilizing Self-Supervised Reinforcement Learning with
        Momentum-Anchored Policy Optimization, 2025, arXiv 2512.13070.
    """
    if k is None or H.shape[1] < SMALLEST_GROUP:
        return torch.zeros_like(H, dtype=torch.bool)
    if k < 0:
        raise ValueError(f"entropy_filter = {k} is negative: give 0.75 as published, or off")
    levels = torch.tensor([0.25, 0.75], dtype=torch.float64, device=H.device)
    q1, q3 = torch.nanquantile(H.double(), levels, dim=1, keepdim=True)
    return H.double() < q1 - k * (q3 - q1)
