"""Param groups: reading what a user passes, checking it, and sorting it for a step."""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mesotron.config.rules import AUXILIARY_RULES, SPECTRAL_RULES, all_rules
from mesotron.optim.flat import check_not_flat
from mesotron.optim.lora import check_pairs
from mesotron.optim.registry import Group, State
from mesotron.optim.state import ParamStep
from mesotron.optim.step import group_filter
from mesotron.optim.views import View
from mesotron.spectral.scale import check_scale

# No float16: a gradient of 1e-9 or 1e6 is not a float16.
_DTYPES = ("float32", "bfloat16", "float64")


def split_by_rank(params: Iterable[Any], *, rule: str, aux: str) -> list[Group]:
    """Param groups from any form PyTorch accepts. Groups without a rule are split by number of
    dimensions: vectors go to `aux`, matrices to `rule`, convolutions to a group of their own."""
    items = list(params)
    if not items:
        raise ValueError("the optimizer got an empty list of parameters")

    given = items if isinstance(items[0], dict) else [{"params": items}]
    groups: list[Group] = []
    for original in given:
        group = dict(original)
        own_aux: Any = group.pop("aux", aux)

        members = group["params"]
        group["params"] = [members] if isinstance(members, Tensor) else list(members)

        if "rule" in group:
            groups.append(group)
        else:
            groups += _split_group(group, rule, own_aux)

    return groups


def _split_group(group: Group, rule: str, aux: str) -> list[Group]:
    convolutions: list[Any] = []
    matrices: list[Any] = []
    vectors: list[Any] = []
    for item in group["params"]:
        tensor = item[1] if isinstance(item, tuple) else item
        if not isinstance(tensor, Tensor):
            raise ValueError(f"expected a parameter, got {type(tensor).__name__} {tensor!r}")

        if tensor.ndim < 2:
            vectors.append(item)
        elif tensor.ndim >= 4 and group.get("view") is None:
            convolutions.append(item)
        else:
            matrices.append(item)

    parts = []
    for members in (convolutions, matrices):
        if members:
            parts.append({**group, "params": members, "rule": rule})

    if vectors:
        own = {"rule": aux, "view": None, "name": None}
        parts.append({**group, "params": vectors, **own})

    return parts


def default_filter(rule: str) -> str:
    """The filter of a rule for matrices; of AdamW, that of matrices in groups of another rule."""
    if rule in SPECTRAL_RULES:
        return SPECTRAL_RULES[rule].filter

    return "muon"


def own_filter(group: Group, defaults: dict[str, Any]) -> Group:
    """Give a "pion" group inside another class, or a "muon" one inside `Pion`, its own rule's
    filter instead of the constructor's, unless the group names a filter itself."""
    if "filter" in group or group["rule"] not in SPECTRAL_RULES:
        return group

    filter = default_filter(group["rule"])
    if filter == default_filter(defaults["rule"]):
        return group

    strength = {
        "steps": None,
        "promote": 0,
        "cutoff": None,
        "rank": None,
    }
    return {**strength, **group, "filter": filter}


def check_group(group: Group) -> None:
    if group["rule"] not in all_rules():
        raise ValueError(f"rule={group['rule']!r} must be one of {', '.join(all_rules())}")

    _check_numbers(group)
    group_filter(group)
    check_scale(group["scale"])

    for p in group["params"]:
        check_not_flat(p)
        if not p.is_floating_point():
            raise ValueError(f"{p.dtype} cannot be trained: store a complex parameter as two real")

    if group["rule"] in SPECTRAL_RULES:
        _check_rule(group)
        _check_leash(group)
        _check_dtypes(group)
        _check_shapes(group)


def _check_numbers(group: Group) -> None:
    for key in ("lr", "momentum", "weight_decay", "eps"):
        value = group[key]
        if isinstance(value, Tensor):
            if value.ndim:
                raise ValueError(f"{key} has shape {tuple(value.shape)}, not one number")
            continue

        is_number = not isinstance(value, str | None)
        if key == "momentum":
            if not (is_number and 0 <= value < 1):
                raise ValueError(f"{key}={value!r} must be a number, at least 0 and below 1")
        elif not (is_number and value >= 0):
            raise ValueError(f"{key}={value!r} must be a number, at least 0")

    if not all(0 <= beta < 1 for beta in (*group["betas"], group["beta2"])):
        text = f"betas={group['betas']!r} and beta2={group['beta2']!r}"
        raise ValueError(f"{text} must each be at least 0 and below 1")


