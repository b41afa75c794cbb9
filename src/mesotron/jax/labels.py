"""`label(params)`: which rule updates each leaf of a parameter tree, with its view and the reason.

Hidden matrices go to the spectral rule, everything else to Adam. A tree has no module types, so
roles come from the names that flax, Equinox and common code use (labels.toml), from
shapes and from neighbors: a layer's bias distinguishes a stack of layers from a kernel with three
dimensions. Names often do not show where a network begins and ends (a flax MLP is Dense_0, Dense_1,
Dense_2), so numbered layers are chained by their widths, and the ends of a chain go to Adam. What
cannot be determined is filtered if it has two dimensions or more, with a warning that names the
override; `strict=True` raises instead.
"""

import re
import tomllib
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax

from mesotron.jax.lora import is_factor
from mesotron.jax.views import attribute_leaves, check_view, default_view, named_leaves, read_view
from mesotron.spectral.routing import MAX_RAW_CHANNELS, Role, RoutingTable, Row, Site, matrix, words

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_ATTENTION = {part: words(names) for part, names in _TABLES.pop("attention").items()}
_NAMES = {kind: words(names) for kind, names in _TABLES.items()}
# Part of attention and dimensions of its kernel -> view, where heads have an axis.
_WITH_HEADS = {("queries", 3): "ioo", ("outs", 3): "iio", ("fused", 4): "isoo"}
_BIASES = ("bias", "b")
_ADVICE = "pass overrides={'<path>': 'adamw'}, 'matrix' or a view such as 'sio'"

Roles = dict[str, Role]


class LabelTable(RoutingTable):
    """A routing table of a parameter tree; rules are "matrix" and "adamw"."""

    def __init__(self, rows: Sequence[Row], structure: Any) -> None:
        super().__init__(rows)
        self._structure = structure

    def labels(self) -> Any:
        """A tree of labels like the parameters, for `optax.partition`."""
        return jax.tree.unflatten(self._structure, [row.label for row in self.rows])

    def views(self) -> dict[str, str]:
        """Path -> view of every matrix, for `mesotron.jax.muon(views=...)`."""
        return {row.name: row.view for row in self.rows if row.rule == "matrix"}


def label(
    params: Any,
    *,
    per_head: bool = False,
    stacked: Sequence[str] = (),
    overrides: Mapping[str, str] | None = None,
    strict: bool = False,
    lora: bool = False,
) -> LabelTable:
    """Route the leaves of a parameter tree.

    Args:
        params: a tree of arrays (or of shapes): flax variables, `eqx.filter(model, eqx.is_array)`,
            a plain dict or list, or gradients.
        per_head: filter attention kernels that have an axis of heads one head at a time.
        stacked: patterns of paths whose first axis holds separate layers, as `nn.scan` makes them.
            Not needed for experts and for layers whose bias has that axis too.
        overrides: pattern of paths -> "adamw", "matrix" or a view such as "iso". Patterns are those
            of `fnmatch`; the first match wins, and a pattern without a match raises.
        strict: raise where a role is in doubt; otherwise such a leaf is filtered, which is the
            field's usual answer, and a warning names the override.
        lora: label the leaves of LoRA pairs "lora", for `mesotron.jax.muon(lora="product")`.

    Returns:
        A `LabelTable`. A kernel is read as (inputs, outputs), JAX's order; only a field called
        `weight`, as in Equinox, is (outputs, inputs).

    Example:
        >>> import jax.numpy as jnp
        >>> layer = lambda i, o: {"w": jnp.zeros((i, o)), "b": jnp.zeros(o)}
        >>> table = label([layer(3, 8), layer(8, 8), layer(8, 2)])
        >>> [(row.name, row.role) for row in table.rows if row.role != "bias"]
        [('0/w', 'input'), ('1/w', 'matrix'), ('2/w', 'head')]
    """
    overrides = overrides or {}
    shapes = {path: tuple(leaf.shape) for path, leaf in named_leaves(params)}
    _check_patterns((*stacked, *overrides), shapes)

    sites = _make_sites(shapes, attribute_leaves(params), stacked)
    fixed = {path for path in sites if _first_match(path, overrides) is not None}
    roles = {}
    for path, site in sites.items():
        if lora and is_factor(path):
            roles[path] = Role("lora", "a factor of a LoRA product")
        else:
            roles[path] = _choose_role(site, overrides, per_head)

    roles = _find_ends(sites, roles, fixed)
    roles = _settle_unclear(sites, roles, strict)

    # A table can be the head as well (tied weights); an override means that the user has checked.
    names = {role.name for role in roles.values()}
    has_end = bool(names & {"head", "embedding", "lora"})
    if "matrix" in names and not has_end and not fixed:
        complain(f"no leaf looks like an output layer. If there is one, {_ADVICE}", strict)

    rows = [_make_row(path, shape, roles[path]) for path, shape in shapes.items()]
    return LabelTable(rows, jax.tree.structure(params))


