"""Helpers for the page's tables: how a metric ended."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from benchmarks.smollm2.plan import Cell


def column_end(cell: Cell, name: str) -> float:
    """The mean of a metric's last five values; NaN if it was not logged."""
    last = [value for _, value in cell["rows"].get(name, [])][-5:]
    return fmean(last) if last else float("nan")


def mean_ends(cells: Sequence[Cell], names: Sequence[str]) -> list[str]:
    """Of each metric the mean over seeds of its last values; empty if it was not logged."""
    ends = []
    for name in names:
        logged = []
        for cell in cells:
            if name in cell["rows"]:
                logged.append(column_end(cell, name))

        ends.append(f"{fmean(logged):.2f}" if logged else "")
    return ends
