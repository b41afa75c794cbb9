"""What a process of the study does with a cell."""

from __future__ import annotations

from typing import Any

from benchmarks._lib.crew import torch_process
from benchmarks.smollm2.plan import Cell

GRACE = 25.0  # seconds for what is being evaluated when the time is up


def run_cell(cell: Cell, settings: dict[str, Any], deadline: float) -> Cell | None:
    """Run a cell by its part and stage."""
    with torch_process(settings) as given:
        from benchmarks.smollm2.spectrum import spectrum_cell
        from benchmarks.smollm2.supervised import warm_cell
        from benchmarks.smollm2.training import train_cell

        if cell["stage"] == "warm":
            return warm_cell(cell, given, deadline)
        if cell["part"] == "spectrum":
            return spectrum_cell(cell, given, deadline)
        return train_cell(cell, given, deadline)
