"""AdamW and bfloat16 weights: whether a step of its size survives rounding to nearest.

Spectral rules round at random and lose nothing. AdamW is PyTorch's: at a rate of 1e-6 it leaves
most bfloat16 weights where they are, while every metric looks like training.
"""

import logging

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mesotron.optim import RoutedOptimizer

log = logging.getLogger("mesotron")

# AdamW moves a weight by about lr, and a bfloat16 weight w does not feel less than |w| / 512.
DEAF = 512
SAMPLED = 4096  # elements of each weight that are looked at


def lost_share(optimizer: RoutedOptimizer) -> float:
    """The share of AdamW's bfloat16 weights that a step cannot move; 0 if it has none.

    Args:
        optimizer: built, at its full learning rate.

    Example:
        >>> import mesotron
        >>> model = torch.nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
        >>> torch.nn.init.ones_(model.weight).shape
        torch.Size([8, 8])
        >>> lost_share(mesotron.adamw(model, 1e-6)), lost_share(mesotron.adamw(model, 1e-2))
        (1.0, 0.0)
    """
    lost = total = 0.0
    for group in optimizer.param_groups:
        for p in group["params"]:
            if group["rule"] == "adamw" and p.dtype == torch.bfloat16:
                size = p.numel()
                lost += _lost(p, group["lr"]) * size
                total += size
    return lost / total if total else 0.0


def warn_of_lost_steps(optimizer: RoutedOptimizer) -> None:
    """Say so if AdamW's steps are too small for most of its bfloat16 weights."""
    share = lost_share(optimizer)
    if share > 0.5:
        log.warning(
            "AdamW's rate is too small for %.0f %% of the bfloat16 weights that it trains: its "
            "steps are rounded away; use --model.dtype float32, LoRA, or a larger rate",
            100 * share,
        )


def _lost(p: Tensor, lr: float) -> float:
    w = (p.to_local() if isinstance(p, DTensor) else p).detach().flatten()
    picked = w[:: max(1, len(w) // SAMPLED)]
    return (picked.float().abs() > DEAF * lr).float().mean().item() if len(w) else 0.0
