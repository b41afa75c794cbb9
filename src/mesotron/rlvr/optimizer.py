"""The optimizer of a training run: built from its config after the model is wrapped, and clipped.

A step of a spectral rule does not feel the size of a gradient, so clipping touches the auxiliary
groups alone unless asked: clipped by the norm of everything, AdamW's step would depend on matrices
that it does not train. Momentum does feel it: see `clip_gradients`.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mesotron.config.training import OptimConfig
from mesotron.optim import BUILDERS, RoutedOptimizer
from mesotron.optim.rules import AUXILIARY_RULES


def build_optimizer(model: nn.Module, config: OptimConfig) -> RoutedOptimizer:
    """The optimizer that a config names, over the trainable weights of a model.

    Args:
        model: wrapped already (LoRA, FSDP2): whatever is wrapped later would not train.
        config: see `OptimConfig`.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        >>> optimizer = build_optimizer(model, OptimConfig(name="pion", cutoff="noise"))
        >>> optimizer.param_groups[0]["lr"]
        1e-05
    """
    if config.name not in BUILDERS:
        raise ValueError(f"optim.name = {config.name!r} must be one of {', '.join(BUILDERS)}")
    options: dict[str, Any] = {"weight_decay": config.weight_decay, "per_head": config.per_head}
    if config.name != "adamw":
        options |= {"momentum": config.momentum, "scale": config.scale, "aux_lr": config.aux_lr}
        options["fused"] = None if config.fused else False
    strength = {"promote": config.promote, "cutoff": config.cutoff}
    given = {key: value for key, value in strength.items() if value is not None}
    if given and config.name != "pion":
        key, value = next(iter(given.items()))
        raise ValueError(f"optim.{key} = {value} is Pion's: use --optim.name pion or leave it out")
    if config.rank is not None:
        if not config.name.startswith("muon"):
            raise ValueError(
                f"optim.rank = {config.rank} is Muon's: use --optim.name muon or leave it out"
            )
        options |= {"filter": "low_rank", "rank": config.rank}
    optimizer = BUILDERS[config.name](model, config.lr, **options, **given)
    check_all_train(model, optimizer)
    return optimizer


def check_settings(config: OptimConfig) -> None:
    """Refuse an optimizer's settings before a model is loaded: try them on a matrix and its bias.

    Example:
        >>> check_settings(OptimConfig(name="pion", cutoff=0.2))
    """
    build_optimizer(nn.Linear(8, 8), replace(config, per_head=False))  # heads are a model's


def check_all_train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that misses a trainable weight of the model, or holds one twice.

    An optimizer built before LoRA wrapping raises nothing by itself: the run goes on, and the
    adapters never change.
    """
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    missing = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in set(held)]
    if missing:
        raise ValueError(
            f"{missing[0]!r} trains but is in no group of the optimizer ({len(missing)} such): "
            "build the optimizer after the model is wrapped, or give the trainer optim= instead"
        )
    if len(set(held)) < len(held):
        raise ValueError("a weight is in two groups of the optimizer: give each to one alone")


class Norms(NamedTuple):
    """Norms of a gradient before clipping: of all weights, and of the auxiliary groups."""

    total: Tensor
    auxiliary: Tensor


def clip_gradients(optimizer: RoutedOptimizer, max_norm: float, matrices: bool = False) -> Norms:
    """Clip the gradient of the auxiliary groups together to a norm; spectral groups if asked.

    A first gradient r times as large as those after it (a format that two steps teach) outweighs
    all of them in a momentum mu for ln(1 + r^2 (1 - mu^2)) / (2 ln(1 / mu)) steps if they have
    nothing in common, 23 for r = 10 and mu = 0.95, and a spectral rule makes each of these steps at
    full size. With `matrices` the spectral groups are clipped too, by their own norm; not where it
    is no finite number: each matrix with such a gradient is skipped by itself, and the others would
    be scaled to nothing.

    Args:
        optimizer: its gradients are there and unscaled; DTensors included.
        max_norm: of the auxiliary groups' gradient, and of the spectral groups'.
        matrices: whether spectral groups are clipped.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> optimizer = build_optimizer(model, OptimConfig())
        >>> model(torch.ones(1, 4)).sum().mul(100).backward()
        >>> before = model[0].weight.grad.clone()
        >>> norms = clip_gradients(optimizer, max_norm=1.0)
        >>> bool(norms.auxiliary > 1), torch.equal(model[0].weight.grad, before)
        (True, True)
    """
    auxiliary: list[Tensor] = []
    spectral: list[Tensor] = []
    for group in optimizer.param_groups:
        side = auxiliary if group["rule"] in AUXILIARY_RULES else spectral
        side += [p for p in group["params"] if p.grad is not None]
    meshes = [_by_mesh(auxiliary), _by_mesh(spectral)]
    norms = [_norm(part) for part in meshes]
    for params in meshes[0]:
        clip_grads_with_norm_(params, max_norm, norms[0])
    for params in meshes[1] if matrices else ():
        finite = torch.where(norms[1].isfinite(), norms[1], 0.0)
        clip_grads_with_norm_(params, max_norm, finite)
    if not spectral:  # bringing the host's zero to a GPU would wait for it
        return Norms(norms[0], norms[0])
    return Norms(torch.hypot(norms[0], norms[1].to(norms[0].device)), norms[0])


def _by_mesh(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """Weights apart by the mesh of their gradient: no norm spans two meshes."""
    found = defaultdict(list)
    for p in params:
        found[p.grad.device_mesh if isinstance(p.grad, DTensor) else None].append(p)
    return list(found.values())


def _norm(meshes: list[list[Tensor]]) -> Tensor:
    norms = [get_total_norm([p.grad for p in params if p.grad is not None]) for params in meshes]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return torch.linalg.vector_norm(torch.stack(whole)) if whole else torch.zeros(())
