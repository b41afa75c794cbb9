"""JSON documents: a trainer_state.json, rows, columns, or a notebook with a trainer's output."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mesotron.watch.detectors import ACTION_KEY
from mesotron.watch.formats.console import Console
from mesotron.watch.reader import (
    MAX_DOCUMENT,
    MAX_LINE,
    WholeReader,
    first_line,
    log_format,
    open_bytes,
    read_bytes,
    reason,
)
from mesotron.watch.rows import MAX_DEPTH, Row, step_count, to_row

CELL = re.compile(r"<t[hd][^>]{0,200}>([^<]{0,200})</t[hd]>")


@log_format(
    "trainer_state",
    about="Transformers, TRL, Unsloth: an output folder, `trainer_state.json`, a notebook; "
    "other JSON with rows or columns",
)
class Document(WholeReader):
    rank = 20
    suffixes = (".json", ".ipynb")
    in_folders = False
    joins = False  # Trainer writes in order
    max_steps: Any = None

    @classmethod
    def recognizes(cls, head: bytes) -> bool:
        return first_line(head).strip() in ("{", "[")

    @classmethod
    def run_files(cls, folder: Path) -> list[Path]:
        """Its state, or the newest one of its checkpoints: a TRL output folder is one run."""
        state = folder / "trainer_state.json"
        if state.is_file():
            return [state]

        states: dict[int, Path] = {}
        for file in folder.glob("checkpoint-*/trainer_state.json"):
            step = file.parent.name.removeprefix("checkpoint-")
            if step.isdecimal():
                states[int(step)] = file

        return [states[max(states)]] if states else []

    def finish(self) -> list[Row]:
        value = self._load()
        if isinstance(value, dict) and isinstance(value.get("cells"), list):
            return self._read_notebook(value["cells"])

        if isinstance(value, dict):
            self.max_steps = value.get("max_steps")

        items = find_rows(value)
        if items is None:
            raise ValueError(
                f"{self.path} has no log_history, rows or columns: give a trainer_state.json or a "
                "file with one JSON object per line"
            )

        rows = []
        self.actions = []
        for item in items:
            if ACTION_KEY in item:
                if isinstance(item[ACTION_KEY], dict):
                    self.actions.append(item[ACTION_KEY])
                continue

            row = to_row(item)
            if row:
                rows.append(row)

        return rows

    def planned_steps(self) -> float | None:
        return step_count(self.max_steps)

    def _load(self) -> Any:
        with open_bytes(self.path) as file:
            data = read_bytes(file, MAX_DOCUMENT + 1, self.path)

        if len(data) > MAX_DOCUMENT:
            raise ValueError(f"{self.path} is larger than {MAX_DOCUMENT} bytes: use its JSONL")

        try:
            return json.loads(data.decode("utf-8-sig", errors="replace"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.path} is not JSON of a log: {reason(error)}") from error

    def _read_notebook(self, cells: list[Any]) -> list[Row]:
        try:
            return [row for row in notebook_rows(cells) if row]
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{self.path} is not JSON of a log: {reason(error)}") from error


def find_rows(value: Any, depth: int = MAX_DEPTH) -> list[dict[str, Any]] | None:
    """The longest list of objects in a document, columns or objects by their step as rows."""
    if isinstance(value, list):
        is_rows = all(isinstance(row, dict) for row in value)
        return value if is_rows else None

    if not isinstance(value, dict):
        return None
    if "log_history" in value:
        return find_rows(value["log_history"], 0)
    if _is_by_step(value):
        return [{"step": step} | row for step, row in value.items()]

    found: list[list[dict[str, Any]]] = []
    columns = _rows_of_columns(value)
    if columns:
        found.append(columns)

    if depth:
        for item in value.values():
            inside = find_rows(item, depth - 1)
            if inside is not None:
                found.append(inside)

    return max(found, key=len, default=None)


def _is_by_step(value: dict[str, Any]) -> bool:
    """Whether a document has one object for each step."""
    if not value:
        return False
    return all(key.isdecimal() and isinstance(row, dict) for key, row in value.items())


def _rows_of_columns(value: dict[str, Any]) -> list[dict[str, Any]]:
    columns = {key: column for key, column in value.items() if _is_column(column)}
    length = max(map(len, columns.values()), default=0)

    rows: list[dict[str, Any]] = [{} for _ in range(length)]
    for key, column in columns.items():
        for row, item in zip(rows, column):
            row[key] = item

    return rows


def _is_column(value: Any) -> bool:
    if not isinstance(value, list) or len(value) < 2:
        return False
    return all(item is None or isinstance(item, int | float) for item in value)


def notebook_rows(cells: list[Any]) -> Iterator[Row]:
    """Rows of the tables and dictionaries in the outputs of a notebook."""
    console = Console(Path())
    for cell in cells:
        for output in cell.get("outputs", ()):
            html = "".join(output.get("data", {}).get("text/html", ""))  # a text or its lines
            yield from _table_rows(html)

            text = "".join(output.get("text", ""))
            for line in text.split("\n"):
                yield from console.parse(line[:MAX_LINE])

    yield from console.end()


def _table_rows(html: str) -> Iterator[Row]:
    header: list[str] = []
    for line in html.split("<tr")[1:]:
        cells = CELL.findall(line)
        if "<th" in line and "<td" not in line:
            header = [cell.strip() for cell in cells]
        elif header and len(cells) == len(header):
            yield to_row(dict(zip(header, cells)))
