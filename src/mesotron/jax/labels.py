"""Labels: every leaf of a parameter tree in one row, with its rule, its view and the reason.

Hidden matrices go to the spectral rule; embeddings, input layers, positions, norms, biases and
heads to Adam, by path and role and not by rank alone. Doubt raises with a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import jax

from mesotron.jax.ends import find_ends
from mesotron.jax.paths import attribute_leaves, named_leaves
from mesotron.jax.roles import Reading, Site, make_sites, read
from mesotron.jax.views import check_view, default_view

_VECTORS = ("norm", "bias")


@dataclass(frozen=True)
class Row:
    """How one leaf is trained.

    Args:
        path: with slashes.
        shape: of the array.
        role: what the leaf is.
        rule: "matrix" or "adamw".
        view: the matrices that a spectral rule filters (`mesotron.jax.views`); "-" under AdamW.
        reason: why.
    """

    path: str
    shape: tuple[int, ...]
    role: str
    rule: str
    view: str
    reason: str

    @property
    def label(self) -> str:
        """The rule, with vectors apart: they have no weight decay."""
        return "adamw_vectors" if self.role in _VECTORS and self.rule == "adamw" else self.rule


class LabelTable:
    """Rows in the tree's own order; `str` is the printed table."""

    def __init__(self, rows: Sequence[Row], structure: Any) -> None:
        self.rows = tuple(rows)
        self._structure = structure

    def labels(self) -> Any:
        """A tree of labels like the parameters, for `optax.partition`."""
        return jax.tree.unflatten(self._structure, [row.label for row in self.rows])

    def views(self) -> dict[str, str]:
        """Path -> view of every matrix, for `mesotron.jax.muon(views=...)`."""
        return {row.path: row.view for row in self.rows if row.rule == "matrix"}

    def __str__(self) -> str:
        cells = [["leaf", "shape", "role", "rule", "view", "reason"]]
        for row in self.rows:
            shape = "x".join(map(str, row.shape)) or "scalar"
            cells.append([row.path, shape, row.role, row.rule, row.view, row.reason])
        widths = [max(map(len, column)) for column in zip(*cells)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in cells]
        return "\n".join([*lines, "", self.summary()])

    def summary(self) -> str:
        """One line: how many leaves and parameters each rule has."""
        total = max(sum(math.prod(row.shape) for row in self.rows), 1)
        parts = []
        for rule in ("matrix", "adamw"):
            sizes = [math.prod(row.shape) for row in self.rows if row.rule == rule]
            share = f"{sum(sizes):,} parameters ({sum(sizes) / total:.1%})"
            parts.append(f"{rule}: {len(sizes)} leaves, {share}")
        return "; ".join(parts)


def label(
    params: Any,
    *,
    per_head: bool = False,
    stacked: Sequence[str] = (),
    overrides: Mapping[str, str] | None = None,
) -> LabelTable:
    """Sort the leaves of a parameter tree.

    Args:
        params: a tree of arrays (or of shapes): flax variables, `eqx.filter(model, eqx.is_array)`,
            a plain dict or list. Gradients do as well.
        per_head: filter attention kernels with an axis of heads head by head.
        stacked: patterns of paths whose first axis holds separate layers, as `nn.scan` makes them.
            Experts, and layers whose bias has that axis too, are found without it.
        overrides: pattern of paths -> "adamw", "matrix" or a view such as "iso"; the first pattern
            that matches a leaf counts. Patterns are those of `fnmatch`; one that matches nothing
            raises.

    Returns:
        A `LabelTable`. A kernel is read as (inputs, outputs), JAX's order; only a field called
        `weight`, as in Equinox, is (outputs, inputs).

    Example:
        >>> import jax.numpy as jnp
        >>> layer = lambda i, o: {"w": jnp.zeros((i, o)), "b": jnp.zeros(o)}
        >>> table = label([layer(3, 8), layer(8, 8), layer(8, 2)])
        >>> [(row.path, row.role) for row in table.rows if row.role != "bias"]
        [('0/w', 'input'), ('1/w', 'matrix'), ('2/w', 'head')]
    """
    overrides = overrides or {}
    shapes = {path: tuple(leaf.shape) for path, leaf in named_leaves(params)}
    _check_patterns([*stacked, *overrides], shapes)
    sites = {
        path: replace(site, stacked=_first_match(path, stacked) is not None)
        for path, site in make_sites(shapes, attribute_leaves(params)).items()
    }
    readings = {path: _read(site, overrides, per_head) for path, site in sites.items()}
    fixed = {path for path in sites if _first_match(path, overrides) is not None}
    readings = find_ends(sites, readings, fixed)
    _refuse_doubt(readings, bool(fixed))
    rows = [_row(sites[path], readings[path]) for path in shapes]
    return LabelTable(rows, jax.tree.structure(params))


def _read(site: Site, overrides: Mapping[str, str], per_head: bool) -> Reading:
    pattern = _first_match(site.path, overrides)
    reading = read(site)
    if pattern is not None:
        return _override(site, overrides[pattern], f"override {pattern!r}", reading)
    if not per_head or reading.role != "attention" or reading.view is None:
        return reading
    # The axis of heads is the one beside the head's width: (in, heads, width), (heads, width, out).
    swap = {"isoo": "isso", "ioo": "iso", "iio": "sio"}
    whole = next((view for view in swap if reading.view.endswith(view)), None)
    if whole is None:
        why = f"{site.path} {site.shape} has no axis of heads to filter it head by head"
        return replace(reading, doubt=why)
    view = reading.view.removesuffix(whole) + swap[whole]
    return replace(reading, view=view, reason="projection, head by head")


def _override(site: Site, choice: str, reason: str, reading: Reading) -> Reading:
    if choice == "adamw":
        role = reading.role if reading.view is None and not reading.doubt else "override"
        return Reading(role, reason)
    if choice == "matrix":
        return Reading("matrix", reason, reading.view or default_view(len(site.shape)))
    return Reading("matrix", reason, check_view(choice, site.shape, site.path))


def _row(site: Site, reading: Reading) -> Row:
    rule = "adamw" if reading.view is None else "matrix"
    return Row(site.path, site.shape, reading.role, rule, reading.view or "-", reading.reason)


def _first_match(path: str, patterns: Any) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(path, pattern)), None)


def _check_patterns(patterns: Sequence[str], shapes: Mapping[str, Any]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in shapes):
            known = ", ".join(list(shapes)[:3])
            raise ValueError(f"the pattern {pattern!r} matches no leaf; paths look like {known}")


def _refuse_doubt(readings: Mapping[str, Reading], decided: bool) -> None:
    """Raise for what could not be told, all of it in one sentence."""
    doubts = [reading.doubt for reading in readings.values() if reading.doubt]
    advice = "say what it is: overrides={'<path>': 'adamw'}, 'matrix' or a view such as 'sio'"
    if doubts:
        raise ValueError(f"cannot tell what to do with {'; '.join(doubts)}. Please {advice}")
    roles = {reading.role for reading in readings.values()}
    # A table can be the head as well (tied weights); any override means that somebody has looked.
    if not roles & {"head", "embedding"} and not decided and "matrix" in roles:
        raise ValueError(f"no leaf looks like an output layer. If there is one, {advice}")
