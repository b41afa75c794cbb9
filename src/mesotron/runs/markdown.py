"""Reports in Markdown: templates and tables."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mesotron.runs.files import Row, printable


def fill_template(path: Path, **values: Any) -> str:
    """A Jinja template with these values; text is not escaped, and unknown names are errors."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    template = environment.from_string(path.read_text(encoding="utf-8"))

    return template.render(values)


def make_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]


def as_plain(text: str) -> str:
    """A text of a log or a model as Markdown that shows it and does no more.

    >>> print(as_plain("<b> | x"))
    \\<b\\> \\| x
    """
    return re.sub(r"([\\`*_{}\[\]<>|#!~@])", r"\\\1", printable(" ".join(text.split())))


def training_table(rows: Sequence[Row], names: Sequence[str], spec: str) -> list[str]:
    """Ten of the rows, from the first to the last."""
    last = len(rows) - 1
    chosen = sorted({round(n * last / 9) for n in range(10)})

    cells = []
    for row in (rows[k] for k in chosen):
        values = [f"{row[name]:{spec}}" if name in row else "" for name in names]
        cells.append([str(row["step"]), *values])

    return make_table(["step", *names], cells)
