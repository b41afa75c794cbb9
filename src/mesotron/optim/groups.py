"""Param groups: rule names, reading and checking groups, sorting them for a step, and clipping."""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mesotron.optim.lora import check_pairs
from mesotron.optim.step import group_filter
from mesotron.optim.views import FSDP2, View
from mesotron.spectral.routing import AUXILIARY_RULES, RULES, SPECTRAL_RULES
from mesotron.spectral.scale import check_scale

if TYPE_CHECKING:
    pass

# No float16: a gradient of 1e-9 or 1e6 is not a float16.
_DTYPES = ("float32", "bfloat16", "float64")


def split_by_rank(params: Iterable[Any], *, rule: str, aux: str) -> list[dict[str, Any]]:
    """Param groups from any form PyTorch accepts. Groups without a rule are split by number of
    dimensions: vectors go to `aux`, matrices to `rule`, convolutions to a group of their own."""
    items = list(params)
    if not items:
        raise ValueError("the optimizer got an empty list of parameters")

    groups = items if isinstance(items[0], dict) else [{"params": items}]
    out: list[dict[str, Any]] = []
    for given in groups:
        group = dict(given)
        members = group["params"]
        own_aux = group.pop("aux", aux)

        members = [members] if isinstance(members, Tensor) else list(members)
        if "rule" in group:
            out.append({**group, "params": members})
            continue

        parts: dict[str, list] = {
            "conv": [],
            "matrix": [],
            "vector": [],
        }
        for item in members:
            tensor = item[1] if isinstance(item, tuple) else item
            if not isinstance(tensor, Tensor):
                raise ValueError(f"expected a parameter, got {type(tensor).__name__} {tensor!r}")

            conv = tensor.ndim >= 4 and group.get("view") is None
            parts["conv" if conv else "matrix" if tensor.ndim >= 2 else "vector"].append(item)

        vectors = {"rule": own_aux, "view": None, "name": None}
        for kind, part in parts.items():
            if part:
                own = vectors if kind == "vector" else {"rule": rule}
                out.append({**group, "params": part, **own})

    return out


