"""Models inside a trainer: FSDP2 shards, and forward methods that TRL and Accelerate replaced.

Every forward pass of a sharded model waits for all processes. Models that are whole in each process
pass through these functions unchanged.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 holds the model."""
    return isinstance(model, FSDPModule)


def reshard(model: nn.Module) -> None:
    """Make the parameters of an FSDP2 model its shards again.

    After a forward pass without a backward one FSDP2 leaves the last layers gathered: the module
    then shows whole copies instead of shards, and writes to those are lost.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def keep_float32_outputs(accelerator: Any) -> None:
    """Let models sharded from now on return float32 outputs.

    Accelerate's mixed precision rounds a sharded model's outputs to bfloat16, and TRL's
    log-probabilities with them, by about 0.01; with one process it does not.
    """
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is not None and plugin.mixed_precision_policy is not None:
        policy = replace(plugin.mixed_precision_policy, output_dtype=None)
        plugin.mixed_precision_policy = policy


def smallest(number: int, model: nn.Module) -> int:
    """The minimum over processes if the model is sharded, else this process's number."""
    return _reduce(number, model, dist.ReduceOp.MIN)


def largest(number: int, model: nn.Module) -> int:
    """The maximum over processes if the model is sharded, else this process's number."""
    return _reduce(number, model, dist.ReduceOp.MAX)


def _reduce(number: int, model: nn.Module, by: dist.ReduceOp.RedOpType) -> int:
    if not is_sharded(model):
        return number
    value = torch.tensor(number, device=next(model.parameters()).device)
    dist.all_reduce(value, by)
    return int(value)


@contextmanager
def as_loaded(model: nn.Module) -> Iterator[None]:
    """Run every module's own class forward inside the block.

    TRL replaces the forward of the model (below PEFT) by one that gives log-probabilities, and
    Accelerate that of the outermost module by one with bfloat16 autocast. Inside the block an
    evaluation computes in the precision of the weights, as before training and after loading, and a
    deep copy does not call the original. Casts inside FSDP2 shards stay.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> layer.forward = lambda x: "replaced"
        >>> with as_loaded(layer):
        ...     print("forward" in vars(layer))
        False
        >>> layer(None)
        'replaced'
    """
    removed = [
        (module, name, vars(module).pop(name))
        for module in model.modules()
        for name in ("forward", "_original_forward")
        if name in vars(module)
    ]
    try:
        yield
    finally:
        for module, name, value in removed:
            vars(module)[name] = value
