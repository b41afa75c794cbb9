"""The options of `mesotron.muon` and its siblings, for editors, notebooks and error messages.

Each function takes what its class takes and what the routing takes. A type checker reads them here,
`inspect.signature` and the completion of a notebook get them from the class.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, TypeVar

from torch import Tensor

from mesotron.config.base import suggest
from mesotron.optim.optimizer import RoutedOptimizer
from mesotron.optim.routing import route

F = TypeVar("F", bound=Callable[..., Any])

# What other libraries call them.
OTHER_NAMES = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "ns_steps": "steps",
    "ns_dtype": "dtype",
    "adamw_lr": "aux_lr",
    "adam_lr": "aux_lr",
    "adamw_betas": "betas",
}
ROUTING = ("per_head", "overrides", "modalities", "lora")


class OptimizerOptions(TypedDict, total=False):
    """Of the routing (see `mesotron.route`), then of the optimizer (see `mesotron.Muon`)."""

    per_head: bool | Mapping[str, int]
    overrides: Mapping[str, Any] | None
    modalities: Mapping[str, str] | None
    lora: str

    momentum: float | Tensor
    nesterov: bool
    weight_decay: float | Tensor
    scale: str | float
    filter: str | None
    steps: int | None
    promote: int
    cutoff: float | str | None
    rank: int | None
    betas: tuple[float, float]
    eps: float
    beta2: float
    leash: float | None
    lora_unit: str
    aux: str | None
    dtype: str | None
    momentum_dtype: str | None
    batched: bool
    fused: bool | None
    foreach: bool | None
    capturable: bool | None
    maximize: bool
    differentiable: bool


def options_of(cls: type[RoutedOptimizer]) -> dict[str, inspect.Parameter]:
    """The keywords that the function of a class takes, beside `lr` and `aux_lr`."""
    routing = inspect.signature(route).parameters
    known = {name: routing[name] for name in ROUTING}
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            known[name] = parameter

    return known


def check_options(cls: type[RoutedOptimizer], options: Mapping[str, Any]) -> None:
    known = options_of(cls)
    for name in options:
        if name in known:
            continue

        if name in OTHER_NAMES:
            hint = f" (did you mean {OTHER_NAMES[name]}?)"
        else:
            hint = suggest(name, [*known, "lr", "aux_lr"])

        function = cls.__name__.lower()
        raise TypeError(f"{function} got an unexpected keyword argument {name!r}{hint}")


def with_options(cls: type[RoutedOptimizer]) -> Callable[[F], F]:
    """Show a function's `**options` one by one."""

    def show(function: F) -> F:
        own = inspect.signature(function)
        listed = []
        for parameter in own.parameters.values():
            if parameter.kind is not parameter.VAR_KEYWORD:
                listed.append(parameter)

        for parameter in options_of(cls).values():
            listed.append(parameter.replace(kind=parameter.KEYWORD_ONLY))

        function.__signature__ = own.replace(parameters=listed)  # type: ignore[attr-defined]
        return function

    return show
