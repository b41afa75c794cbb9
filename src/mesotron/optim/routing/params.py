"""The model behind what trainers pass to an optimizer: roles need modules, or at least names.

The generator of `model.parameters()` (verl, LeRobot) still holds the model. From names with tensors
(prime-rl) a stand-in is built, with the module types that the names suggest.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

_CONVS = {
    3: nn.Conv1d,
    4: nn.Conv2d,
    5: nn.Conv3d,
}  # by the dimensions of a weight


def model_behind(params: object) -> nn.Module:
    """The model that the parameters belong to.

    Args:
        params: a model, its `parameters()` or `named_parameters()`, a mapping from names to
            parameters, or (name, parameter) pairs.

    Example:
        >>> layer = nn.Linear(8, 8)
        >>> model_behind(layer.parameters()) is layer
        True
    """
    if isinstance(params, nn.Module):
        return params

    generator = inspect.isgenerator(params)

    if generator:
        owner = inspect.getgeneratorlocals(params).get("self")
    else:
        owner = None

    items: list[Any] = list(params.items() if isinstance(params, Mapping) else params)  # type: ignore
    if isinstance(owner, nn.Module) and _holds_all(items, owner):
        return owner

    if items and all(isinstance(item, tuple) and isinstance(item[1], Tensor) for item in items):
        return _stand_in(items)

    problem = "parameters without names cannot be routed: embeddings look like any matrix"
    raise ValueError(f"{problem}; pass the model, its parameters() or named_parameters()")


def _holds_all(items: list[Any], model: nn.Module) -> bool:
    """Whether the items, some of them with names, are all that the model trains."""
    given = set()
    for item in items:
        param = item[1] if isinstance(item, tuple) else item
        given.add(id(param))

    return all(id(p) in given for p in model.parameters() if p.requires_grad)


def _stand_in(named: Iterable[tuple[str, nn.Parameter]]) -> nn.Module:
    root = _module("")
    for name, param in named:
        *path, leaf = name.split(".")
        above = root
        module = root
        for part in path:
            above = module
            module = _child(above, part)

        module.register_parameter(leaf, param)
        if leaf == "weight" and param.ndim > 1:
            _make_layer(module, path[-1].lower() if path else "", param)
        elif path and "expert" in path[-1] and param.ndim == 3:
            above.num_experts = len(param)  # type: ignore  # by which a router is known

    return root


def _child(module: nn.Module, name: str) -> nn.Module:
    """The child of a name, made if missing; numbered children make their parent a list."""
    if name not in module._modules:
        module.add_module(name, _module(name))

    if name.isdigit() and not isinstance(module, (nn.ModuleList, nn.Sequential)):
        experts = "Expert" in type(module).__name__
        module.__class__ = nn.ModuleList if experts else nn.Sequential

    return module.get_submodule(name)


def _make_layer(module: nn.Module, name: str, weight: nn.Parameter) -> None:
    """Give a module the type of the layer that a weight of this name and shape has."""
    is_table = weight.ndim == 2 and ("emb" in name or name in ("wte", "wpe"))
    layer = nn.Embedding if is_table else _CONVS.get(weight.ndim, nn.Linear)
    module.__class__ = _module(name, layer).__class__
    module.groups = 1  # type: ignore
    module.in_channels = weight.shape[1]  # type: ignore  # of a convolution


def _module(name: str, kind: type[nn.Module] = nn.Module) -> nn.Module:
    """A module whose class is called like it: some roles show in class names, such as "Router"."""
    module = nn.Module()
    module.__class__ = type(name.title().replace("_", ""), (kind,), {})
    return module
