"""Processes side by side on one GPU: each trains one cell after another and plays its episodes.

While one plays, which is the processor's work, the others have the GPU. A cell that fails is told
of and left out, and never ends the others.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from cell import Bench, Late
from plan import SLOW, Cell, key_of

GRACE = 20  # seconds for what is being played when the time is up
ALONE = 45  # seconds in which the first process may compile what the others then find
Say = Callable[[str], None]


class Crew:
    """The processes, what each is doing, and what comes back.

    Args:
        given: the study's settings.
        deadline: on `time.time`.
        say: prints a sentence.
    """

    def __init__(self, given: Namespace, deadline: float, say: Say) -> None:
        self.given, self.deadline, self.say = given, deadline, say
        self.context = mp.get_context("spawn")
        self.answers: Any = self.context.Queue()
        self.members: list[tuple[Any, Any]] = []
        self.busy: dict[int, Cell] = {}
        # Of a process among the others.
        self.seconds_per_step = self.seconds_of_play = 0.0
        self.alone_until = time.time() + ALONE * given.alone

    def work_through(self, following: Callable[[set[str]], list[Cell]], take: Any) -> None:
        """Give out cells until there are none, or no time.

        Args:
            following: cells that nobody has, in order, given the names of those in work.
            take: called with a finished cell, or with a name and what went wrong.
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
            key = key_of(self.busy.pop(number))
            if cell is not None:
                self.note_pace(cell)
                self.alone_until = 0.0
            if cell is not None or error:
                take(key, cell, error)
        self.dismiss()

    def give_out(self, following: Callable[[set[str]], list[Cell]]) -> None:
        """A cell to everybody who has none."""
        wanted = self.given.processes if time.time() > self.alone_until else 1
        while len(self.members) < wanted:
            self.members.append(self.start(len(self.members)))
        for number, (process, orders) in enumerate(self.members):
            if number in self.busy or not process.is_alive() or time.time() > self.deadline:
                continue
            taken = {key_of(cell) for cell in self.busy.values()}
            cell = next((cell for cell in following(taken) if self.fits(cell)), None)
            if cell is not None:
                self.busy[number] = cell
                orders.put(cell)

    def fits(self, cell: Cell) -> bool:
        """Whether a cell would be trained before the time is up and played soon after, at the pace
        of those before."""
        slow = 10 if cell["contender"] == SLOW else 1
        trained = time.time() + cell["steps"] * self.seconds_per_step * slow
        return trained < self.deadline and trained + self.seconds_of_play < self.deadline + GRACE

    def note_pace(self, cell: Cell) -> None:
        """Remember how long steps and episodes take beside the others."""
        if cell["contender"] == SLOW:
            return
        step, play = cell["train_seconds"] / cell["steps"], cell["seconds"] - cell["train_seconds"]
        self.seconds_per_step = 0.7 * (self.seconds_per_step or step) + 0.3 * step
        self.seconds_of_play = 0.7 * (self.seconds_of_play or play) + 0.3 * play

    def start(self, number: int) -> tuple[Any, Any]:
        """A process and the queue of its orders."""
        orders: Any = self.context.Queue()
        settings = vars(self.given)
        process = self.context.Process(
            target=work, args=(settings, number, orders, self.answers, self.deadline), daemon=True
        )
        process.start()
        return process, orders

    def bury(self, take: Any) -> None:
        """Tell of cells whose process has died."""
        for number, (process, _) in enumerate(self.members):
            if number in self.busy and not process.is_alive():
                take(key_of(self.busy.pop(number)), None, "the process died")

    def dismiss(self) -> None:
        """Let everybody go."""
        for _, orders in self.members:
            orders.put(None)
        for process, _ in self.members:
            process.join(timeout=2)
            if process.is_alive():
                process.terminate()


def work(settings: dict[str, Any], number: int, orders: Any, answers: Any, deadline: float) -> None:
    """A process: loads the data once, then does the cells that it is given."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    bench: Bench | None = None
    while (cell := orders.get()) is not None:
        try:
            bench = bench or Bench(Namespace(**settings), deadline)
            answers.put((number, bench.run(cell), ""))
        except Late:
            answers.put((number, None, ""))
        except Exception:
            # One cell must not end the others; what it said goes to the log.
            answers.put((number, None, traceback.format_exc()))
