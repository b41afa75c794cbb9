"""Models inside a trainer, which may shard them (FSDP2) and replace their forward methods.

Models that are whole in each process pass through unchanged.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn


def is_sharded(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def reshard(model: nn.Module) -> None:
    """Make the parameters of an FSDP2 model its shards again.

    After a forward pass without a backward one FSDP2 leaves the last layers gathered. The module
    then shows whole copies instead of shards, and writes to those are lost.
    """
    for module in model.modules():
        if is_sharded(module):
            module.reshard()  # pyright: ignore


def smallest(number: int, model: nn.Module) -> int:
    """The minimum over processes if the model is sharded, else this process's number."""
    return -largest(-number, model)


def largest(number: int, model: nn.Module) -> int:
    """The maximum over processes if the model is sharded, else this process's number."""
    if not is_sharded(model):
        return number

    value = torch.tensor(number, device=next(model.parameters()).device)
    dist.all_reduce(value, dist.ReduceOp.MAX)

    return int(value)


@contextmanager
def as_loaded(model: nn.Module) -> Iterator[None]:
    """Run every module's own class forward inside the block.

    TRL and Accelerate replace some by ones that give log-probabilities or autocast to bfloat16, and
    that a deep copy would share with the original. Casts inside FSDP2 shards stay.
    """
    removed = []
    for module in model.modules():
        for name in ("forward", "_original_forward"):
            if name in vars(module):
                removed.append((module, name, vars(module).pop(name)))

    try:
        yield
    finally:
        for module, name, value in removed:
            vars(module)[name] = value
