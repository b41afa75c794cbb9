"""JSON and JSON-lines files that survive a kill at any moment; NaN and Infinity are allowed.

They are files of a run: opened without following links, unless the caller says that a link is fine.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mesotron.runs.links import open_draft, open_own

Row = dict[str, Any]
# Data may hold half of a surrogate pair, which UTF-8 cannot encode: write JSON's escape of it.
ESCAPED = "backslashreplace"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in an error that does not, such as "No space left on device"."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def append_row(path: Path, row: Row) -> None:
    with naming(path), open_own(path, "a", errors=ESCAPED) as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Every complete row of a file; none if there is no file."""
    try:
        with open_own(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return []

    rows: list[Row] = []
    lines = data.split(b"\n")  # the last is empty, or torn, or lacks its line break
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue

        try:
            rows.append(read_row(line))
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path} line {number} is not a JSON object: {error}") from error

    return rows


def read_row(line: bytes) -> Row:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"it is a {type(row).__name__}")

    return row


def rows_of_steps(rows: list[Row]) -> list[Row]:
    """The rows that have a step; no other can be placed in a run."""
    return [row for row in rows if type(row.get("step")) in (int, float)]


def last_value(rows: list[Row], name: str) -> float:
    """The value of a metric in the last row that has it; NaN if none has."""
    return next((row[name] for row in reversed(rows) if name in row), math.nan)


def cut_rows_after(path: Path, step: int) -> None:
    """Drop the rows after a step, and a torn last line."""
    if not path.exists():
        return

    kept = ""
    for row in rows_of_steps(read_rows(path)):
        if row["step"] <= step:
            kept += json.dumps(row, ensure_ascii=False) + "\n"

    write_whole(path, kept)


def amend_row(path: Path, step: int, values: Row) -> None:
    """Add values to the row of a step."""
    text = ""
    for row in read_rows(path):
        if row.get("step") == step:
            row |= values
        text += json.dumps(row, ensure_ascii=False) + "\n"

    write_whole(path, text)


def write_whole(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees the old text or the new one. One writer at a time:
    a run's lock sees to that."""
    draft = path.with_name(f".{path.name}.writing")
    with naming(draft), open_draft(draft, errors=ESCAPED) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())

    draft.replace(path)


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path, *, follow_links: bool = False) -> Row:
    """A file that holds a JSON object; ValueError names any other."""
    open_file = open if follow_links else open_own
    with open_file(path, "rb") as file:
        data = file.read()

    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error

    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: it holds a {type(value).__name__}, not an object")

    return value


def check_writable(path: Path, name: str = "result.json") -> None:
    """Refuse an output file that cannot be written, before the minutes its content takes."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file in it, such as {path / name}")

    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{path} cannot be written: name a file that can")


def printable(text: Any) -> str:
    r"""Text whose control and invisible characters, except line breaks, are spelled out.

    >>> print(printable("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    whole = str(text)
    if whole.isprintable():
        return whole

    shown = ""
    for character in whole:
        if character.isprintable() or character == "\n":
            shown += character
        else:
            shown += character.encode("unicode_escape").decode()

    return shown
