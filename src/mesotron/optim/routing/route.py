"""`route(model)`: a table of which rule updates each parameter, to read, test and make groups from.

Hidden matrices go to the spectral rule (Muon or Pion), everything else to the auxiliary rule (AdamW
or SGD). Nothing is guessed: an unclear parameter, a pattern without a match and a flat shard raise.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import nn

from mesotron.config.rules import AUXILIARY_RULES, SPECTRAL_RULES, all_rules
from mesotron.optim.flat import check_not_flat
from mesotron.optim.routing.roles import ModelFacts, role_of, survey
from mesotron.optim.routing.sites import ModuleSite, is_a, walk
from mesotron.optim.views import View
from mesotron.spectral.routing import Role, RoutingTable, Row, unclear

Override = str | Mapping[str, object]
Settings = dict[str, dict[str, object]]  # overrides: pattern -> rule, view, lr_scale
Sites = dict[int, list[ModuleSite]]  # parameters by identity, each with every place that stores it
_BOTH = ("lora_A", "lora_B")
_LORA_CHOICES = {
    "B": ("lora_B",),
    "A": ("lora_A",),
    "both": _BOTH,
    "product": _BOTH,
    "none": (),
}


def route(
    model: nn.Module,
    *,
    matrix: str = "muon",
    aux: str = "adamw",
    per_head: bool | Mapping[str, int] = False,
    overrides: Mapping[str, Override] | None = None,
    modalities: Mapping[str, str] | None = None,
    lora: str = "B",
) -> RoutingTable:
    """Decide which rule updates each trainable parameter, on which view, and why.

    Args:
        model: any module, on the meta device as well.
        matrix: rule of the hidden matrices, "muon" or "pion" ("adamw" or "sgd" to compare under the
            same table).
        aux: rule of embeddings, heads, norms, biases, routers, tables and vectors, "adamw" or
            "sgd".
        per_head: filter attention one head at a time (q, k, v by rows, o by columns), with the head
            counts of the model's config; or a mapping from glob patterns to head counts.
        overrides: glob pattern over parameter names (`fnmatch`: `*` crosses dots) -> rule name, or
            a mapping with any of "rule", "view", "lr_scale". The first matching pattern wins.
        modalities: module prefix -> rule of the hidden matrices below it; the longest prefix wins.
        lora: which LoRA factors are filtered, each as a matrix of its own: "B", "A", "both" or
            "none"; "product" steps both so that the change of B A is the filtered step.

    Returns:
        A `RoutingTable` with one row per trainable parameter.

    Raises:
        ValueError: a parameter is unclear, a pattern matches nothing, or parameters are flat
            shards.

    Example:
        >>> table = route(nn.TransformerEncoderLayer(8, 2, 16), per_head=True)
        >>> table.row("self_attn.in_proj_weight").view
        'rows:6'
    """
    wishes = _Wishes(
        matrix=matrix,
        aux=aux,
        per_head=bool(per_head),
        head_counts=per_head if isinstance(per_head, Mapping) else {},
        settings=_read_overrides(overrides or {}),
        modalities=modalities or {},
        lora=lora,
    )
    _check_rules(wishes)
    sites = _trainable_sites(model)
    _check_patterns(sites, wishes)

    facts = survey(model)
    rows = []
    problems = []
    for places in sites.values():
        role, rule = _decide(places, facts, wishes)
        pattern = _first_match(places, wishes.settings)
        chosen = wishes.settings.get(pattern, {}) if pattern else {}

        if role.unclear and not {"rule", "view"} & set(chosen):
            problems.append(role.unclear)
        else:
            rows.append(_make_row(places, role, rule, pattern, chosen))

    if problems:
        others = len(problems) - 1
        message = problems[0]
        if others:
            message += f" ({others} more parameters are unclear)"

        raise ValueError(message)

    if wishes.per_head:
        _check_heads(rows)

    return RoutingTable(rows)


@dataclass(frozen=True, kw_only=True)
class _Wishes:
    """The arguments of `route`, read."""

    matrix: str
    aux: str
    per_head: bool
    head_counts: Mapping[str, int]  # glob pattern -> number of heads
    settings: Settings
    modalities: Mapping[str, str]
    lora: str


def _read_overrides(overrides: Mapping[str, Override]) -> Settings:
    settings: Settings = {}
    for pattern, value in overrides.items():
        settings[pattern] = {"rule": value} if isinstance(value, str) else dict(value)

    return settings


def _decide(places: list[ModuleSite], facts: ModelFacts, wishes: _Wishes) -> tuple[Role, str]:
    """What a parameter is, and the rule that follows from it; overrides come later."""
    role = _shared_role(places, facts, wishes)
    if wishes.lora == "product" and role.name in _BOTH and wishes.matrix in SPECTRAL_RULES:
        role = _product_role(role, places[0].name)

    rule = _rule_of(role, places[0].name, wishes)
    if rule not in SPECTRAL_RULES and role.name != "unknown":
        role = replace(role, unclear="")  # only a spectral rule needs the view

    return role, rule


def _rule_of(role: Role, name: str, wishes: _Wishes) -> str:
    if role.name.startswith("lora_") and role.name not in _LORA_CHOICES[wishes.lora]:
        return wishes.aux
    if not role.is_matrix and role.name != "unknown":
        return wishes.aux

    below = []
    for prefix in wishes.modalities:
        if _is_below(name, prefix):
            below.append(prefix)

    if not below:
        return wishes.matrix

    return wishes.modalities[max(below, key=len)]


def _check_heads(rows: list[Row]) -> None:
    """Refuse `per_head` where no filtered matrix has heads."""
    spectral = [row.role for row in rows if row.rule in SPECTRAL_RULES]
    if spectral and not any(role.startswith(("attention", "lora_")) for role in spectral):
        raise ValueError(
            "per_head: no attention projection among the filtered matrices; pass per_head=False, "
            "or the views: overrides={'*.my_query.weight': {'view': 'rows:NUM_HEADS'}}"
        )


def _check_rules(wishes: _Wishes) -> None:
    rules = {"matrix": wishes.matrix}
    for prefix, rule in wishes.modalities.items():
        rules[f"modalities[{prefix!r}]"] = rule

    for pattern, keys in wishes.settings.items():
        unknown = set(keys) - {"rule", "view", "lr_scale"}
        if unknown:
            raise ValueError(
                f"overrides[{pattern!r}] has {sorted(unknown)}; allowed: rule, view and lr_scale"
            )

        if "rule" in keys:
            rules[f"overrides[{pattern!r}]"] = str(keys["rule"])

    for where, rule in rules.items():
        if rule not in all_rules():
            raise ValueError(f"{where} is {rule!r}; use one of {', '.join(all_rules())}")

    if wishes.aux not in AUXILIARY_RULES:
        raise ValueError(f"aux is {wishes.aux!r}; use one of {', '.join(AUXILIARY_RULES)}")
    if wishes.lora not in _LORA_CHOICES:
        raise ValueError(f"lora is {wishes.lora!r}; use one of {', '.join(_LORA_CHOICES)}")


def _trainable_sites(model: nn.Module) -> Sites:
    fsdp1 = ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
    sites: Sites = {}
    for site in walk(model):
        if not site.param.requires_grad:
            continue
        if site.shape == (0,):
            raise ValueError(
                f"{site.name} is empty, a placeholder of a sharding wrapper; use FSDP2 "
                "(torch.distributed.fsdp.fully_shard), whose parameters keep their shape"
            )

        wrapped = any(is_a(module, *fsdp1) for module in site.modules)
        check_not_flat(site.param, site.name, wrapped)
        sites.setdefault(id(site.param), []).append(site)

    if not sites:
        raise ValueError("the model has no trainable parameter: every requires_grad is False")

    return sites


def _shared_role(places: list[ModuleSite], facts: ModelFacts, wishes: _Wishes) -> Role:
    """One role per parameter, tied or not: embedding and head win over every other role."""
    roles = []
    for site in places:
        counts = (n for glob, n in wishes.head_counts.items() if fnmatchcase(site.name, glob))
        num_heads = next(counts, None)
        roles.append(role_of(site, facts, per_head=wishes.per_head, num_heads=num_heads))

    for name in ("embedding", "head"):
        for role in roles:
            if role.name == name:
                return role

    first = roles[0]
    for site, role in zip(places, roles, strict=True):
        if (role.is_matrix, role.view) != (first.is_matrix, first.view):
            return unclear(
                f"{places[0].name} and {site.name} are one tensor with two roles ({first.name}, "
                f"{role.name}); pass overrides={{'{places[0].name}': 'adamw'}} or another rule"
            )

    return first


def _product_role(role: Role, name: str) -> Role:
    if role.product or role.unclear:
        return replace(role, view=role.product)

    problem = (
        f"lora='product': {name} holds the factors of several experts in one tensor, which are no "
        f"single product; pass overrides={{'{name}': 'adamw'}} (a glob matches many) or lora='B'"
    )
    return replace(role, unclear=problem)


def _make_row(
    places: list[ModuleSite],
    role: Role,
    rule: str,
    pattern: str | None,
    chosen: dict[str, object],
) -> Row:
    site = places[0]
    rule = str(chosen.get("rule", rule))
    view = "whole"
    if rule in SPECTRAL_RULES:
        view = str(chosen.get("view", role.view))
        _check_view(site, rule, view)

    reason = role.reason
    if pattern is not None:
        reason = f"override '{pattern}'"
        if role.unclear:
            reason += " of an unclear role"

    return Row(
        name=site.name,
        shape=site.shape,
        role=role.name,
        rule=rule,
        view=view,
        lr_scale=float(chosen.get("lr_scale", 1.0)),  # type: ignore[arg-type]
        reason=reason,
        aliases=tuple(other.name for other in places[1:]),
    )


def _check_view(site: ModuleSite, rule: str, view: str) -> None:
    if len(site.shape) < 2:
        raise ValueError(
            f"{site.name} of shape {site.shape} is no matrix for {rule}: use 'adamw' or 'sgd'"
        )
    if view.startswith("product"):  # the view of B A, not of this tensor
        return

    try:
        View.parse(view).windows(torch.empty(site.shape, device="meta"))
    except ValueError as error:
        raise ValueError(f"{site.name}: {error}") from error


def _first_match(places: list[ModuleSite], patterns: Iterable[str]) -> str | None:
    names = [site.name for site in places]
    return next((p for p in patterns if any(fnmatchcase(n, p) for n in names)), None)


def _check_patterns(sites: Sites, wishes: _Wishes) -> None:
    """Every pattern and prefix must match something, and every override have an effect."""
    names = [site.name for places in sites.values() for site in places]
    _check_globs("overrides", wishes.settings, names)
    _check_globs("per_head", wishes.head_counts, names)

    winners = {_first_match(places, wishes.settings) for places in sites.values()}
    for pattern in wishes.settings:
        if pattern not in winners:
            raise ValueError(
                f"overrides[{pattern!r}] has no effect: earlier patterns match all of its "
                "parameters; put the narrower pattern first"
            )

    _check_prefixes(wishes.modalities, [places[0].name for places in sites.values()])


def _check_globs(argument: str, patterns: Iterable[str], names: list[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise ValueError(
                f"{argument}[{pattern!r}] matches no trainable parameter (globs match the "
                f"whole name, so start with '*'); the nearest names are {', '.join(near)}"
            )


def _check_prefixes(prefixes: Iterable[str], names: list[str]) -> None:
    for prefix in prefixes:
        if not any(_is_below(name, prefix) for name in names):
            parents = sorted({name.rpartition(".")[0] for name in names})
            near = get_close_matches(prefix, parents, n=3, cutoff=0.0)
            raise ValueError(
                f"modalities[{prefix!r}] is not a module prefix of a trainable parameter; the "
                f"nearest modules are {', '.join(near)}"
            )


def _is_below(name: str, prefix: str) -> bool:
    return name.startswith(prefix.rstrip(".") + ".")
