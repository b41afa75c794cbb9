"""Results are lists of dictionaries; these choose among them, sum them up and show them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

Row = dict[str, Any]


def where(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """The rows with these values; a row without a key has None there.

    Example:
        >>> where([{"seed": 1, "use": "tuning"}, {"seed": 2}], use="tuning")
        [{'seed': 1, 'use': 'tuning'}]
    """
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def values(rows: Iterable[Row], key: str) -> list[Any]:
    """What the rows have under a key; rows without it, or with None there, are left out."""
    found = (row.get(key) for row in rows)
    return [value for value in found if value is not None]


def distinct(rows: Iterable[Row], key: str) -> list[Any]:
    """The values under a key, each once, as they come."""
    return list(dict.fromkeys(values(rows, key)))


def mean_of(rows: Iterable[Row], key: str) -> float:
    return fmean(values(rows, key))


def by_key(rows: Iterable[Row], key_of: Callable[[Row], Any]) -> dict[Any, Row]:
    """Rows by their name; of two with the same name the later one counts."""
    return {key_of(row): row for row in rows}


def spelled(numbers: Iterable[float], form: str) -> list[str]:
    """Numbers as text, such as ["0.10", "0.25"] for the form ".2f"."""
    return [format(number, form) for number in numbers]


def listed(numbers: Iterable[float], form: str) -> str:
    """Numbers as one text with commas."""
    return ", ".join(spelled(numbers, form))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; nothing where there are no rows."""
    if not rows:
        return ""

    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