def _check_patterns(patterns: Sequence[str], paths: Collection[str]) -> None:
    """Refuse a pattern without a match."""
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            known = ", ".join(list(paths)[:3])
            raise ValueError(f"the pattern {pattern!r} matches no leaf; paths look like {known}")


def _settle_unclear(sites: dict[str, "LeafSite"], roles: Roles, strict: bool) -> Roles:
    """Leaves whose role is in doubt are filtered, with a warning; if strict they are refused."""
    problems = [role.unclear for role in roles.values() if role.unclear]
    if not problems:
        return roles

    complain(f"filtered without certainty: {'; '.join(problems)}. To decide, {_ADVICE}", strict)
    settled = dict(roles)
    for path, role in roles.items():
        if role.unclear:
            if role.is_matrix:
                view = role.view
            else:
                view = default_view(len(sites[path].shape))

            settled[path] = matrix("matrix", "unclear, so filtered", view)

    return settled


def _make_row(path: str, shape: tuple[int, ...], role: Role) -> Row:
    rule = "adamw"
    view = "-"
    if role.is_matrix:
        rule = "matrix"
        view = role.view
    elif role.name == "lora":
        rule = "lora"

    return Row(path, shape, role.name, rule, view, 1.0, role.reason)


_warned: set[str] = set()


def complain(problem: str, strict: bool) -> None:
    """Raise if strict; otherwise warn, once for each problem."""
    if strict:
        raise ValueError(f"cannot route: {problem}")

    if problem not in _warned:
        _warned.add(problem)
        warnings.warn(f"mesotron.jax: {problem}; strict=True raises", stacklevel=4)


def only_matrices(tree: Any) -> dict[str, str] | None:
    """The views if every leaf is a matrix and no name tells a role, such as that of a head."""
    shapes = {path: tuple(leaf.shape) for path, leaf in named_leaves(tree)}
    if any(len(shape) < 2 for shape in shapes.values()):
        return None

    sites = _make_sites(shapes, attribute_leaves(tree), ())
    has_layers = any(base_name(site.leaf) in _NAMES["matrix_leaves"] for site in sites.values())

    views = {}
    for path, site in sites.items():
        role = _role_of(site)
        if role.is_matrix:
            views[path] = role.view
            continue

        # A matrix may be called "b" where there is no "w".
        may_be_matrix = not has_layers and role.name in ("bias", "norm")
        if not role.unclear and not may_be_matrix:
            return None

    return views


def _first_match(path: str, patterns: Iterable[str]) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(path, pattern)), None)


def _choose_role(site: "LeafSite", overrides: Mapping[str, str], per_head: bool) -> Role:
    role = _role_of(site)
    pattern = _first_match(site.name, overrides)
    if pattern is not None:
        return _overridden(site, role, overrides[pattern], f"override {pattern!r}")
    if per_head and role.name == "attention" and role.is_matrix:
        return _split_heads(site, role)

    return role


def _overridden(site: "LeafSite", role: Role, choice: str, reason: str) -> Role:
    if choice == "adamw":
        is_known = not role.is_matrix and not role.unclear
        return Role(role.name if is_known else "override", reason)

    if choice == "matrix":
        view = role.view if role.is_matrix else default_view(len(site.shape))
        return matrix("matrix", reason, view)

    return matrix("matrix", reason, check_view(choice, site.shape, site.name))


def _split_heads(site: "LeafSite", role: Role) -> Role:
    """One matrix for each head of a projection."""
    # The axis of heads is next to the head's width: (in, heads, width), (heads, width, out).
    for whole, split in (("isoo", "isso"), ("ioo", "iso"), ("iio", "sio")):
        if role.view.endswith(whole):
            view = role.view.removesuffix(whole) + split
            return replace(role, view=view, reason="projection, per head")

    raise ValueError(
        f"per_head: {site.name} {site.shape} has no axis of heads; pass per_head=False, or "
        f"overrides={{'{site.name}': 'io'}}"
    )


