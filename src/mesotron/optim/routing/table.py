"""The routing table: every trainable parameter in exactly one row, as text, as JSON and as
optimizer groups."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from mesotron.optim.groups import RULES, SPECTRAL_RULES

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Row:
    """How one parameter is trained.

    Args:
        name: as `named_parameters` spells it.
        shape: of the (global) tensor.
        role: what the parameter is.
        rule: "muon", "pion", "adamw" or "sgd".
        view: the matrices a spectral rule filters, in `View`'s string form; "whole" under the other
            rules.
        lr_scale: factor on the learning rate.
        reason: why.
        aliases: other names of the same tensor (tied weights).
    """

    name: str
    shape: tuple[int, ...]
    role: str
    rule: str
    view: str
    lr_scale: float
    reason: str
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count


class Count(NamedTuple):
    """What one rule has to train."""

    tensors: int
    parameters: int


class RoutingTable:
    """Rows in the model's own order.

    Example:
        >>> from mesotron.optim.routing import route
        >>> table = route(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
        >>> [(row.name, row.rule) for row in table]
        [('0.weight', 'muon'), ('0.bias', 'adamw'), ('1.weight', 'adamw'), ('1.bias', 'adamw')]
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = tuple(rows)
        self._by_name = {name: row for row in rows for name in (row.name, *row.aliases)}

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, name: str) -> Row:
        """The row of a parameter, by any of its names."""
        if name not in self._by_name:
            raise ValueError(f"no trainable parameter is called {name!r} in this routing table")
        return self._by_name[name]

    def counts(self) -> dict[str, Count]:
        """Tensors and parameters per rule, spectral rules first."""
        found: dict[str, Count] = {}
        for rule in RULES:
            rows = [row for row in self.rows if row.rule == rule]
            if rows:
                found[rule] = Count(len(rows), sum(row.numel for row in rows))
        return found

    def merged(self) -> list[Row]:
        """Rows that differ only in their layer numbers as one, under a name with ranges.

        Example:
            >>> from mesotron.optim.routing import route
            >>> table = route(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
            >>> [row.name for row in table.merged()]
            ['{0..2}.weight', '{0..3}.bias', '3.weight']
        """
        return [replace(row, name=name) for name, row in _collapse(self.rows)]

    def groups(self, model: nn.Module, **common: Any) -> list[dict[str, Any]]:
        """Optimizer parameter groups: one per (rule, view, lr_scale).

        Args:
            model: the model this table was made from.
            **common: keys to put into every group, e.g. `weight_decay=0.01`.

        Returns:
            Groups with `params`, `param_names`, `rule`, `view`, `lr_scale` and `name`. Each
            trainable parameter of the model is in exactly one; a model that changed since `route`
            is refused.
        """
        named = dict(model.named_parameters(remove_duplicate=False))
        self._check_covers(named)
        groups: dict[tuple[str, str, float], dict[str, Any]] = {}
        for row in self.rows:
            key = (row.rule, row.view, row.lr_scale)
            if key not in groups:
                groups[key] = {"params": [], "param_names": [], "name": _group_name(*key), **common}
                groups[key] |= {"rule": row.rule, "view": row.view, "lr_scale": row.lr_scale}
            groups[key]["params"].append(named[row.name])
            groups[key]["param_names"].append(row.name)
        return list(groups.values())

    def _check_covers(self, named: dict[str, nn.Parameter]) -> None:
        """Every trainable parameter in exactly one row, by identity."""
        advice = "the model changed since route() (LoRA, freezing, tying?): call route(model) again"
        gone = next((row.name for row in self.rows if row.name not in named), None)
        if gone is not None:
            raise ValueError(f"the table has a row for {gone}, which the model has not: {advice}")
        owners: dict[int, str] = {}
        for row in self.rows:
            param = named[row.name]
            if tuple(param.shape) != row.shape or not param.requires_grad:
                raise ValueError(
                    f"{row.name} is frozen or has another shape than its row: {advice}"
                )
            if id(param) in owners:
                raise ValueError(
                    f"{row.name} and {owners[id(param)]} are one tensor in two rows: {advice}"
                )
            owners[id(param)] = row.name
        for name, param in named.items():
            if param.requires_grad and id(param) not in owners:
                raise ValueError(f"{name} is trainable and has no row: {advice}")

    def to_json(self) -> str:
        """The rows as a JSON array."""
        return json.dumps([asdict(row) for row in self.rows], indent=1)

    def to_text(self, *, full: bool = False) -> str:
        """The table as aligned plain text.

        Args:
            full: one line per parameter; otherwise repeated layers share a line,
                `layers.{0..27}.mlp.up_proj.weight`.
        """
        cells = [self._header(), *self._lines(full)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
            for line in cells
        ]
        return "\n".join([*lines, "", self.summary()]) + "\n"

    def summary(self) -> str:
        """One line: how many tensors and parameters each rule has."""
        total = sum(row.numel for row in self.rows)
        parts = [
            f"{rule}: {count.tensors} tensors, {count.parameters:,} parameters "
            f"({count.parameters / total:.1%})"
            for rule, count in self.counts().items()
        ]
        return "; ".join(parts)

    def render(self, console: Console, *, full: bool = False) -> None:
        """Print the table in colour, one colour per rule."""
        from rich.table import Table

        colours = {"muon": "cyan", "pion": "magenta", "adamw": "yellow", "sgd": "green"}
        table = Table(box=None, pad_edge=False, header_style="bold")
        lines, header = self._lines(full), self._header()
        # What must be read whole keeps its width; in a narrow terminal role and reason give way,
        # in a very narrow one names are folded.
        whole = [i for i, title in enumerate(header) if title not in ("role", "reason")]
        widths = {i: max(len(line[i]) for line in [header, *lines]) for i in whole}
        roomy = sum(widths.values()) + 36 <= console.width
        shown = range(len(header)) if roomy else whole
        for i in shown:
            if header[i] == "parameter" and not roomy:
                table.add_column(header[i], overflow="fold")
            else:
                table.add_column(header[i], min_width=widths.get(i), no_wrap=True)
        for line in lines:
            style = colours[line[header.index("rule")]]
            table.add_row(*(line[i] for i in shown), style=style)
        console.print(table, markup=False)
        console.print(self.summary(), markup=False, highlight=False)

    def _header(self) -> list[str]:
        titles = ["parameter", "shape", "role", "rule", "view", "reason"]
        if any(row.lr_scale != 1.0 for row in self.rows):
            titles.insert(5, "lr")
        return titles

    def _lines(self, full: bool) -> list[list[str]]:
        scaled = "lr" in self._header()
        return [_cells(row, scaled) for row in (self.rows if full else self.merged())]


