"""Builders: a model in, one routed optimizer out.

These are the good defaults; the classes `Muon` and `Pion` are for groups made by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from mesotron.optim.optimizer import Muon, Pion
from mesotron.optim.routed import RoutedOptimizer
from mesotron.optim.routing import route

Lr = float | Tensor
# SGD's step is the gradient itself, so its rate has another unit than Muon's and needs its own
# default; a sweep should include it.
SGD_LR = 0.1


def muon(model: nn.Module, lr: Lr = 1e-3, *, aux_lr: Lr | None = None, **options: Any) -> Muon:
    """Muon for the hidden matrices of a model, AdamW for the rest.

    Args:
        model: a torch module; Transformers, PEFT and FSDP2-sharded ones included.
        lr: RMS change of a weight per step over 0.2; AdamW's learning rate carries over.
        aux_lr: of the auxiliary rule; None is `lr`.
        **options: routing (`per_head`, `overrides`, `modalities`, `lora`: see `mesotron.route`)
            and anything that `mesotron.Muon` takes.

    Returns:
        A `torch.optim.Optimizer` with `stats()`. Tensors of one dimension have no weight decay.

    Example:
        >>> model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 10))
        >>> [(g["name"], len(g["params"])) for g in muon(model).param_groups]
        [('adamw', 2), ('adamw_vectors', 2), ('muon', 1)]
    """
    return _build(Muon, model, "muon", "adamw", lr, aux_lr, options)


def pion(model: nn.Module, lr: Lr = 1e-3, *, aux_lr: Lr | None = None, **options: Any) -> Pion:
    """Pion for the hidden matrices of a model, AdamW for the rest.

    The strength is `promote=` or `cutoff=`, as in `mesotron.Pion`; `per_head=True` filters
    attention projections head by head, as the paper does for language models;
    `modalities={"vision": "muon", "action_head": "pion"}` is its recipe for
    vision-language-action models. Other arguments as in `muon`.

    Example:
        >>> optimizer = pion(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), cutoff="noise")
    """
    return _build(Pion, model, "pion", "adamw", lr, aux_lr, options)


def muon_sgd(model: nn.Module, lr: Lr = 1e-3, *, aux_lr: Lr | None = None, **options: Any) -> Muon:
    """Muon for the hidden matrices, SGD with momentum for the rest: no second moment anywhere.

    `aux_lr` is in SGD's unit, the gradient itself; None is 0.1. Other arguments as in `muon`.

    Example:
        >>> optimizer = muon_sgd(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), lr=3e-4)
    """
    return _build(Muon, model, "muon", "sgd", lr, SGD_LR if aux_lr is None else aux_lr, options)


def adamw(model: nn.Module, lr: Lr = 1e-3, **options: Any) -> Muon:
    """AdamW for everything, with the same routing table, groups and statistics: the fair baseline.

    Example:
        >>> [g["rule"] for g in adamw(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))).param_groups]
        ['adamw', 'adamw']
    """
    return _build(Muon, model, "adamw", "adamw", lr, None, options)


BUILDERS = {"muon": muon, "pion": pion, "muon_sgd": muon_sgd, "adamw": adamw}
_ROUTING = ("per_head", "overrides", "modalities", "lora")


def _build(
    cls: type[RoutedOptimizer],
    model: nn.Module,
    matrix: str,
    aux: str,
    lr: Lr,
    aux_lr: Lr | None,
    options: Mapping[str, Any],
) -> Any:
    routing = {key: options[key] for key in _ROUTING if key in options}
    table = route(model, matrix=matrix, aux=aux, **routing)
    groups = []
    for group in table.groups(model):
        # aux_lr is in the unit of the auxiliary rule; a matrix of another rule keeps lr.
        rate = lr if group["rule"] != aux or aux_lr is None else aux_lr
        scale = group.pop("lr_scale")
        group["lr"] = rate if scale == 1 else rate * scale
        groups += _split_vectors(group)
    rest = {key: value for key, value in options.items() if key not in _ROUTING}
    optimizer = cls(groups, lr=lr, aux=aux, **rest)
    optimizer.table = table
    return optimizer


def _split_vectors(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Norm weights and biases apart, without weight decay."""
    halves = []
    for vectors in (False, True):
        picked = [i for i, p in enumerate(group["params"]) if (p.ndim < 2) == vectors]
        if picked:
            half = {
                **group,
                **{k: [group[k][i] for i in picked] for k in ("params", "param_names")},
            }
            if vectors:
                half |= {"name": f"{group['name']}_vectors", "weight_decay": 0.0}
            halves.append(half)
    return halves