@dataclass(frozen=True)
class LeafSite(Site):
    attribute: bool  # a field of a module (Equinox), not a dict entry
    bias: tuple[int, ...] | None  # shape of the bias next to it
    siblings: frozenset[str]  # names of the modules next to this one
    stacked: bool  # the user says that the first axis holds separate layers

    @property
    def leaf(self) -> str:
        return self.name.rpartition("/")[2]

    @property
    def layer(self) -> tuple[str, ...]:
        """The path of the layer: without the leaf, unless the leaf itself is numbered ("w1")."""
        parts = tuple(self.name.split("/"))
        if re.search(r"\d", parts[-1]):
            return parts

        return parts[:-1]

    @property
    def layer_name(self) -> str:
        if self.layer:
            return base_name(self.layer[-1])

        return ""

    @property
    def outputs_first(self) -> bool:  # as in Equinox
        return self.attribute and self.leaf == "weight"

    @property
    def attention_part(self) -> str:
        return next((part for part, x in _ATTENTION.items() if self.layer_name in x), "")

    @property
    def in_attention(self) -> bool:
        queries = _ATTENTION["queries"]
        fused = _ATTENTION["fused"]
        return len(self.siblings & queries) > 1 or bool(self.siblings & fused)

    @property
    def in_experts(self) -> bool:
        return any(base_name(part) in ("experts", "expert") for part in self.layer)


def _make_sites(
    shapes: dict[str, tuple[int, ...]], attributes: set[str], stacked: Sequence[str]
) -> dict[str, LeafSite]:
    children: dict[str, set[str]] = {}
    for path in shapes:
        parts = path.split("/")
        for k, part in enumerate(parts):
            children.setdefault("/".join(parts[:k]), set()).add(part)

    sites = {}
    for path, shape in shapes.items():
        module, _, _ = path.rpartition("/")
        around, _, _ = module.rpartition("/")
        biases = [f"{module}/{name}".lstrip("/") for name in _BIASES]

        sites[path] = LeafSite(
            path,
            shape,
            attribute=path in attributes,
            bias=next((shapes[name] for name in biases if name in shapes), None),
            siblings=frozenset(map(base_name, children[around])),
            stacked=_first_match(path, stacked) is not None,
        )

    return sites


def base_name(word: str) -> str:
    """A module's name without its number: "Dense_0" and "fc1" are "dense" and "fc"."""
    return re.sub(r"_?\d+$", "", word).lower()


def _role_of(site: LeafSite) -> Role:
    """The role of a leaf by its own name and place; a plain layer is a "matrix"."""
    name = site.layer_name
    leaf = base_name(site.leaf)

    elementwise = _elementwise_role(site, name, leaf)
    if elementwise is not None:
        return elementwise

    if leaf not in _NAMES["matrix_leaves"]:
        return _unclear(site, f"unknown leaf name {site.leaf!r}")
    if name in _NAMES["inputs"]:
        return Role("input", "reads the raw input")
    if name in ("router", "gating"):
        return Role("router", "its outputs choose; they are not features")

    value_head = name == "value" and not site.in_attention
    if value_head or name in _NAMES["heads"] or name.endswith(("_head", "_logits")):
        return Role("head", "an output layer")

    return _matrix_role(site)


def _elementwise_role(site: LeafSite, name: str, leaf: str) -> Role | None:
    """The role of a vector or a lookup table; None for whatever maps features to features."""
    parts = set(re.split(r"[_\W]+", f"{name}_{leaf}"))
    is_vector = leaf in _NAMES["vector_leaves"] or len(site.shape) < 2
    if "norm" in name or (is_vector and parts & {"ln", "scale", "gamma"}):
        return Role("norm", "a gain")
    if is_vector:
        return Role("bias", "one vector per layer")
    if parts & _NAMES["tables"] or "pos" in name.split("_"):
        return Role("position or token", "a lookup table")
    if _is_embedding(name) or _is_embedding(leaf):
        return Role("embedding", "a lookup table, or a layer in its place")

    return None


def _is_embedding(name: str) -> bool:
    return name in _NAMES["embeddings"] or name.startswith("embed") or "embed" in name.split("_")


