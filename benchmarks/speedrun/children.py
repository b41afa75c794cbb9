"""Cells one after the other, each in a fresh process that is alone on the GPU.

While a cell runs the next process already imports what it needs, and waits; it touches the GPU only
when it is told to begin. One that fails or hangs leaves its words behind, and the next one begins.
"""

from __future__ import annotations

import importlib
import importlib.metadata as metadata
import json
import multiprocessing as mp
import os
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

Row = dict[str, Any]
GRACE = 60.0  # seconds beyond its limit after which a child is ended


class Children:
    """A row of processes that do the same work on different cells.

    Args:
        module: where the work is, beside this file.
        work: name of the function `work(folder, seconds, **given) -> dict`.
    """

    def __init__(self, module: str, work: str) -> None:
        self.target = (module, work)
        self.waiting = self._start()

    def _start(self) -> tuple[Any, Connection]:
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, *self.target))
        process.start()
        return process, ours

    def run(self, folder: Path, seconds: float, **given: Any) -> Row:
        """What the work returns, or why it returned nothing.

        Args:
            folder: for what it writes.
            seconds: its limit, which it is to keep by itself.
        """
        process, ours = self.waiting
        self.waiting = self._start()
        folder.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        ours.send({"folder": folder, "seconds": seconds, **given})
        found: Row = {"failed": "it did not end in time"}
        try:
            if ours.poll(seconds + GRACE):
                found = ours.recv()
        except EOFError:
            process.join()
            found = {"failed": f"it ended with the code {process.exitcode}"}
        process.kill()
        process.join()
        return found | {"whole_s": time.perf_counter() - began}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process that waits."""
        self.waiting[0].kill()


def serve(ours: Connection, module: str, work: str) -> None:
    """Import, wait for a cell, do it."""
    function = getattr(importlib.import_module(module), work)
    given = ours.recv()
    # What one cell compiled is not there for the next: every clock counts its own.
    os.environ["TRITON_CACHE_DIR"] = str(given["folder"] / "triton")
    try:
        found = function(**given)
    except Exception:  # whatever it was, the parent writes it down
        found = {"failed": traceback.format_exc()[-2000:]}
    ours.send(found)


class Results:
    """One JSON file, written anew after each cell.

    Args:
        path: the file; what is in it already is kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        names = ("torch", "transformers", "trl")
        self.facts = {name: metadata.version(name) for name in names}
        self.lock = threading.Lock()  # cells side by side end when they like
        self.cells: dict[str, Row] = {}
        if path.exists():
            self.cells = json.loads(path.read_text())["cells"]

    def put(self, name: str, row: Row) -> None:
        """Keep a cell and say in a line how it went."""
        with self.lock:
            self.cells[name] = row
            self.path.parent.mkdir(parents=True, exist_ok=True)
            known = {"versions": self.facts, "cells": self.cells}
            self.path.write_text(json.dumps(known, indent=1))
        short = {k: v for k, v in row.items() if k != "curve"}
        print(name, json.dumps(short)[-800:], flush=True)
