"""What a process of the study does with a cell."""

from __future__ import annotations

import argparse
import gc
import os
from typing import Any

from benchmarks.smollm2.plan import Cell

GRACE = 25.0  # seconds for what is being evaluated when the time is up


def run_cell(cell: Cell, settings: dict[str, Any], deadline: float) -> Cell | None:
    """Run a cell by its part and stage."""
    given = argparse.Namespace(**settings)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    import torch

    torch.set_num_threads(given.threads)
    torch.set_float32_matmul_precision("high")  # for what autocast does not cover
    from benchmarks.smollm2.spectrum import spectrum_cell
    from benchmarks.smollm2.supervised import warm_cell
    from benchmarks.smollm2.training import train_cell

    make = spectrum_cell if cell["part"] == "spectrum" else train_cell

    make = warm_cell if cell["stage"] == "warm" else make
    try:
        return make(cell, given, deadline)
    finally:
        gc.collect()  # trainer and callbacks refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
