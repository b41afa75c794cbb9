"""Models sharded by FSDP2, as this room must see them: gathered weights let go, passes in step.

Every forward pass of a sharded model waits for all processes. Nothing here is done to a model that
lies whole in each process.
"""

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