def _group_name(rule: str, view: str, lr_scale: float) -> str:
    name = f"{rule} {view}" if rule in SPECTRAL_RULES and view != "whole" else rule
    return name if lr_scale == 1.0 else f"{name} lr*{lr_scale:g}"


def _cells(row: Row, scaled: bool) -> list[str]:
    view = row.view if row.rule in SPECTRAL_RULES else "-"
    reason = row.reason + (f"; tied to {', '.join(row.aliases)}" if row.aliases else "")
    shape = "x".join(map(str, row.shape)) or "scalar"
    cells = [row.name, shape, row.role, row.rule, view, reason]
    if scaled:
        cells.insert(5, f"{row.lr_scale:g}")
    return cells


_INDEX = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


def _collapse(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """Rows that differ only in their layer numbers, as one row under a name with ranges."""
    alike: dict[tuple, list[Row]] = {}
    for row in rows:
        aliases = tuple(_INDEX.sub("{}", alias) for alias in row.aliases)
        key = (
            _INDEX.sub("{}", row.name),
            row.shape,
            row.role,
            row.rule,
            row.view,
            row.lr_scale,
            row.reason,
            aliases,
        )
        alike.setdefault(key, []).append(row)
    merged = []
    for key, members in alike.items():
        indices = [tuple(map(int, _INDEX.findall(row.name))) for row in members]
        columns = [sorted(set(column)) for column in zip(*indices, strict=True)]
        full = 1
        for column in columns:
            full *= len(column)
        if len(members) == 1 or full != len(members):  # not a full grid of indices: spell them out
            merged += [(row.name, row) for row in members]
        else:
            merged.append((key[0].format(*map(_spell, columns)), members[0]))
    return merged


def _spell(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "{0..2,5}"; one number as itself."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    if len(numbers) == 1:
        return str(numbers[0])
    spelled = [str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs]
    return "{" + ",".join(spelled) + "}"