def _matrix_role(site: LeafSite) -> Role:
    stacks = _num_stacks(site)
    if stacks is None:
        return _unclear(site, "dimensions may be heads or stacked layers, and no bias shows which")

    kernel = site.shape[stacks:]
    stack = "s" * stacks
    if "conv" in site.layer_name and len(kernel) > 2:
        return _conv_role(site, stack, kernel)

    if len(kernel) == 2:
        order, where = ("oi", "(out, in)") if site.outputs_first else ("io", "(in, out)")
        kind = "stacked hidden layers" if stack else "hidden"
        return matrix(_hidden_name(site), f"{kind} {where}", stack + order)

    view = _WITH_HEADS.get((site.attention_part, len(kernel)))
    if view is None:
        return _unclear(site, f"unknown layout of {len(kernel)} dimensions")

    return matrix("attention", "projection with an axis of heads", stack + view)


def _hidden_name(site: LeafSite) -> str:
    if site.in_experts:
        return "expert"

    # Haiku calls attention's output projection "linear".
    is_projection = bool(site.attention_part) or site.layer_name == "linear"
    if site.in_attention and is_projection:
        return "attention"

    return "matrix"


def _conv_role(site: LeafSite, stack: str, kernel: tuple[int, ...]) -> Role:
    inputs = "i" * (len(kernel) - 1)
    view, (num_inputs, num_outputs) = inputs + "o", kernel[-2:]
    if site.outputs_first:
        view, (num_outputs, num_inputs) = "o" + inputs, kernel[:2]

    if num_inputs == 1 and num_outputs > 1:
        return Role("depthwise", "one input channel each: not a matrix")
    if num_inputs <= MAX_RAW_CHANNELS:
        return Role("input", "a convolution of raw channels")

    return matrix("convolution", "(inputs * kernel) to outputs", stack + view)


def _num_stacks(site: LeafSite) -> int | None:
    """How many leading axes hold separate layers; None if unclear."""
    shape = site.shape
    part = site.attention_part
    if site.stacked or (site.in_experts and len(shape) > 2):
        return 1

    if site.bias is not None:
        return _num_stacks_by_bias(site, site.bias)

    if len(shape) == 2 or "conv" in site.layer_name:
        return 0

    usual = {"queries": 3, "outs": 3, "fused": 4}

    # flax's own names have an axis of heads; q_proj with three dimensions may be either.
    if part and {"query", "out"} <= site.siblings and len(shape) >= usual[part]:
        return len(shape) - usual[part]

    return None


def _num_stacks_by_bias(site: LeafSite, bias: tuple[int, ...]) -> int | None:
    """A bias has an axis for each stack, and then those of the outputs."""
    most = {"queries": 2, "fused": 3}.get(site.attention_part, 1)  # axes of the outputs
    for num in range(len(site.shape) - 1):
        outputs = bias[num:]
        kernel = site.shape[num:]

        if site.outputs_first:
            side = kernel[: len(outputs)]
        else:
            side = kernel[-len(outputs) :]

        has_stacks = bias[:num] == site.shape[:num]
        if has_stacks and side == outputs and 1 <= len(outputs) <= most:
            return num

    return None


def _unclear(site: LeafSite, why: str) -> Role:
    return Role("unknown", why, unclear=f"{site.name} {site.shape}: {why}")


# The first and last layers of each network. Numbered layers of one module are a run, cut where the
# outputs of one do not fit the inputs of the next. Layers inside numbered blocks are hidden.


class _Numbered(NamedTuple):
    """A plain layer of a run, with the widths it connects."""

    path: str
    number: int
    inputs: int
    outputs: int
    fixed: bool  # an override decided it


def _find_ends(sites: dict[str, LeafSite], roles: Roles, fixed: set[str]) -> Roles:
    result = dict(roles)
    fed, read = _known_widths(sites, roles)
    for root in _networks(sites, roles):
        runs = _runs(root, sites, roles, fixed)
        are_convolutions = [roles[run[0].path].name == "convolution" for run in runs]
        has_input = _has_input_convolution(root, sites, roles)

        for run, is_convolution in zip(runs, are_convolutions):
            if not is_convolution:
                _mark_ends(run, result, fed, read, any(are_convolutions))
            elif not has_input:
                _set(result, run[0], "input", "the first convolution")
                has_input = True

    return result


