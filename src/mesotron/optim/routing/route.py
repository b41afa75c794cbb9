"""Routing: who gets which rule. `route(model)` returns a table that can be read, printed, tested
and turned into groups.

Hidden matrices go to the spectral rule (Muon or Pion), everything else to the auxiliary rule (AdamW
or SGD). Nothing is guessed: a parameter that cannot be told, a pattern that matches nothing and a
flat shard raise a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from mesotron.optim.groups import AUXILIARY_RULES, RULES, SPECTRAL_RULES, check_not_flat
from mesotron.optim.routing.reading import Reading
from mesotron.optim.routing.roles import Facts, read, survey
from mesotron.optim.routing.sites import Site, is_a, walk
from mesotron.optim.routing.table import RoutingTable, Row
from mesotron.optim.views import View

Override = str | Mapping[str, object]
_LORA_CHOICES = {"B": ("lora_B",), "A": ("lora_A",), "both": ("lora_A", "lora_B"), "none": ()}


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
    """Decide for every trainable parameter which rule trains it, on which view, and why.

    Args:
        model: any module; on the meta device as well.
        matrix: rule of the hidden matrices, "muon" or "pion" ("adamw" or "sgd" to compare under the
            same table).
        aux: rule of embeddings, heads, norms, biases, routers, tables and vectors, "adamw" or
            "sgd".
        per_head: filter attention one head at a time (q, k, v by rows, o by columns), with the head
            counts of the model's config; or a mapping from glob patterns to head counts, where the
            model does not say.
        overrides: glob pattern over parameter names (`fnmatch`: `*` crosses dots) -> rule name, or
            a mapping with any of "rule", "view", "lr_scale". The first matching pattern wins.
        modalities: module prefix -> rule of the hidden matrices below it; the longest prefix wins.
        lora: which LoRA factors are filtered: "B" (default), "A", "both" or "none".

    Returns:
        A `RoutingTable` with one row per trainable parameter.

    Raises:
        ValueError: a parameter cannot be told, a pattern matches nothing, or parameters are flat
            shards.

    Example:
        >>> table = route(nn.TransformerEncoderLayer(8, 2, 16), per_head=True)
        >>> table.row("self_attn.in_proj_weight").view
        'rows:6'
    """
    _check_rules(matrix, aux, lora, modalities or {}, overrides or {})
    sites = _trainable_sites(model)
    settings = _Overrides(overrides or {}, sites)
    counts = per_head if isinstance(per_head, Mapping) else {}
    _check_patterns_match("per_head", counts, sites)
    prefixes = _check_prefixes(modalities or {}, sites)
    facts = survey(model)
    rows, doubts = [], []
    for places in sites.values():
        reading = _read_all(places, facts, bool(per_head), counts)
        rule = _rule(places[0].name, reading, matrix, aux, prefixes, lora)
        if rule not in SPECTRAL_RULES and reading.role != "unknown":
            reading = _settled(reading)
        chosen = settings.of(places)
        if reading.doubt and not {"rule", "view"} & set(chosen):
            doubts.append(reading.doubt)
            continue
        rows.append(_row(places, reading, rule, chosen))
    _raise_doubts(doubts)
    _check_heads_found(rows, per_head)
    return RoutingTable(rows)


def _check_rules(
    matrix: str,
    aux: str,
    lora: str,
    modalities: Mapping[str, str],
    overrides: Mapping[str, Override],
) -> None:
    named = [
        ("matrix", matrix),
        *((f"modalities[{prefix!r}]", rule) for prefix, rule in modalities.items()),
    ]
    for pattern, value in overrides.items():
        keys = {"rule": value} if isinstance(value, str) else dict(value)
        unknown = set(keys) - {"rule", "view", "lr_scale"}
        if unknown:
            raise ValueError(
                f"overrides[{pattern!r}] has {sorted(unknown)}; it may have rule, view and lr_scale"
            )
        if "rule" in keys:
            named.append((f"overrides[{pattern!r}]", str(keys["rule"])))
    for where, rule in named:
        if rule not in RULES:
            raise ValueError(f"{where} is {rule!r}; use one of {', '.join(RULES)}")
    if aux not in AUXILIARY_RULES:
        raise ValueError(f"aux is {aux!r}; use one of {', '.join(AUXILIARY_RULES)}")
    if lora not in _LORA_CHOICES:
        raise ValueError(f"lora is {lora!r}; use one of {', '.join(_LORA_CHOICES)}")


def _trainable_sites(model: nn.Module) -> dict[int, list[Site]]:
    """Trainable parameters by identity, each with every place that stores it; flat shards are
    refused."""
    sites: dict[int, list[Site]] = {}
    for site in walk(model):
        if site.param.requires_grad:
            _check_not_flat(site)
            sites.setdefault(id(site.param), []).append(site)
    if not sites:
        raise ValueError(
            "the model has no trainable parameter: every requires_grad is False, so there is "
            "nothing to route"
        )
    return sites


def _check_not_flat(site: Site) -> None:
    library = "torch.distributed.fsdp.fully_sharded_data_parallel"
    wrapped = any(is_a(module, library, "FullyShardedDataParallel") for module in site.modules)
    if site.param.ndim == 1 and site.param.numel() == 0:
        raise ValueError(
            f"{site.name} is empty: a sharding wrapper left a placeholder in its place; use FSDP2 "
            "(torch.distributed.fsdp.fully_shard), whose parameters keep their shape"
        )
    check_not_flat(site.param, site.name, wrapped)


def _read_all(
    places: list[Site], facts: Facts, per_head: bool, counts: Mapping[str, int]
) -> Reading:
    """One reading for a parameter, tied or not: an embedding or a head wins over every other
    role."""
    readings = []
    for site in places:
        num = next((n for pattern, n in counts.items() if fnmatchcase(site.name, pattern)), None)
        readings.append(read(site, facts, per_head=per_head, num_heads=num))
    for role in ("embedding", "head"):
        for reading in readings:
            if reading.role == role:
                return reading
    first = readings[0]
    for site, other in zip(places, readings, strict=True):
        if (other.matrix, other.view) != (first.matrix, first.view):
            sentence = (
                f"{places[0].name} and {site.name} are one tensor with two roles ({first.role}, "
                f"{other.role}); write overrides={{'{places[0].name}': 'adamw'}} or another rule"
            )
            return Reading("unknown", "set by override", doubt=sentence)
    return first


def _rule(
    name: str,
    reading: Reading,
    matrix: str,
    aux: str,
    prefixes: Sequence[tuple[str, str]],
    lora: str,
) -> str:
    if not reading.matrix and reading.role != "unknown":
        return aux
    if reading.role.startswith("lora_") and reading.role not in _LORA_CHOICES[lora]:
        return aux
    below = (rule for prefix, rule in prefixes if _is_below(name, prefix))
    return next(below, matrix)


def _settled(reading: Reading) -> Reading:
    """Doubts about views do not matter to a rule that reads no view."""
    return Reading(reading.role, reading.reason, reading.view, reading.matrix)


def _row(places: list[Site], reading: Reading, rule: str, chosen: Mapping[str, object]) -> Row:
    name, param = places[0].name, places[0].param
    rule = str(chosen.get("rule", rule))
    view = str(chosen.get("view", reading.view))
    reason = reading.reason
    if chosen:
        pattern = chosen["pattern"]
        reason = (
            f"override '{pattern}'"
            if not reading.doubt
            else f"override '{pattern}' (could not be told)"
        )
    if rule in SPECTRAL_RULES:
        _check_view(name, param, rule, view)
    else:
        view = "whole"
    scale = float(chosen.get("lr_scale", 1.0))  # type: ignore[arg-type]
    aliases = tuple(site.name for site in places[1:])
    return Row(name, tuple(param.shape), reading.role, rule, view, scale, reason, aliases)


def _check_view(name: str, param: Tensor, rule: str, view: str) -> None:
    """A view must show matrices in this very tensor."""
    if param.ndim < 2:
        raise ValueError(
            f"{name} has shape {tuple(param.shape)}: {rule} filters matrices, and this is none; "
            "use 'adamw' or 'sgd'"
        )
    try:
        View.parse(view).windows(torch.empty(param.shape, device="meta"))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


class _Overrides:
    """Glob patterns over names, first match wins; a pattern that changes nothing is an error."""

    def __init__(self, overrides: Mapping[str, Override], sites: Mapping[int, list[Site]]) -> None:
        self._values = {
            p: {"rule": v} if isinstance(v, str) else dict(v) for p, v in overrides.items()
        }
        _check_patterns_match("overrides", overrides, sites)
        winners = {self._winner(places) for places in sites.values()}
        for pattern in self._values:
            if pattern not in winners:
                raise ValueError(
                    f"overrides[{pattern!r}] never applies: earlier patterns take every parameter "
                    "it matches; put the narrower pattern first"
                )

    def _winner(self, places: list[Site]) -> str | None:
        names = [site.name for site in places]
        return next((p for p in self._values if any(fnmatchcase(n, p) for n in names)), None)

    def of(self, places: list[Site]) -> dict[str, object]:
        """What the first matching pattern says of a parameter, with the pattern; empty if none
        matches."""
        pattern = self._winner(places)
        return {} if pattern is None else {**self._values[pattern], "pattern": pattern}


def _check_patterns_match(
    argument: str, patterns: Mapping[str, object], sites: Mapping[int, list[Site]]
) -> None:
    names = [site.name for places in sites.values() for site in places]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise ValueError(
                f"{argument}[{pattern!r}] matches no trainable parameter (globs match the whole "
                f"name, so begin with '*'); the nearest names are {', '.join(near)}"
            )


def _check_prefixes(
    modalities: Mapping[str, str], sites: Mapping[int, list[Site]]
) -> list[tuple[str, str]]:
    """Longest prefix first; one without any trainable parameter below it raises."""
    names = [places[0].name for places in sites.values()]
    for prefix in modalities:
        if not any(_is_below(name, prefix) for name in names):
            parents = sorted({name.rpartition(".")[0] for name in names})
            near = get_close_matches(prefix, parents, n=3, cutoff=0.0)
            raise ValueError(
                f"modalities[{prefix!r}] is no module prefix of a trainable parameter; the nearest "
                f"modules are {', '.join(near)}"
            )
    return sorted(modalities.items(), key=lambda item: -len(item[0]))


def _is_below(name: str, prefix: str) -> bool:
    return name.startswith(prefix.rstrip(".") + ".")


def _raise_doubts(doubts: list[str]) -> None:
    if doubts:
        more = f" ({len(doubts) - 1} more parameters are in doubt)" if len(doubts) > 1 else ""
        raise ValueError(doubts[0] + more)


def _check_heads_found(rows: list[Row], per_head: bool | Mapping[str, int]) -> None:
    spectral = [row for row in rows if row.rule in SPECTRAL_RULES]
    heads = ("attention", "lora_")
    if per_head and spectral and not any(row.role.startswith(heads) for row in spectral):
        raise ValueError(
            "per_head was asked for, but no attention projection was recognised among the filtered "
            "matrices; pass per_head=False, or write the views by hand: "
            "overrides={'*.my_query.weight': {'view': "
            "'rows:NUM_HEADS'}}"
        )
