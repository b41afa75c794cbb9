"""The lost answer format: `mesotron train` with watch and guard, and their diagnosis."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from typing import Any

from benchmarks.smollm2.plan import Cell
from benchmarks.smollm2.training import column, config_of
from mesotron.rlvr import train
from mesotron.rlvr.run_report import watch_lines
from mesotron.runs import RunFolder

KEPT = ("reward", "facts/correct", "facts/formatted", "groups/zero_signal", "entropy", "grad_norm")
EVALUATIONS = 5


def box_cell(cell: Cell, given: Any, deadline: float) -> Cell | None:
    """Run the command; None if there is no time left to begin."""
    if time.time() > deadline:
        return None
    began = time.time()
    path = given.state / "runs" / f"box-{time.time_ns():x}"
    config = replace(config_of(cell, given, path), eval_every=max(cell["steps"] // EVALUATIONS, 1))
    train.run(config)
    run = RunFolder(path)
    rows, events = run.rows("metrics"), run.rows("events")
    found = {
        "curve": [[row["step"], row["eval/greedy"]] for row in rows if "eval/greedy" in row],
        "result": run.result,
        "events": events,
        "story": "\n".join(watch_lines(rows, events)),
        "rows": {name: column(rows, name) for name in KEPT},
        "samples": run.rows("samples")[-4:],
        "seconds": time.time() - began,
    }
    shutil.rmtree(path)
    return cell | found
