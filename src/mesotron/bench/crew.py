"""Processes side by side on one GPU: each takes one cell of a study after another.

A cell is a dictionary of plain values. One that fails is told of and left out, and never ends the
others; when the time is up, what is being worked on has a grace. Knows no study: which cell comes
next, what a process is and what becomes of a finished cell are the study's.
"""

from __future__ import annotations

import multiprocessing as mp
import queue
import time
import traceback
from collections.abc import Callable
from typing import Any

Cell = dict[str, Any]
Following = Callable[[set[str]], Cell | None]
Take = Callable[[str, Cell | None, str], None]
LOOK_EVERY = 2.0  # seconds
GOODBYE = 5.0  # seconds that they have to leave by themselves


class Crew:
    """The processes, what each is doing, and what comes back.

    Args:
        size: how many there are at most; they are started when there is work for them.
        work: what a process runs: `work(settings, number, orders, answers, deadline)`, which calls
            `do_cells`; a function of a module, since it is sent to a new interpreter.
        settings: plain values for it.
        key_of: the name of a cell.
        deadline: on `time.time`; no cell is given out after it.
        grace: seconds that follow for what is being worked on.
    """

    def __init__(
        self,
        size: int,
        work: Callable[..., None],
        settings: dict[str, Any],
        key_of: Callable[[Cell], str],
        deadline: float,
        grace: float,
    ) -> None:
        self.size, self.work, self.settings, self.key_of = size, work, settings, key_of
        self.deadline, self.grace = deadline, grace
        self.context = mp.get_context("spawn")
        self.answers: Any = self.context.Queue()
        self.members: list[tuple[Any, Any]] = []
        self.busy: dict[int, str] = {}

    def work_through(self, following: Following, take: Take) -> None:
        """Give out cells until there are none, or no time.

        Args:
            following: the next cell that is not among those named, or None.
            take: called with a cell's name, the finished cell or None, and what went wrong; with
                neither where the process gave the cell back.
        """
        try:
            while time.time() < self.deadline + self.grace:
                self.give_out(following)
                if not self.busy:
                    break
                try:
                    number, cell, error = self.answers.get(timeout=LOOK_EVERY)
                except queue.Empty:
                    self.bury(take)
                    continue
                take(self.busy.pop(number), cell, error)
        finally:
            self.dismiss()

    def give_out(self, following: Following) -> None:
        """A cell to everybody who has none."""
        for number in range(self.size):
            if number in self.busy or time.time() > self.deadline:
                continue
            cell = following(set(self.busy.values()))
            if cell is None:
                return
            while len(self.members) <= number:
                self.hire()
            process, orders = self.members[number]
            if process.is_alive():
                self.busy[number] = self.key_of(cell)
                orders.put(cell)

    def hire(self) -> None:
        """One more process, with a queue of its own for orders."""
        orders: Any = self.context.Queue()
        words = (self.settings, len(self.members), orders, self.answers, self.deadline)
        process = self.context.Process(target=self.work, args=words, daemon=False)
        process.start()
        self.members.append((process, orders))

    def bury(self, take: Take) -> None:
        """Tell of cells whose process has died."""
        for number in [n for n in self.busy if not self.members[n][0].is_alive()]:
            take(self.busy.pop(number), None, "the process died")

    def dismiss(self) -> None:
        """Let everybody go."""
        for _, orders in self.members:
            orders.put(None)
        until = time.time() + GOODBYE
        for process, _ in self.members:
            process.join(timeout=max(until - time.time(), 0.0))
            if process.is_alive():
                process.terminate()


def do_cells(number: int, orders: Any, answers: Any, run: Callable[[Cell], Cell | None]) -> None:
    """What a process does: cells as they are ordered, until it is let go.

    Args:
        number: the process's own.
        orders: where cells come from; None ends it.
        answers: where `(number, finished cell or None, what went wrong)` goes.
        run: makes a finished cell of one; None gives it back, as when the time is up.
    """
    while (cell := orders.get()) is not None:
        try:
            answers.put((number, run(cell), ""))
        except Exception:
            # One cell must not end the others; what it said goes to the study.
            answers.put((number, None, traceback.format_exc()))
