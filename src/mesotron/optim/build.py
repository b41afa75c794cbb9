"""From a model to its optimizer: route every parameter, make the groups, build.

`mesotron.muon(model)` and its siblings are `build` for one class; `builder` makes one for a rule
that has no function of its own.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from mesotron.config.rules import AUXILIARY_RULES, SPECTRAL_RULES
from mesotron.optim.lora import pair_up
from mesotron.optim.optimizer import RoutedOptimizer
from mesotron.optim.options import ROUTING, check_options
from mesotron.optim.routing import RoutingTable, route
from mesotron.optim.routing.params import model_behind

Rate = float | Tensor


def build(
    cls: type[RoutedOptimizer],
    model: nn.Module,
    lr: Rate,
    aux_lr: Rate | None,
    options: dict[str, Any],
) -> Any:
    """An optimizer of a class for a routed model; `options` are of the routing and of the class."""
    check_options(cls, options)
    routing: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in options.items():
        taker = routing if key in ROUTING else rest
        taker[key] = value

    model = model_behind(model)

    aux = rest.get("aux") or cls.default_aux
    table = route(model, matrix=cls.rule, aux=aux, **routing)
    leashed = rest.get("leash") is not None
    if leashed:
        _check_leash(table)

    if aux_lr is None and aux in AUXILIARY_RULES:
        aux_lr = AUXILIARY_RULES[aux].lr

    groups = []
    for group in table.groups(model):
        # aux_lr is in the unit of the auxiliary rule; a matrix of another rule keeps lr.
        rate = lr if group["rule"] != aux or aux_lr is None else aux_lr
        scale = group.pop("lr_scale")
        group["lr"] = rate if scale == 1 else rate * scale

        if group["view"].startswith("product"):
            group |= pair_up(model, group, norms=leashed)

        groups += _vectors_apart(group)

    optimizer = cls(groups, lr=lr, **rest)
    optimizer.table = table

    return optimizer


def builder(cls: type[RoutedOptimizer]) -> Callable[..., RoutedOptimizer]:
    """The function of a class that takes a model, as `mesotron.muon` is for `Muon`."""

    def build_for(
        model: nn.Module, lr: Rate = 1e-3, *, aux_lr: Rate | None = None, **options: Any
    ) -> RoutedOptimizer:
        return build(cls, model, lr, aux_lr, options)

    return build_for


def _check_leash(table: RoutingTable) -> None:
    spectral = [row for row in table if row.rule in SPECTRAL_RULES]
    for row in spectral:
        if row.role in ("lora_A", "lora_B") and not row.view.startswith("product"):
            raise ValueError("leash: a LoRA factor has no start to stay near; pass lora='product'")

    if not spectral:
        raise ValueError(
            "leash needs matrices under a spectral rule: AdamW's steps are not bounded"
        )


def _vectors_apart(group: dict[str, Any]) -> list[dict[str, Any]]:
    """The matrices of a group, and its norm weights and biases without weight decay."""
    name = f"{group['name']}_vectors"
    matrices = {**group, "params": [], "param_names": []}
    vectors = {**matrices, "name": name, "params": [], "param_names": [], "weight_decay": 0.0}
    for p, param_name in zip(group["params"], group["param_names"], strict=True):
        part = vectors if p.ndim < 2 else matrices
        part["params"].append(p)
        part["param_names"].append(param_name)

    return [part for part in (matrices, vectors) if part["params"]]
