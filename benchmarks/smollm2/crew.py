"""Processes side by side on one GPU: each takes one cell after another until the time is up.

Under NVIDIA's MPS their kernels overlap; without it they take turns. A cell that fails is told of
and left out, and never ends the others.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import queue
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from plan import Cell, key_of

GRACE = 25.0  # seconds for what is being evaluated when the time is up


class Crew:
    """The processes, what each is doing, and what comes back.

    Args:
        given: the study's settings.
        say: prints a sentence.
        deadline: on `time.time`.
    """

    def __init__(self, given: Any, say: Callable[[str], None], deadline: float) -> None:
        self.given, self.say, self.deadline = given, say, deadline
        self.context = mp.get_context("spawn")
        self.answers: Any = self.context.Queue()
        self.members: list[tuple[Any, Any]] = []
        self.busy: dict[int, str] = {}

    def work_through(self, following: Callable[[set[str]], Cell | None], take: Any) -> None:
        """Give out cells until there are none, or no time.

        Args:
            following: the next cell that is not among those named.
            take: called with a key, and a finished cell or None, and what went wrong.
        """
        while time.time() < self.deadline + GRACE:
            self.give_out(following)
            if not self.busy:
                break
            try:
                number, cell, error = self.answers.get(timeout=2)
            except queue.Empty:
                self.bury(take)
                continue
            take(self.busy.pop(number), cell, error)
        self.dismiss()

    def give_out(self, following: Callable[[set[str]], Cell | None]) -> None:
        """A cell to everybody who has none; more processes only if there is work for them."""
        for number in range(self.given.workers):
            if number in self.busy or time.time() > self.deadline:
                continue
            cell = following(set(self.busy.values()))
            if cell is None:
                return
            while len(self.members) <= number:
                self.hire()
            process, orders = self.members[number]
            if process.is_alive():
                self.busy[number] = key_of(cell)
                orders.put(cell)

    def hire(self) -> None:
        orders: Any = self.context.Queue()
        words = (vars(self.given), len(self.members), orders, self.answers, self.deadline)
        process = self.context.Process(target=work, args=words, daemon=False)
        process.start()
        self.members.append((process, orders))

    def bury(self, take: Any) -> None:
        """Cells of processes that have died are lost."""
        for number in [n for n in self.busy if not self.members[n][0].is_alive()]:
            take(self.busy.pop(number), None, "the process died")

    def dismiss(self) -> None:
        for _, orders in self.members:
            orders.put(None)
        for process, _ in self.members:
            process.join(timeout=5)
            if process.is_alive():
                process.terminate()


def work(values: dict[str, Any], number: int, orders: Any, answers: Any, deadline: float) -> None:
    """A process: its words go to a log, its libraries are imported once."""
    import argparse

    given = argparse.Namespace(**values)
    log = (given.state / f"worker{number}.log").open("a", buffering=1)
    sys.stdout = sys.stderr = log
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    while (cell := orders.get()) is not None:
        try:
            answers.put((number, run_cell(cell, given, deadline), ""))
        except Exception:
            # One cell must not end the others; what it said goes to the log and to the study.
            answers.put((number, None, traceback.format_exc()))


def run_cell(cell: Cell, given: Any, deadline: float) -> Cell | None:
    """The work of one cell, by its part and stage."""
    import torch

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")  # for what autocast does not cover
    from box import box_cell
    from spectrum import spectrum_cell
    from supervised import warm_cell
    from training import train_cell

    makers = {"spectrum": spectrum_cell, "box": box_cell}
    make = warm_cell if cell["stage"] == "warm" else makers.get(cell["part"], train_cell)
    try:
        return make(cell, given, deadline)
    finally:
        gc.collect()  # trainer and callbacks hold each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
