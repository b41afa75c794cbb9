"""What a process of the study does with a cell; data and compiled code stay for the next one."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from benchmarks.vla.cell import Bench, Late
from benchmarks.vla.plan import Cell

_bench: Bench | None = None


def run_cell(cell: Cell, settings: dict[str, Any], deadline: float) -> Cell | None:
    """Run a cell; one that would be late is given back."""
    global _bench
    if _bench is None:
        import torch

        torch.set_num_threads(1)
        _bench = Bench(Namespace(**settings), deadline)

    try:
        return _bench.run(cell)
    except Late:
        return None
