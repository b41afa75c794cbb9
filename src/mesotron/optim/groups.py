"""Param groups: reading what a user passes, refusing what could not work before any state exists,
and sorting the parameters for a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mesotron.optim.rules import AUXILIARY_RULES, RULES, SPECTRAL_RULES, refuse_flat_shard
from mesotron.optim.spectral_step import group_filter
from mesotron.optim.views import View
from mesotron.spectral.scale import check_scale

# No float16: a gradient of 1e-9 or 1e6 is not a float16.
_DTYPES = ("float32", "bfloat16", "float64")


def split_by_rank(params: Iterable[Any], *, rule: str, aux: str) -> list[dict[str, Any]]:
    """Param groups from any form that PyTorch accepts; groups without a rule are parted by the
    number of dimensions: vectors go to `aux`, convolutions get a group of their own.

    Args:
        params: tensors, (name, tensor) pairs, or group dicts.
        rule: the rule of matrices in groups without one.
        aux: the rule of tensors with fewer than two dimensions there.
    """
    items = list(params)
    if not items:
        raise ValueError(
            "the optimizer got an empty list of parameters: pass model.parameters() or groups"
        )
    groups = items if isinstance(items[0], dict) else [{"params": items}]
    out: list[dict[str, Any]] = []
    for group in groups:
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        if "rule" in group:
            out.append({**group, "params": members})
            continue
        vectors = [x for x in members if _tensor(x).ndim < 2]
        matrices = [x for x in members if _tensor(x).ndim >= 2]
        convolutions = [x for x in matrices if _tensor(x).ndim >= 4]
        if convolutions and group.get("view") is None:
            matrices = [x for x in matrices if _tensor(x).ndim < 4]
            out.append({**group, "params": convolutions, "rule": rule})
        if matrices:
            out.append({**group, "params": matrices, "rule": rule})
        if vectors:
            out.append({**group, "params": vectors, "rule": aux, "view": None, "name": None})
    return out


def own_filter(group: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """A "muon" group inside `Pion`, or a "pion" one inside `Muon`, has its own rule's filter and
    not what the constructor says of the other's, unless it names a filter itself."""
    rules = (group["rule"], defaults["rule"])
    if "filter" in group or rules not in (("muon", "pion"), ("pion", "muon")):
        return group
    own = {"steps": None, "promote": 0, "cutoff": None, "rank": None}
    return {**own, **group, "filter": group["rule"]}


def check_group(group: dict[str, Any]) -> None:
    """Refuse a group that would fail later or be silently wrong."""
    if group["rule"] not in RULES:
        raise ValueError(f"rule={group['rule']!r} must be one of {', '.join(RULES)}")
    for key, low, high in (
        ("lr", 0, None),
        ("momentum", 0, 1),
        ("weight_decay", 0, None),
        ("eps", 0, None),
    ):
        value = group[key]
        if not isinstance(value, Tensor) and not (value >= low and (high is None or value < high)):
            bound = f"at least {low}" + ("" if high is None else f" and below {high}")
            raise ValueError(f"{key}={value!r} must be {bound}")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"betas={group['betas']!r} must each be at least 0 and below 1")
    for p in group["params"]:
        refuse_flat_shard(p)
        if not p.is_floating_point():
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is {p.dtype}, and every rule here needs "
                "real floating-point numbers: hold a complex one as two real ones"
            )
    for key in ("lr", "momentum", "weight_decay"):
        if isinstance(group[key], Tensor) and group[key].ndim:
            raise ValueError(
                f"{key} is a tensor of shape {tuple(group[key].shape)}: give it without "
                "dimensions, torch.tensor(1e-3)"
            )
    if group["rule"] in SPECTRAL_RULES:
        _check_spectral(group)


def _check_spectral(group: dict[str, Any]) -> None:
    if group["rule"] == "pion" and group["filter"] != "pion":
        raise ValueError(
            f"rule='pion' has the pion filter, not {group['filter']!r}: use rule='muon' for that"
        )
    group_filter(group)
    check_scale(group["scale"])
    for key in ("dtype", "momentum_dtype"):
        if group[key] is not None and group[key] not in _DTYPES:
            raise ValueError(f"{key}={group[key]!r} must be None or one of {', '.join(_DTYPES)}")
    view = group["view"]
    for p in group["params"]:
        if p.ndim < 2:
            raise ValueError(
                f"rule={group['rule']!r} needs matrices but got shape {tuple(p.shape)}: "
                "put it into a group with rule='adamw'"
            )
        if view is not None:
            View.parse(view).windows(torch.empty(p.shape, device="meta"))


def check_same_rules(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Refuse a checkpoint of another rule: its settings would replace the rule without a word."""
    for group, other in zip(groups, saved, strict=False):  # PyTorch refuses another number itself
        if other.get("rule") != group["rule"]:
            found = f"by rule {other['rule']!r}" if "rule" in other else "by another optimizer"
            raise ValueError(
                f"the checkpoint's group of {len(other['params'])} parameters was trained {found}, "
                f"here its rule is {group['rule']!r}: build the same optimizer, or take the "
                "momentum alone over with mesotron.import_state"
            )


class Place(NamedTuple):
    """A parameter, its group, and its place among all parameters of the optimizer."""

    param: Tensor
    group: dict[str, Any]
    number: int


class Sorted(NamedTuple):
    """Whom a step concerns.

    Args:
        auxiliary: AdamW's and SGD's, with a gradient, by group and device.
        spectral: the matrices with a gradient, by device.
        sharded: DTensors of every rule, with a gradient or without: ranks may differ in which they
            have, so they agree on that together.
    """

    auxiliary: dict[tuple[str, torch.device], list[Place]]
    spectral: dict[torch.device, list[Place]]
    sharded: list[Place]

    @property
    def idle(self) -> bool:
        """No parameter has a gradient."""
        here = self.auxiliary or self.spectral
        return not here and all(place.param.grad is None for place in self.sharded)


def sort_parameters(groups: list[dict[str, Any]]) -> Sorted:
    """Who is stepped by whom. Empty tensors are left out."""
    found = Sorted(defaultdict(list), defaultdict(list), [])
    pairs = [(p, group) for group in groups for p in group["params"]]
    for number, (p, group) in enumerate(pairs):
        place = Place(p, group, number)
        if not p.numel():
            continue
        if isinstance(p, DTensor):
            if p.requires_grad:
                found.sharded.append(place)
        elif p.grad is None:
            continue
        elif group["rule"] in AUXILIARY_RULES:
            found.auxiliary[group["name"], p.device].append(place)
        else:
            found.spectral[p.device].append(place)
    return found


def default_view(group: dict[str, Any]) -> str:
    """The view of a hand-made group: one matrix each, convolutions flattened; a stack must be
    said."""
    if group["rule"] not in SPECTRAL_RULES:
        return "whole"
    ndims = {p.ndim for p in group["params"]}
    if ndims == {2}:
        return "whole"
    if min(ndims) >= 4:
        return "conv"
    shapes = sorted({tuple(p.shape) for p in group["params"] if p.ndim != 2})
    raise ValueError(
        f"how to read tensors of shape {shapes[0]} as matrices cannot be told: give them a "
        "group of their own with view='stack' (leading dims hold separate matrices) or view='conv' "
        "(out, in, kernel)"
    )


def _tensor(item: Any) -> Tensor:
    tensor = item[1] if isinstance(item, tuple) else item
    if not isinstance(tensor, Tensor):
        raise ValueError(
            f"the optimizer got {type(tensor).__name__} {tensor!r} where a parameter was expected"
        )
    return tensor
