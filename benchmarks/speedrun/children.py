"""Cells one after another, each in a fresh process that is alone on the GPU.

While a cell runs, the process of the next one imports its libraries; it touches the GPU only when
its cell starts. A cell that fails or hangs is recorded, and the next one starts.
"""

from __future__ import annotations

import importlib.metadata as metadata
import json
import os
import time
from pathlib import Path
from typing import Any, Self

from benchmarks._lib.results import read_json, write_json
from mesotron.runs.workers import START_SECONDS, Worker, resolve

Row = dict[str, Any]
GRACE = 60.0  # seconds beyond its limit after which a process is killed
HERE = "benchmarks.speedrun.children"


class Children:
    """Processes that run cells, one each.

    Args:
        target: "module:function" that is called as `function(folder=, seconds=, **given) -> dict`.
        compile_anew: every clock counts its own compilation, nothing is shared with other cells.
    """

    def __init__(self, target: str, compile_anew: bool = True) -> None:
        self.target = target
        self.compile_anew = compile_anew
        self.waiting = self._start()

    def _start(self) -> Worker:
        worker = Worker()
        worker.send(f"{HERE}:load", (self.target,))
        return worker

    def run(self, folder: Path, seconds: float, **given: Any) -> Row:
        """The function's result, or {"failed": why}.

        Args:
            folder: for what it writes.
            seconds: its limit, which it observes by itself.
        """
        worker = self.waiting
        self.waiting = self._start()
        folder.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        given = {"folder": folder, "seconds": seconds, **given}

        cache = folder / "triton" if self.compile_anew else None
        try:
            worker.receive(START_SECONDS)
            arguments = (self.target, given, cache)
            row = worker.call(f"{HERE}:run_cell", *arguments, timeout=seconds + GRACE)
        except (RuntimeError, ValueError) as error:
            row = {"failed": str(error)[-2000:]}

        worker.kill()
        return row | {"whole_s": time.perf_counter() - began}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.waiting.kill()


def load(target: str) -> None:
    """In the process: import ahead of the cell."""
    resolve(target)


def run_cell(target: str, given: dict[str, Any], cache: Path | None) -> Row:
    """In the process: run the cell."""
    if cache is not None:
        os.environ["TRITON_CACHE_DIR"] = str(cache)
    return resolve(target)(**given)


class Results:
    """One JSON file, rewritten after each cell; cells that are in it already are kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        names = ("torch", "transformers", "trl")
        self.facts = {name: metadata.version(name) for name in names}
        self.cells: dict[str, Row] = {}

        if path.exists():
            self.cells = read_json(path)["cells"]

    def put(self, name: str, row: Row) -> None:
        """Keep a cell and print it in a line."""
        self.cells[name] = row
        known = {"versions": self.facts, "cells": self.cells}
        write_json(known, self.path, indent=1)
        short = {k: v for k, v in row.items() if k != "curve"}
        print(name, json.dumps(short)[-800:], flush=True)
