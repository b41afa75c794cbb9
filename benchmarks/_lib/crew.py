"""Works through the cells of a study in processes side by side on one GPU.

A cell is a dictionary of plain values. One that fails or whose process dies is reported and does
not affect the others. The study decides which cell comes next and what to do with a finished one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import IO, Any

from mesotron.runs.workers import WorkerPool

Cell = dict[str, Any]


def work_through(
    target: str,
    settings: dict[str, Any],
    following: Callable[[set[str]], Cell | None],
    take: Callable[[str, Cell | None, str], None],
    key_of: Callable[[Cell], str],
    *,
    num_workers: int,
    deadline: float,
    grace: float,
    threads: int = 1,
    log: IO[Any] | None = None,
) -> None:
    """Run cells until there are none left, or no time.

    Args:
        target: "module:function", called in a worker as `function(cell, settings, deadline)`; it
            returns the finished cell, or None to give it back. Globals of the module persist.
        settings: plain values for it.
        following: the next cell whose name is not among those given, or None.
        take: called with a cell's name, the finished cell or None, and an error or "".
        key_of: the name of a cell.
        num_workers: most processes at once.
        deadline: on `time.time`; no cell starts after it.
        grace: seconds after it for cells that are running.
        threads: of each process.
        log: where the processes' output goes; this process's stderr if not given.
    """
    running: dict[Future[Cell | None], str] = {}
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with WorkerPool(num_workers, env=env, stderr=log) as pool:
        while True:
            while len(running) < num_workers and time.time() <= deadline:
                cell = following(set(running.values()))
                if cell is None:
                    break
                running[pool.submit(target, cell, settings, deadline)] = key_of(cell)

            left = max(deadline + grace - time.time(), 0.0)
            done, _ = wait(running, timeout=left, return_when=FIRST_COMPLETED)
            if not done:
                return

            for future in done:
                error = future.exception()
                finished = None if error else future.result()
                take(running.pop(future), finished, str(error) if error else "")