def _check_rule(group: Group) -> None:
    """What the group asks of its rule for matrices."""
    rule = SPECTRAL_RULES[group["rule"]]
    if rule.filter == "pion" and group["filter"] != "pion":
        raise ValueError(
            f"filter={group['filter']!r} belongs to rule='muon', not to rule={rule.name!r}"
        )

    if not rule.sharded and any(isinstance(p, DTensor) for p in group["params"]):
        raise ValueError(
            f"rule={rule.name!r} has no sharded step: use 'muon' for DTensor parameters"
        )

    if group["pairs"] is not None:
        if not rule.products:
            raise ValueError(
                f"rule={rule.name!r} does not step LoRA products: use 'muon' or 'pion'"
            )
        check_pairs(group)


def _check_leash(group: Group) -> None:
    leash = group["leash"]
    if leash is None:
        return
    if not leash > 0:
        raise ValueError(f"leash={leash!r} must be above 0, a share of a starting norm")

    # Fewer steps of Polar Express leave singular values above what the leash counts on.
    if group["filter"] == "polar_express" and (group["steps"] or 5) < 5:
        raise ValueError(f"leash needs steps=5 with filter='polar_express', not {group['steps']}")


def _check_dtypes(group: Group) -> None:
    for key in ("dtype", "momentum_dtype"):
        if group[key] is not None and group[key] not in _DTYPES:
            raise ValueError(f"{key}={group[key]!r} must be None or one of {', '.join(_DTYPES)}")


def _check_shapes(group: Group) -> None:
    for p in group["params"]:
        if p.ndim < 2:
            raise ValueError(f"{tuple(p.shape)} is no matrix: give it a group with rule='adamw'")
        if group["view"] is not None and group["pairs"] is None:
            View.parse(group["view"]).windows(torch.empty(p.shape, device="meta"))


def check_same_rules(groups: list[Group], saved: list[Group]) -> None:
    """Reject a checkpoint of another rule, whose settings would silently replace the rule, and
    one with the parameters in other groups."""
    known = {name for group in groups for name in _names(group)}
    for group, other in zip(groups, saved, strict=False):  # PyTorch checks the number of groups
        if other.get("rule") != group["rule"]:
            if "rule" in other:
                source = f"rule {other['rule']!r}"
            else:
                source = "another optimizer"

            raise ValueError(
                f"the checkpoint's group of {len(other['params'])} parameters was trained by "
                f"{source}, but its rule here is {group['rule']!r}: build the same optimizer, or "
                "take over the momentum alone with mesotron.import_state"
            )

        for own, its in zip(_names(group), _names(other), strict=False):
            if own != its and its in known:  # a model whose parameters were renamed is loaded
                raise ValueError(f"the checkpoint has {its} where {own} is: use its overrides")


def _names(group: Group) -> list[str]:
    wrappers = r"(^|\.)(?:module|_orig_mod)\."
    return [re.sub(wrappers, r"\1", name) for name in group.get("param_names", ())]


def default_view(group: Group) -> str:
    if group["rule"] not in SPECTRAL_RULES:
        return "whole"

    ndims = {p.ndim for p in group["params"]}
    if ndims <= {2} or group["pairs"] is not None:
        return "whole"
    if min(ndims) >= 4:
        return "conv"

    shape = min(tuple(p.shape) for p in group["params"] if p.ndim != 2)
    raise ValueError(f"ambiguous shape {shape}: give it a group with view='stack' or view='conv'")


class Work(NamedTuple):
    """The parameters of one step, LoRA products excepted; those that are not sharded have a
    gradient."""

    auxiliary: dict[tuple[str, torch.device], list[ParamStep]]
    spectral: dict[torch.device, list[ParamStep]]
    # Of every rule, with or without a gradient: ranks may differ in which gradients they have, so
    # they agree on that together.
    sharded: list[ParamStep]


def sort_parameters(groups: list[Group], states: dict[Tensor, State]) -> Work:
    """The work of one step; `states` gives each parameter's own, and makes missing ones."""
    work = Work(defaultdict(list), defaultdict(list), [])
    members = ((p, group) for group in groups for p in group["params"])
    for number, (p, group) in enumerate(members):
        if not p.numel() or group["pairs"] is not None:
            continue

        if isinstance(p, DTensor):
            if p.requires_grad:
                work.sharded.append(ParamStep(p, group, states[p], number))
        elif p.grad is not None:
            step = ParamStep(p, group, states[p], number)
            if group["rule"] in AUXILIARY_RULES:
                work.auxiliary[group["name"], p.device].append(step)
            else:
                work.spectral[p.device].append(step)

    return work
