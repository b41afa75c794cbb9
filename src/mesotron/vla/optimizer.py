"""One optimizer for all parts of a policy: the routing table with a rule for each part.

The Pion paper's recipe is Muon for vision and language and Pion for the action module (arXiv
2605.19282); every other combination is a matter of flags. Groups are cut by part, so that `stats()`
tells of each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import nn

from mesotron.config import PartsOptimConfig
from mesotron.optim import Pion, RoutedOptimizer, RoutingTable, route
from mesotron.optim.groups import SPECTRAL_RULES
from mesotron.vla.policy import PARTS

# The low-rank form of Muon is Muon's rule with another filter.
_RULES = {"muon": "muon", "pion": "pion", "low_rank": "muon", "adamw": "adamw"}

_LOW_RANK = {"filter": "low_rank", "steps": None, "promote": 0, "cutoff": None}


def route_parts(policy: nn.Module, config: PartsOptimConfig) -> RoutingTable:
    """Who gets which rule: each part's matrices its own, everything else AdamW.

    Args:
        policy: with any of the prefixes vision, language, fusion and action.
        config: a rule for each.
    """
    names = [name for name, p in policy.named_parameters() if p.requires_grad]
    there = [part for part in PARTS if any(name.startswith(f"{part}.") for name in names)]
    rules = {part: _RULES[getattr(config, part)] for part in there}
    return route(policy, matrix="adamw", modalities=rules)


def build_optimizer(policy: nn.Module, config: PartsOptimConfig) -> RoutedOptimizer:
    """The optimizer of a policy, in groups named PART/RULE.

    Args:
        policy: wrapped already (LoRA): whatever is wrapped later would not train.
        config: rules, rates and Pion's strength.

    Example:
        >>> from mesotron.config import PolicyConfig
        >>> from mesotron.vla.policy import Body, Policy
        >>> policy = Policy(PolicyConfig(size="ci"), Body((), 0, 4, 4))
        >>> optimizer = build_optimizer(policy, PartsOptimConfig(action="pion", cutoff=0.2))
        >>> [g["cutoff"] for g in optimizer.param_groups if g["name"] == "action/pion"]
        [0.2]
    """
    table = route_parts(policy, config)
    strength: dict[str, Any] = {"promote": config.promote or 0, "cutoff": config.cutoff}
    if config.promote is None and config.cutoff is None:
        strength["cutoff"] = "noise"
    groups = []
    for group in table.groups(policy):
        for part, members in _by_part(group).items():
            groups += _finish(group, part, members, config, table)
    return Pion(
        groups,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        scale=config.scale,
        **strength,
    )


def _by_part(group: Mapping[str, Any]) -> dict[str, list[int]]:
    """Places of a group's parameters, by part."""
    found: dict[str, list[int]] = defaultdict(list)
    for place, name in enumerate(group["param_names"]):
        found[name.split(".")[0]].append(place)
    return found


def _finish(
    group: Mapping[str, Any],
    part: str,
    places: list[int],
    config: PartsOptimConfig,
    table: RoutingTable,
) -> list[dict[str, Any]]:
    """The groups of one part: its matrices, and apart from them what has another rate or no weight
    decay."""
    rate = config.lr * (config.action_scale if part == "action" else 1.0)
    aux_lr = config.lr if config.aux_lr is None else config.aux_lr
    made: dict[tuple[bool, bool], dict[str, Any]] = {}
    for place in places:
        name, p = group["param_names"][place], group["params"][place]
        hidden = group["rule"] in SPECTRAL_RULES or is_hidden(table, name)
        key = (hidden, p.ndim < 2)
        if key not in made:
            made[key] = {"params": [], "param_names": [], "rule": group["rule"]}
            made[key] |= {"view": group["view"], "lr": rate if hidden else aux_lr}
            made[key]["name"] = f"{part}/{group['name']}" + _ending(group["rule"], *key)
            made[key] |= {"weight_decay": 0.0} if p.ndim < 2 else {}
            if getattr(config, part, "") == "low_rank" and group["rule"] == "muon":
                made[key] |= _LOW_RANK | {"rank": config.rank}
        made[key]["params"].append(p)
        made[key]["param_names"].append(name)
    return list(made.values())


def _ending(rule: str, hidden: bool, vector: bool) -> str:
    """Tells AdamW's matrices from its embeddings, and both from its vectors."""
    if rule in SPECTRAL_RULES:
        return ""
    return "_vectors" if vector else " matrices" if hidden else ""


def is_hidden(table: RoutingTable, name: str) -> bool:
    """Whether a parameter is a hidden matrix by its role, whatever rule it has."""
    row = table.row(name)
    return len(row.shape) >= 2 and row.role.startswith(("attention", "linear", "lora_B"))


def part_steps(optimizer: RoutedOptimizer, stats: Mapping[str, float]) -> dict[str, float]:
    """RMS change of the hidden matrices of each part in the last step: "update_rms/<part>".

    Args:
        optimizer: built by `build_optimizer`.
        stats: its `stats()`.
    """
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for group in optimizer.param_groups:
        spectral = group["rule"] in SPECTRAL_RULES or group["name"].endswith(" matrices")
        rms = stats.get(f"{group['name']}/update_rms")
        if spectral and rms is not None:
            count = sum(p.numel() for p in group["params"])
            total = sums[group["name"].split("/")[0]]
            total[0] += rms**2 * count
            total[1] += count
    return {f"update_rms/{part}": (s / n) ** 0.5 for part, (s, n) in sums.items() if n}
