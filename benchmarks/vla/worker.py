"""What a process of the study does: it loads the demonstrations once, then trains and plays cells.

While one plays, which is the processor's work, the others have the GPU.
"""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

from benchmarks._lib.crew import do_cells
from benchmarks.vla.cell import Bench, Late
from benchmarks.vla.plan import Cell


def work(settings: dict[str, Any], number: int, line: Any, deadline: float) -> None:
    """A process of the crew; a cell that would be late is given back."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    bench: Bench | None = None

    def run(cell: Cell) -> Cell | None:
        nonlocal bench
        bench = bench or Bench(Namespace(**settings), deadline)
        try:
            return bench.run(cell)
        except Late:
            return None

    do_cells(line, run)
