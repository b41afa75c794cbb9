"""NorMuon: Muon, and then the step of every neuron is brought to the same size."""

from typing import Unpack

import torch
from torch import Tensor, nn

from mesotron.optim.build import Rate, build
from mesotron.optim.optimizer import RoutedOptimizer
from mesotron.optim.options import OptimizerOptions, with_options
from mesotron.optim.registry import Lines, rule

_EPS = 1e-8


def normalize_lines(X: Tensor, lines: list[Lines], beta2: float) -> Tensor:
    """Divide each line of the longer side by the root of its running mean square, and keep the
    block's norm. The lines of the shorter side have equal norms already, since X X^T = I.

    Legend: X is [B, m, n]; V, the running mean squares, is [B, n].
    """
    states = [each.state for each in lines]
    V = torch.cat(states)

    mean_square = X.to(V.dtype).square().mean(1)
    new = V.lerp(mean_square, 1 - beta2)
    if lines[0].finite is not None:
        new = torch.where(_finite(lines), new, V)

    sizes = [len(state) for state in states]
    torch._foreach_copy_(states, list(new.split(sizes)))  # pyright: ignore

    scaled = X / (new.sqrt() + _EPS)[:, None, :].to(X.dtype)
    before = torch.linalg.vector_norm(X, dim=(1, 2), dtype=V.dtype)
    after = torch.linalg.vector_norm(scaled, dim=(1, 2), dtype=V.dtype)
    ratio = torch.where(after > 0, before / after, 0.0)

    return scaled * ratio[:, None, None].to(X.dtype)


def _finite(lines: list[Lines]) -> Tensor:
    """For each block whether its parameter's gradient is finite, [B, 1]."""
    flags = []
    for each in lines:
        assert each.finite is not None
        flags.append(each.finite.expand(len(each.state)))

    return torch.cat(flags)[:, None]


@rule("normuon", about="as `muon`, then normalized neuron by neuron", finish=normalize_lines)
class NorMuon(RoutedOptimizer):
    """NorMuon: Muon whose filtered momentum is then normalized neuron by neuron.

    Each line of a matrix's longer side (its neurons; the lines of the shorter side have equal norms
    already) is divided by the root of a running mean of its squares, with decay `beta2`. The size
    of the step stays Muon's; the state grows by one vector per matrix. Arguments as in `Muon`.

    References: Li et al., "NorMuon", 2025, arXiv 2510.05491.
    """


@with_options(NorMuon)
def normuon(
    model: nn.Module,
    lr: Rate = 1e-3,
    *,
    aux_lr: Rate | None = None,
    **options: Unpack[OptimizerOptions],
) -> NorMuon:
    """NorMuon for the hidden matrices of a model, AdamW for the rest; arguments as in `muon`.

    Example:
        >>> optimizer = normuon(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), lr=3e-4)
    """
    return build(NorMuon, model, lr, aux_lr, {**options})