def _has_input_convolution(root: tuple[str, ...], sites: dict[str, LeafSite], roles: Roles) -> bool:
    for path, site in sites.items():
        is_own = site.layer[:-1] == root
        if is_own and roles[path].name == "input" and len(site.shape) > 2:
            return True

    return False


def _known_widths(sites: dict[str, LeafSite], roles: Roles) -> tuple[set[int], set[int]]:
    """Widths that come out of known input layers and tables, and that go into known heads."""
    fed = set()
    read = set()
    for path, site in sites.items():
        name = roles[path].name
        if name in ("input", "embedding"):
            # A table is (entries, width) in every framework.
            fed.add(site.shape[0 if site.outputs_first and name == "input" else -1])

        if name == "head":
            read.add(site.shape[-1 if site.outputs_first else -2])

    return fed, read


def _networks(sites: dict[str, LeafSite], roles: Roles) -> list[tuple[str, ...]]:
    """The modules that hold the first and last layers of a network. From the top down: one with
    layers of its own is a network; one without contains networks, and blocks if they are numbered.
    """
    ends = ("input", "head", "embedding")
    known = [path for path, role in roles.items() if role.is_matrix or role.name in ends]
    layers = {sites[path].layer for path in known}
    networks = []

    open_: list[tuple[str, ...]] = [()]
    while open_:
        place = open_.pop()
        inside = [layer for layer in layers if layer[: len(place)] == place]
        if any(len(layer) <= len(place) + 1 for layer in inside):
            networks.append(place)
            continue

        parts = {layer[: len(place) + 1] for layer in inside}
        for part in parts:
            is_block = part[-1][-1].isdigit()
            if len(parts) == 1 or not is_block:
                open_.append(part)

    return sorted(networks)


def _runs(
    root: tuple[str, ...], sites: dict[str, LeafSite], roles: Roles, fixed: set[str]
) -> list[list[_Numbered]]:
    runs: dict[str, list[_Numbered]] = {}
    for path, site in sites.items():
        role = roles[path]
        plain = role.is_matrix and role.name in ("matrix", "convolution") and "s" not in role.view
        if site.layer[:-1] != root or not plain:
            continue

        number = re.search(r"\d+$", site.layer[-1])
        _, outputs, inputs = read_view(role.view, site.shape)
        layer = _Numbered(
            path=path,
            number=int(number[0]) if number else -1,
            inputs=inputs,
            outputs=outputs,
            fixed=path in fixed,
        )
        runs.setdefault(base_name(site.layer[-1]), []).append(layer)

    return [sorted(run, key=lambda layer: layer.number) for run in runs.values()]


def _mark_ends(
    run: list[_Numbered], roles: Roles, fed: set[int], read: set[int], after_conv: bool
) -> None:
    for piece in _connected(run, roles):
        first = piece[0]
        last = piece[-1]
        is_input = first.inputs not in fed and not (after_conv and first is run[0])
        is_head = last.outputs not in read
        if len(run) == 1 and first.number < 0 and fed and read:
            continue  # both ends of the model are known, so it is hidden

        if len(run) == 1 and (is_input or is_head) and first.number < 0:
            _set_unclear(roles, first, "may be hidden, the first or the last layer")
            continue

        if is_input:
            _set(roles, first, "input", "the first layer of its run")

        if is_head:
            _set(roles, last, "head", "the last layer of its run")


def _connected(run: list[_Numbered], roles: Roles) -> list[list[_Numbered]]:
    pieces = [[run[0]]]
    for before, after in pairwise(run):
        if before.outputs != after.inputs:
            pieces.append([after])
            continue

        narrow = before.outputs < before.inputs and after.inputs < after.outputs
        if narrow and not (before.fixed or after.fixed):
            _set_unclear(roles, before, f"and {after.path} are a bottleneck or two networks")

        pieces[-1].append(after)

    return pieces


def _set(roles: Roles, layer: _Numbered, name: str, reason: str) -> None:
    if not layer.fixed and not roles[layer.path].unclear:
        roles[layer.path] = Role(name, reason)


def _set_unclear(roles: Roles, layer: _Numbered, why: str) -> None:
    if not layer.fixed:
        problem = f"{layer.path} ({layer.inputs} to {layer.outputs}) {why}"
        roles[layer.path] = replace(roles[layer.path], unclear=problem)
