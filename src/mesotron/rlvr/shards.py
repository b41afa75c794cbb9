"""Models sharded by FSDP2, as this room must see them: gathered weights let go, passes in step.

Every forward pass of a sharded model waits for all processes. Nothing here is done to a model that
lies whole in each process.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 holds the model.

    Example:
        >>> is_sharded(nn.Linear(2, 2))
        False
    """
    return isinstance(model, FSDPModule)


def let_go(model: nn.Module) -> None:
    """Make the model's parameters its shards again.

    After a forward pass without a backward one FSDP2 keeps the last layers gathered: the module
    then shows whole copies in place of the shards, and what is written to those is lost.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def keep_float32(accelerator: Any) -> None:
    """Let models that are sharded from now on give what they compute in float32 as it is.

    Accelerate's mixed precision rounds a sharded model's outputs to bfloat16, and so TRL's
    log-probabilities, by a hundredth; with one process it does not.
    """
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is not None and plugin.mixed_precision_policy is not None:
        policy = replace(plugin.mixed_precision_policy, output_dtype=None)
        plugin.mixed_precision_policy = policy


def smallest(number: int, model: nn.Module) -> int:
    """The least of all processes' numbers if the model is sharded, else this process's own.

    Example:
        >>> smallest(3, nn.Linear(2, 2))
        3
    """
    return _agree(number, model, dist.ReduceOp.MIN)


def largest(number: int, model: nn.Module) -> int:
    """The greatest of all processes' numbers if the model is sharded, else this process's own."""
    return _agree(number, model, dist.ReduceOp.MAX)


def _agree(number: int, model: nn.Module, by: dist.ReduceOp.RedOpType) -> int:
    if not is_sharded(model):
        return number
    held = torch.tensor(number, device=next(model.parameters()).device)
    dist.all_reduce(held, by)
    return int(held)
