"""Helpers for the pages' tables: rows, cells by value, ends of curves."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from benchmarks.smollm2.plan import Cell


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def of(cells: list[Cell], **wanted: Any) -> list[Cell]:
    """Cells with these values."""
    return [cell for cell in cells if all(cell.get(k) == value for k, value in wanted.items())]


def names(cells: list[Cell], key: str = "optim") -> list[str]:
    return list(dict.fromkeys(cell[key] for cell in cells))


def column_end(cell: Cell, name: str) -> float:
    """The mean of a metric's last five values; NaN if it was not logged."""
    values = [value for _, value in cell["rows"].get(name, [])][-5:]
    return fmean(values) if values else float("nan")


def mean_end(cells: list[Cell], name: str) -> str:
    """The mean over seeds of a metric's last values; empty if it was not logged."""
    values = [column_end(cell, name) for cell in cells if name in cell["rows"]]
    return f"{fmean(values):.2f}" if values else ""
