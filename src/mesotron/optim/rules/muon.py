"""Muon: every direction of a matrix's momentum gets the same step."""

from typing import Unpack

from torch import nn

from mesotron.optim.build import Rate, build
from mesotron.optim.optimizer import RoutedOptimizer
from mesotron.optim.options import OptimizerOptions, with_options
from mesotron.optim.registry import rule


@rule("muon", about="all directions of the momentum get the same step")
class Muon(RoutedOptimizer):
    """Muon: momentum whose singular values are all brought to about 1; AdamW for the rest.

    Arguments as in `RoutedOptimizer`, without `promote` and `cutoff`.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(8, 4)
        >>> optimizer = Muon(layer.parameters(), lr=0.01)
        >>> layer(torch.ones(1, 8)).sum().backward()
        >>> optimizer.step()
        >>> round(optimizer.stats()["muon/update_rms"], 4)  # one direction of four, brought to 0.7
        0.0007

    References: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
    """


@with_options(Muon)
def muon(
    model: nn.Module,
    lr: Rate = 1e-3,
    *,
    aux_lr: Rate | None = None,
    **options: Unpack[OptimizerOptions],
) -> Muon:
    """Muon for the hidden matrices of a model, AdamW for the rest.

    Args:
        model: a torch module, including Transformers, PEFT and FSDP2-sharded ones; or, as trainers
            pass it, its `parameters()` or (name, parameter) pairs.
        lr: RMS change of a weight per step over 0.2; AdamW's learning rate carries over.
        aux_lr: learning rate of the auxiliary rule; None is `lr`.
        **options: routing (`per_head`, `overrides`, `modalities`, `lora`: see `mesotron.route`)
            and anything `mesotron.Muon` takes.

    Returns:
        A `torch.optim.Optimizer` with `stats()`. One-dimensional tensors have no weight decay.

    Example:
        >>> model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 10))
        >>> [(g["name"], len(g["params"])) for g in muon(model).param_groups]
        [('adamw', 2), ('adamw_vectors', 2), ('muon', 1)]
    """
    return build(Muon, model, lr, aux_lr, {**options})
