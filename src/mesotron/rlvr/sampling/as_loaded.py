"""A model as it was loaded, inside a trainer: without the forward methods that were hung on it.

TRL hangs a head that gives log-probabilities on the model, below PEFT where there is LoRA, and
Accelerate a bfloat16 autocast on the outermost module. What FSDP2 casts inside of its shards stays.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

# Attributes of a module that stand before those of its class, and Accelerate's way back.
HUNG = ("forward", "_original_forward")


@contextmanager
def as_loaded(model: nn.Module) -> Iterator[None]:
    """Let every module of a model run its class's own forward inside the block.

    An evaluation computes in the precision of the weights, as it did before a trainer was built and
    as it will when they are loaded again; and a copy made inside does not call the original.

    Args:
        model: of a trainer, or any other.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> layer.forward = lambda x: "hung"
        >>> with as_loaded(layer):
        ...     print("forward" in vars(layer))
        False
        >>> layer(None)
        'hung'
    """
    taken = [
        (module, name, vars(module).pop(name))
        for module in model.modules()
        for name in HUNG
        if name in vars(module)
    ]
    try:
        yield
    finally:
        for module, name, value in taken:
            vars(module)[name] = value
