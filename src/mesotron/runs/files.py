"""JSON and JSON-lines files that survive a kill at any moment.

A line is written in one call. Readers skip a torn last line; a broken line elsewhere is an error
that names it. Non-finite numbers are written as NaN and Infinity: a NaN loss is what a reader looks
for.
"""

import json
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]
# Data may hold half of a surrogate pair, which UTF-8 cannot encode: write JSON's escape of it.
ESCAPED = "backslashreplace"


def append_row(path: Path, row: Row) -> None:
    with path.open("a", encoding="utf-8", errors=ESCAPED) as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Every complete row of a file; none if there is no file."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    torn = lines.pop()  # empty after a complete last line
    rows = [parse_row(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if torn.strip():
        try:
            rows.append(parse_row(path, len(lines) + 1, torn))  # complete but for its line break
        except ValueError:
            return rows
    return rows


def parse_row(path: Path, number: int, line: bytes) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path} line {number} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{path} line {number} is not a JSON object but {type(row).__name__}")
    return row


def cut_rows_after(path: Path, step: int) -> None:
    """Drop the rows after a step, and a torn last line."""
    if path.exists():
        kept = [row for row in read_rows(path) if row.get("step", 0) <= step]
        write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))


def write_whole(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees the old text or the new one."""
    draft = path.with_name(f".{path.name}.writing")
    with draft.open("w", encoding="utf-8", errors=ESCAPED) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def check_writable(path: Path, name: str = "result.json") -> None:
    """Refuse an output file that cannot be written, before the minutes its content takes."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file in it, such as {path / name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{path} cannot be written: name a file that can")
