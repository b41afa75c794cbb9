"""Works through the cells of a study in processes side by side on one GPU.

A cell is a dictionary of plain values. `Cells` knows which of them are finished and which comes
next; `work_through` hands them to processes. One that fails or whose process dies is reported and
does not affect the others.
"""

from __future__ import annotations

import gc
import os
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesotron.runs.workers import WorkerPool

Cell = dict[str, Any]
Done = dict[str, Cell]
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Crew:
    """The processes of a study and the time that they have."""

    target: str
    """"module:function", called in a process as `function(cell, settings, deadline)`; it returns
    the finished cell, or None to give it back. Globals of the module stay for the next cell."""

    settings: dict[str, Any]
    """Plain values for it."""

    num_workers: int
    """Most processes at once."""

    deadline: float
    """On `time.time`; no cell starts after it."""

    grace: float
    """Seconds after it for cells that are running."""

    log: Path
    """The file that what the processes print is added to."""

    threads: int = 1
    """Of each process."""


class Cells:
    """The cells of a study: which are finished, and which comes next.

    Args:
        plan: yields cells in their order, given the finished ones by name; those included.
        key_of: the name of a cell.
        done: what is finished already.
        keep: writes a finished cell, given its name; called before the next one is chosen.
        describe: a finished cell in a line.
        say: prints a line.
        tries: how often a cell may fail.
        pick: of the cells that wait, in their order, and the names of those that run, the one to
            run now; None if none can start. The first one if not given.
    """

    def __init__(  # noqa: PLR0913  # what a study decides, all by name
        self,
        plan: Callable[[Done], Iterable[Cell]],
        key_of: Callable[[Cell], str],
        *,
        done: Done,
        keep: Callable[[str, Cell], None],
        describe: Callable[[Cell], str],
        say: Say,
        tries: int = 1,
        pick: Callable[[Iterator[Cell], set[str]], Cell | None] | None = None,
    ) -> None:
        self.plan = plan
        self.key_of = key_of
        self.done = done
        self.keep = keep
        self.describe = describe
        self.say = say
        self.tries = tries
        self.pick = pick
        self.failed: dict[str, str] = {}
        self.failures: Counter[str] = Counter()

    def waiting(self, busy: set[str]) -> Iterator[Cell]:
        """Cells that are neither finished, running nor given up."""
        for cell in self.plan(self.done):
            key = self.key_of(cell)
            given_up = self.failures[key] >= self.tries
            if key not in self.done and key not in busy and not given_up:
                yield cell

    def choose(self, busy: set[str]) -> Cell | None:
        """The next cell to run; None if none can start now."""
        waiting = self.waiting(busy)
        if self.pick:
            return self.pick(waiting, busy)

        return next(waiting, None)

    def take(self, cell: Cell, finished: Cell | None, error: str) -> None:
        """Keep a finished cell and note one that failed; None was given back."""
        key = self.key_of(cell)
        if error:
            self.failed[key] = error
            self.failures[key] += 1
            self.say(f"FAILED {key}: {error.strip().splitlines()[-1]}")
        elif finished is not None:
            self.done[key] = finished
            self.keep(key, finished)
            self.say(f"{key}: {self.describe(finished)}")

    def num_left(self) -> int:
        """How many of the cells that are known so far are not finished."""
        return sum(self.key_of(cell) not in self.done for cell in self.plan(self.done))


def work_through(cells: Cells, crew: Crew) -> None:
    """Run cells until there are none left, or no time."""
    running: dict[Future[Cell | None], Cell] = {}
    env = {**os.environ, "OMP_NUM_THREADS": str(crew.threads)}

    with crew.log.open("ab") as log, WorkerPool(crew.num_workers, env=env, stderr=log) as pool:
        while True:
            while len(running) < crew.num_workers and time.time() <= crew.deadline:
                busy = {cells.key_of(cell) for cell in running.values()}
                cell = cells.choose(busy)
                if cell is None:
                    break
                future = pool.submit(crew.target, cell, crew.settings, crew.deadline)
                running[future] = cell

            left = max(crew.deadline + crew.grace - time.time(), 0.0)
            done, _ = wait(running, timeout=left, return_when=FIRST_COMPLETED)
            if not done:
                return

            for future in done:
                error = future.exception()
                finished = None if error else future.result()
                cells.take(running.pop(future), finished, str(error) if error else "")


def say_with_seconds() -> Say:
    """A function that prints a line after the seconds since now."""
    began = time.time()

    def say(text: str) -> None:
        print(f"[{time.time() - began:5.0f} s] {text}", flush=True)

    return say


@contextmanager
def torch_process(settings: dict[str, Any]) -> Iterator[Namespace]:
    """In a process, around one cell: torch set up for it, and its memory given back.

    Args:
        settings: of the study; `threads` are those of the process.

    Yields:
        The settings as a namespace.
    """
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    import torch

    torch.set_num_threads(settings["threads"])
    torch.set_float32_matmul_precision("high")  # for what autocast does not cover

    try:
        yield Namespace(**settings)
    finally:
        gc.collect()  # trainer and callbacks refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
