"""Pion: strong directions of a matrix's momentum get a full step, weak ones none."""

from typing import Unpack

from torch import nn

from mesotron.optim.build import Rate, build
from mesotron.optim.optimizer import RoutedOptimizer
from mesotron.optim.options import OptimizerOptions, with_options
from mesotron.optim.registry import rule


@rule("pion", about="strong directions get a full step, weak ones none", filter="pion")
class Pion(RoutedOptimizer):
    """Pion: Muon with a high-pass filter. Strong directions go to 1, weak ones, which are mostly
    noise, to 0.

    The strength is `promote` or `cutoff`; other arguments as in `RoutedOptimizer`, without `filter`
    and `rank`.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(8, 4)
        >>> optimizer = Pion(layer.parameters(), lr=0.01, cutoff="aligned")

    References: Fan et al., "Pion", 2026, arXiv 2605.19282. (Not the orthogonal-equivalence
        optimizer of the same name, arXiv 2605.12492.)
    """


@with_options(Pion)
def pion(
    model: nn.Module,
    lr: Rate = 1e-3,
    *,
    aux_lr: Rate | None = None,
    **options: Unpack[OptimizerOptions],
) -> Pion:
    """Pion for the hidden matrices of a model, AdamW for the rest.

    The strength is `promote=` or `cutoff=`, as in `mesotron.Pion`; `per_head=True` filters
    attention projections head by head, as the paper does for language models;
    `modalities={"vision": "muon", "action_head": "pion"}` is its recipe for
    vision-language-action models. Other arguments as in `muon`.

    Example:
        >>> optimizer = pion(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), cutoff="aligned")
    """
    return build(Pion, model, lr, aux_lr, {**options})
