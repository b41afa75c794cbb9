"""Routing tables: which rule updates each parameter, as a value. Shared by PyTorch and JAX.

`mesotron.route` and `mesotron.jax.label` find the `Role` of each parameter and return the table.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from mesotron.config.rules import AUXILIARY_RULES, SPECTRAL_RULES

if TYPE_CHECKING:
    from rich.console import Console

MAX_RAW_CHANNELS = 4  # of a convolution's input: an image, a video or a depth map
_SPECTRAL_COLORS = ("cyan", "blue", "magenta", "red")
_AUXILIARY_COLORS = ("yellow", "green")
_INDEX = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True)
class Site:
    """Where a parameter is stored; each framework adds what surrounds it."""

    name: str  # the full name, with dots in PyTorch and slashes in JAX
    shape: tuple[int, ...]  # of the (global) tensor


@dataclass(frozen=True)
class Role:
    name: str  # "embedding", "head", "norm", "attention q", "expert", ...
    reason: str  # the evidence, for the reader of the table
    view: str = "whole"  # the matrices it holds (`mesotron.optim.views`, `mesotron.jax.views`)
    is_matrix: bool = False  # a hidden matrix, which a spectral filter may update
    unclear: str = ""  # what could not be determined; such a parameter needs an override
    product: str = ""  # the view of W = W0 + s B A if this LoRA factor can be stepped with its pair


def matrix(name: str, reason: str, view: str = "whole") -> Role:
    return Role(name, reason, view, is_matrix=True)


def unclear(problem: str) -> Role:
    """The role of a parameter that routing refuses to guess."""
    return Role("unknown", "set by override", unclear=problem)


@dataclass(frozen=True)
class Row:
    name: str
    shape: tuple[int, ...]  # of the (global) tensor
    role: str  # what the parameter is
    rule: str  # a name of `mesotron.config.rules`; in JAX "matrix", "adamw" or "lora"
    view: str  # the matrices a spectral rule filters; "whole" or "-" under the other rules
    lr_scale: float
    reason: str
    aliases: tuple[str, ...] = ()  # other names of the same tensor (tied weights)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def label(self) -> str:
        """The rule, with norms and biases apart: they have no weight decay in JAX."""
        vector = self.role in ("norm", "bias") and self.rule == "adamw"
        return "adamw_vectors" if vector else self.rule


class Count(NamedTuple):
    tensors: int
    parameters: int


class RoutingTable:
    """One row per trainable parameter, in the model's own order.

    Example:
        >>> from torch import nn
        >>> from mesotron.optim import route
        >>> table = route(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
        >>> [(row.name, row.rule) for row in table]
        [('0.weight', 'muon'), ('0.bias', 'adamw'), ('1.weight', 'adamw'), ('1.bias', 'adamw')]
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = tuple(rows)
        self._by_name: dict[str, Row] = {}
        for row in rows:
            for name in (row.name, *row.aliases):
                self._by_name[name] = row

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        return self.to_text(full=True).rstrip()

    def row(self, name: str) -> Row:
        """The row of a parameter, by any of its names."""
        if name not in self._by_name:
            raise ValueError(f"the routing table has no trainable parameter {name!r}")
        return self._by_name[name]

    def counts(self) -> dict[str, Count]:
        """Tensors and parameters per rule, spectral rules first."""
        counts = {}
        for rule in _colors():
            sizes = []
            for row in self.rows:
                if row.rule == rule:
                    sizes.append(row.numel)

            if sizes:
                counts[rule] = Count(len(sizes), sum(sizes))

        return counts

    def merged(self) -> list[Row]:
        """Rows that differ only in their layer numbers as one, under a name with ranges.

        Example:
            >>> from torch import nn
            >>> from mesotron.optim import route
            >>> table = route(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
            >>> [row.name for row in table.merged()]
            ['{0..2}.weight', '{0..3}.bias', '3.weight']
        """
        alike: dict[Row, list[Row]] = {}
        for row in self.rows:
            aliases = tuple(_INDEX.sub("{}", alias) for alias in row.aliases)
            key = replace(row, name=_INDEX.sub("{}", row.name), aliases=aliases)
            alike.setdefault(key, []).append(row)

        merged = []
        for key, members in alike.items():
            merged += _merge(key.name, members)

        return merged

    def groups(self, model: Any, **common: Any) -> list[dict[str, Any]]:
        """PyTorch parameter groups: one per (rule, view, lr_scale).

        Args:
            model: the `nn.Module` this table was made from.
            **common: keys for every group, e.g. `weight_decay=0.01`.

        Returns:
            Groups with `params`, `param_names`, `rule`, `view`, `lr_scale` and `name`. A model that
            changed since `route` is refused.
        """
        named = dict(model.named_parameters(remove_duplicate=False))
        self._check_unchanged(named)

        groups: dict[tuple[str, str, float], dict[str, Any]] = {}
        for row in self.rows:
            key = (row.rule, row.view, row.lr_scale)
            if key not in groups:
                groups[key] = {
                    "params": [],
                    "param_names": [],
                    "name": _group_name(row),
                    **common,
                    "rule": row.rule,
                    "view": row.view,
                    "lr_scale": row.lr_scale,
                }

            groups[key]["params"].append(named[row.name])
            groups[key]["param_names"].append(row.name)

        return list(groups.values())

    def _check_unchanged(self, named: dict[str, Any]) -> None:
        """Refuse a model whose parameters are not those of the table."""
        advice = "the model changed since route() (LoRA, freezing, tying?): call route(model) again"
        seen: set[int] = set()
        for row in self.rows:
            param = named.get(row.name)
            same = param is not None and tuple(param.shape) == row.shape and param.requires_grad
            if not same or id(param) in seen:
                raise ValueError(f"{row.name} is gone, frozen, tied or has a new shape: {advice}")

            seen.add(id(param))

        for name, param in named.items():
            if param.requires_grad and id(param) not in seen:
                raise ValueError(f"{name} is trainable but not in the table: {advice}")

    def to_json(self) -> str:
        """The rows as a JSON array."""
        return json.dumps([asdict(row) for row in self.rows], indent=1)

    def to_text(self, *, full: bool = False) -> str:
        """The table as aligned plain text; with `full`, repeated layers do not share a line."""
        cells = self._cells(full)
        widths = [max(map(len, column)) for column in zip(*cells)]
        lines = []
        for line in cells:
            padded = [cell.ljust(width) for cell, width in zip(line, widths)]
            lines.append("  ".join(padded).rstrip())

        return "\n".join([*lines, "", self.summary()]) + "\n"

    def summary(self) -> str:
        """One line: how many tensors and parameters each rule has."""
        total = max(sum(row.numel for row in self.rows), 1)
        parts = []
        for rule, (tensors, size) in self.counts().items():
            share = size / total
            parts.append(f"{rule}: {tensors} tensors, {size:,} parameters ({share:.1%})")

        return "; ".join(parts)

    def render(self, console: "Console", *, full: bool = False) -> None:
        """Print the table with one color per rule."""
        from rich.table import Table

        table = Table(
            box=None,
            pad_edge=False,
            header_style="bold",
        )

        header, *lines = self._cells(full)
        shown, widths = _fit_columns(header, lines, console.width)
        is_narrow = len(shown) < len(header)
        for i in shown:
            if header[i] == "parameter" and is_narrow:
                table.add_column(header[i], overflow="fold")
            else:
                table.add_column(header[i], min_width=widths.get(i), no_wrap=True)

        colors = _colors()
        rule_column = header.index("rule")
        for line in lines:
            cells = [line[i] for i in shown]
            table.add_row(*cells, style=colors[line[rule_column]])

        console.print(table, markup=False)
        console.print(self.summary(), markup=False, highlight=False)

    def _cells(self, full: bool) -> list[list[str]]:
        """The header and one line per row; learning-rate scales only where some differ from 1."""
        cells = [["parameter", "shape", "role", "rule", "view", "lr", "reason"]]
        for row in self.rows if full else self.merged():
            view = "-" if row.rule in AUXILIARY_RULES else row.view
            shape = "x".join(map(str, row.shape)) or "scalar"
            reason = row.reason
            if row.aliases:
                reason += f"; tied to {', '.join(row.aliases)}"

            cells.append([row.name, shape, row.role, row.rule, view, f"{row.lr_scale:g}", reason])

        if any(row.lr_scale != 1.0 for row in self.rows):
            return cells

        return [[*line[:5], line[6]] for line in cells]


def _fit_columns(
    header: list[str],
    lines: list[list[str]],
    width: int,
) -> tuple[Sequence[int], dict[int, int]]:
    """The columns to show, and the width of those that never shrink: narrow terminals drop role and
    reason; very narrow ones wrap names."""
    fixed = [i for i, title in enumerate(header) if title not in ("role", "reason")]
    widths = {}
    for i in fixed:
        widths[i] = max(len(line[i]) for line in [header, *lines])

    is_wide = sum(widths.values()) + 36 <= width
    if is_wide:
        return range(len(header)), widths

    return fixed, widths


def _colors() -> dict[str, str]:
    """A color for each rule, in the order in which rules are counted."""
    return {
        **dict(zip(SPECTRAL_RULES, cycle(_SPECTRAL_COLORS))),
        "matrix": "cyan",  # JAX decides the spectral rule after the table is made
        **dict(zip(AUXILIARY_RULES, cycle(_AUXILIARY_COLORS))),
        "lora": "magenta",
    }


def _merge(pattern: str, members: list[Row]) -> list[Row]:
    """Rows as one, if their layer numbers make up a full grid; `pattern` has {} for each number."""
    indices = [tuple(map(int, _INDEX.findall(row.name))) for row in members]
    columns = [sorted(set(column)) for column in zip(*indices, strict=True)]
    is_grid = math.prod(map(len, columns)) == len(members)
    if len(members) == 1 or not is_grid:
        return members

    name = pattern.format(*map(_ranges, columns))
    return [replace(members[0], name=name)]


def _group_name(row: Row) -> str:
    name = row.rule
    if row.rule in SPECTRAL_RULES and row.view != "whole":
        name += f" {row.view}"
    if row.lr_scale != 1.0:
        name += f" lr*{row.lr_scale:g}"

    return name


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "{0..2,5}"; one number as itself."""
    if len(numbers) == 1:
        return str(numbers[0])

    spans = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        (_, first), *rest = run
        span = f"{first}"
        if rest:
            _, last = rest[-1]
            span += f"..{last}"

        spans.append(span)

    return "{" + ",".join(spans) + "}"
