"""Files of one JSON object a line, safe against being killed in the middle of a line.

A line is written with one call and flushed. Whoever reads leaves out a torn last line; a broken
line anywhere else is an error that names it. Numbers that are not finite are written as Python
writes them (NaN, Infinity), since a NaN loss is the very thing that a reader looks for.
"""

import json
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]
# Half of a surrogate pair, which a data set may hold and UTF-8 may not, is written as JSON's own
# escape of it.
ESCAPED = "backslashreplace"


def append_row(path: Path, row: Row) -> None:
    """Add one row at the end of a file, making the file if need be."""
    with path.open("a", encoding="utf-8", errors=ESCAPED) as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Every whole row of a file; none if there is no file.

    Raises:
        ValueError: a line in the middle is not a JSON object; the text names file and line.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    torn = lines.pop()  # empty after a whole last line
    rows = [parse_row(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if torn.strip():
        try:
            rows.append(parse_row(path, len(lines) + 1, torn))  # whole but for its line break
        except ValueError:
            return rows
    return rows


def parse_row(path: Path, number: int, line: bytes) -> Row:
    """One line as a row, or a sentence on what is wrong with it."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path} line {number} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{path} line {number} is not a JSON object but {type(row).__name__}")
    return row


def cut_rows_after(path: Path, step: int) -> None:
    """Keep the rows up to a step, and drop a torn last line; the file is replaced at once."""
    if not path.exists():
        return
    kept = [row for row in read_rows(path) if row.get("step", 0) <= step]
    write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))


def write_whole(path: Path, text: str) -> None:
    """Replace a file's text: a reader, or a kill, finds the old or the new one, never a part."""
    draft = path.with_name(f".{path.name}.writing")
    with draft.open("w", encoding="utf-8", errors=ESCAPED) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file that a person can read, at once or not at all."""
    write_whole(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def check_writable(path: Path, name: str = "result.json") -> None:
    """Refuse an output file that cannot be written, before the minutes its content takes."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file in it, such as {path / name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{path} cannot be written: name a file that can")