def own_filter(group: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Give a "pion" group inside another class, or a "muon" one inside `Pion`, its own rule's
    filter instead of the constructor's, unless the group names a filter itself."""
    rule = group["rule"]
    inherits = (rule == "pion") == (defaults["rule"] == "pion")
    if "filter" in group or rule not in SPECTRAL_RULES or inherits:
        return group

    own = {
        "steps": None,
        "promote": 0,
        "cutoff": None,
        "rank": None,
    }
    return {
        **own,
        **group,
        "filter": "pion" if rule == "pion" else "muon",
    }


def check_group(group: dict[str, Any]) -> None:
    if group["rule"] not in RULES:
        raise ValueError(f"rule={group['rule']!r} must be one of {', '.join(RULES)}")

    for key in ("lr", "momentum", "weight_decay", "eps"):
        value = group[key]
        if isinstance(value, Tensor):
            if value.ndim:
                raise ValueError(f"{key} has shape {tuple(value.shape)}, not one number")
        elif isinstance(value, str | None) or not value >= 0 or (key == "momentum" and value >= 1):
            bound = "at least 0" + (" and below 1" if key == "momentum" else "")
            raise ValueError(f"{key}={value!r} must be a number, {bound}")

    if not all(0 <= beta < 1 for beta in (*group["betas"], group["beta2"])):
        text = f"betas={group['betas']!r} and beta2={group['beta2']!r}"
        raise ValueError(f"{text} must each be at least 0 and below 1")

    group_filter(group)
    check_scale(group["scale"])

    for p in group["params"]:
        check_not_flat(p)
        if not p.is_floating_point():
            raise ValueError(f"{p.dtype} cannot be trained: store a complex parameter as two real")

    if group["rule"] not in SPECTRAL_RULES:
        return
    if group["rule"] == "pion" and group["filter"] != "pion":
        raise ValueError(f"filter={group['filter']!r} belongs to rule='muon', not to rule='pion'")
    if group["leash"] and group["filter"] == "polar_express" and (group["steps"] or 5) < 5:
        raise ValueError(f"leash needs steps=5 with filter='polar_express', not {group['steps']}")
    if group["leash"] is not None and not group["leash"] > 0:
        raise ValueError(f"leash={group['leash']!r} must be above 0, a share of a starting norm")
    if group["rule"] == "normuon" and any(isinstance(p, DTensor) for p in group["params"]):
        raise ValueError("rule='normuon' has no sharded step: use 'muon' for DTensor parameters")

    if group["pairs"] is not None:
        if group["rule"] == "normuon":
            raise ValueError("rule='normuon' does not step LoRA products: use 'muon' or 'pion'")
        check_pairs(group)

    for key in ("dtype", "momentum_dtype"):
        if group[key] is not None and group[key] not in _DTYPES:
            raise ValueError(f"{key}={group[key]!r} must be None or one of {', '.join(_DTYPES)}")

    for p in group["params"]:
        if p.ndim < 2:
            raise ValueError(f"{tuple(p.shape)} is no matrix: give it a group with rule='adamw'")
        if group["view"] is not None and group["pairs"] is None:
            View.parse(group["view"]).windows(torch.empty(p.shape, device="meta"))


def check_not_flat(p: Tensor, name: str = "a parameter", wrapped: bool = False) -> None:
    # `_fsdp_flattened` is FSDP1's mark on the parameters that use_orig_params=True shows.
    flat = type(p).__name__ == "FlatParameter" or getattr(p, "_fsdp_flattened", False)
    zero3 = getattr(p, "ds_id", None) is not None
    if zero3 or wrapped or flat:
        raise ValueError(
            f"{name} (shape {tuple(p.shape)}) is a flat or empty shard of "
            f"{'DeepSpeed ZeRO-3' if zero3 else 'FSDP1'}; {FSDP2}"
        )


def check_same_rules(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Reject a checkpoint of another rule, whose settings would silently replace the rule, and
    one with the parameters in other groups."""
    known = {name for group in groups for name in _names(group)}
    for group, other in zip(groups, saved, strict=False):  # PyTorch checks the number of groups
        if other.get("rule") != group["rule"]:
            source = f"rule {other['rule']!r}" if "rule" in other else "another optimizer"
            raise ValueError(
                f"the checkpoint's group of {len(other['params'])} parameters was trained by "
                f"{source}, but its rule here is {group['rule']!r}: build the same optimizer, or "
                "take over the momentum alone with mesotron.import_state"
            )

        for own, its in zip(_names(group), _names(other), strict=False):
            if own != its and its in known:  # a model whose parameters were renamed is loaded
                raise ValueError(f"the checkpoint has {its} where {own} is: use its overrides")


def _names(group: dict[str, Any]) -> list[str]:
    wrappers = r"(^|\.)(?:module|_orig_mod)\."
    return [re.sub(wrappers, r"\1", name) for name in group.get("param_names", ())]


def default_view(group: dict[str, Any]) -> str:
    if group["rule"] not in SPECTRAL_RULES:
        return "whole"

    ndims = {p.ndim for p in group["params"]}
    if ndims <= {2} or group["pairs"] is not None:
        return "whole"
    if min(ndims) >= 4:
        return "conv"

    shape = min(tuple(p.shape) for p in group["params"] if p.ndim != 2)
    raise ValueError(f"ambiguous shape {shape}: give it a group with view='stack' or view='conv'")


class Place(NamedTuple):
    """A parameter, its group, and its index among all parameters of the optimizer."""

    param: Tensor
    group: dict[str, Any]
    number: int


class Work(NamedTuple):
    """The parameters of one step, LoRA products excepted; those that are not sharded have a
    gradient."""

    auxiliary: dict[tuple[str, torch.device], list[Place]]
    spectral: dict[torch.device, list[Place]]
    # Of every rule, with or without a gradient: ranks may differ in which gradients they have, so
    # they agree on that together.
    sharded: list[Place]


def sort_parameters(groups: list[dict[str, Any]]) -> Work:
    work = Work(defaultdict(list), defaultdict(list), [])
    for number, (p, group) in enumerate((p, g) for g in groups for p in g["params"]):
        place = Place(p, group, number)
        if not p.numel() or group["pairs"] is not None:
            continue

        if isinstance(p, DTensor):
            if p.requires_grad:
                work.sharded.append(place)
        elif p.grad is None:
            continue
        elif group["rule"] in AUXILIARY_RULES:
            work.auxiliary[group["name"], p.device].append(place)
        else:
            work.spectral[p.device].append(place)

    return work
