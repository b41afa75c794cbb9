"""What a process of the study does: its words go to a log, its cells to whom they belong."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from typing import Any

from benchmarks._lib.crew import do_cells
from benchmarks.smollm2.plan import Cell

GRACE = 25.0  # seconds for what is being evaluated when the time is up


def work(values: dict[str, Any], number: int, line: Any, deadline: float) -> None:
    """A process of the crew; libraries are imported once, with the first cell."""
    given = argparse.Namespace(**values)
    log = (given.state / f"worker{number}.log").open("a", buffering=1)
    sys.stdout = sys.stderr = log
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    do_cells(line, lambda cell: run_cell(cell, given, deadline))


def run_cell(cell: Cell, given: Any, deadline: float) -> Cell | None:
    """The work of one cell, by its part and stage."""
    import torch

    torch.set_num_threads(given.threads)
    torch.set_float32_matmul_precision("high")  # for what autocast does not cover
    from benchmarks.smollm2.box import box_cell
    from benchmarks.smollm2.spectrum import spectrum_cell
    from benchmarks.smollm2.supervised import warm_cell
    from benchmarks.smollm2.training import train_cell

    makers = {"spectrum": spectrum_cell, "box": box_cell}
    make = warm_cell if cell["stage"] == "warm" else makers.get(cell["part"], train_cell)
    try:
        return make(cell, given, deadline)
    finally:
        gc.collect()  # trainer and callbacks hold each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
