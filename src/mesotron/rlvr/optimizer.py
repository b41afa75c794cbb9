"""The optimizer of a training run, built from its config after the model is wrapped."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mesotron.config.training import OptimConfig
from mesotron.optim import BUILDERS, RoutedOptimizer


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
