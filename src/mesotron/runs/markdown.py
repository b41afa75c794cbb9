"""Reports in Markdown: templates and tables."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mesotron.runs.files import Row


def fill_template(path: Path, **values: Any) -> str:
    """A Jinja template with these values; text is not escaped, and unknown names are errors."""
    from jinja2 import Environment, StrictUndefined

    options: Any = {
        "undefined": StrictUndefined,
        "trim_blocks": True,
        "lstrip_blocks": True,
    }

    options |= {"keep_trailing_newline": True}
    return Environment(**options).from_string(path.read_text(encoding="utf-8")).render(values)


def make_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]


def training_table(rows: Sequence[Row], names: Sequence[str], spec: str) -> list[str]:
    """Ten of the rows, from the first to the last."""
    cells = [
        [str(rows[k]["step"]), *(f"{rows[k][x]:{spec}}" if x in rows[k] else "" for x in names)]
        for k in sorted({round(n * (len(rows) - 1) / 9) for n in range(10)})
    ]
    return make_table(["step", *names], cells)
