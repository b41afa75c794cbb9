"""Exact singular values of a few blocks before and after the filter, for a few steps of a run.

Legend: a block is one matrix that a spectral rule filters, m x n with m <= n; sigma is [m].
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mesotron.config.rules import SPECTRAL_RULES
from mesotron.optim.matrix import apply_filter
from mesotron.optim.optimizer import RoutedOptimizer
from mesotron.optim.state import dense_grad, momentum_of
from mesotron.optim.step import direction, group_filter
from mesotron.optim.views import View

LARGEST_SIDE = 4096  # an SVD of a larger block takes too long
MAX_VALUES = 96  # more singular values than a plot can show


class Block(NamedTuple):
    name: str
    param: Tensor
    group: dict[str, Any]


def choose_blocks(optimizer: RoutedOptimizer, count: int = 4) -> list[Block]:
    """At most `count` parameters of spectral rules, evenly spaced over the model."""
    fitting = []
    for group in optimizer.param_groups:
        if group["rule"] not in SPECTRAL_RULES:
            continue

        numbered = [f"{group['name']} {k}" for k in range(len(group["params"]))]
        names = group.get("param_names", numbered)
        if group["pairs"] is not None:  # a singular value of a product is none of a factor
            continue

        for name, p in zip(names, group["params"], strict=True):
            if not isinstance(p, DTensor) and min(p.shape[-2:]) <= LARGEST_SIDE:
                fitting.append(Block(name, p, group))

    count = min(count, len(fitting))
    return [fitting[k * (len(fitting) - 1) // max(count - 1, 1)] for k in range(count)]


@torch.no_grad()
def measure_spectrum(optimizer: RoutedOptimizer, block: Block) -> dict[str, Any] | None:
    """The filter's input (over the largest) and output spectra, right after a step while gradients
    are there; at most 96 values, evenly spaced. None without a finite gradient."""
    p = block.param
    group = block.group
    if p.grad is None:
        return None

    U = direction(dense_grad(p), momentum_of(optimizer.state[p], p, group), group)
    window = View.parse(group["view"]).windows(U)[0]
    m, n = window.block_shape
    matrix = window.wide[0, 0].reshape(m, n).float()
    if not matrix.isfinite().all() or not matrix.any():
        return None

    sigma = torch.linalg.svdvals(matrix)

    # Filtered as a diagonal matrix, at full precision.
    X = torch.zeros(1, m, n, device=sigma.device)
    X[0].diagonal().copy_(sigma)
    filtered = apply_filter(X, group_filter(group)).X[0].diagonal()
    kept = torch.linspace(0, m - 1, min(m, MAX_VALUES)).round().long()
    before, after = (x.cpu()[kept].tolist() for x in (sigma / sigma[0], filtered))

    named = {
        "block": block.name,
        "rule": group["rule"],
        "view": group["view"],
        "shape": [m, n],
    }
    return {
        **named,
        "rank": (kept + 1).tolist(),
        "before": before,
        "after": after,
    }
