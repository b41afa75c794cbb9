"""Processes side by side on one GPU: each takes one cell of a study after another.

A cell is a dictionary of plain values. One that fails is told of and left out, and never ends the
others; when the time is up, what is being worked on has a grace. Each process has a line of its own
to the study: through a queue that all share, one that dies while it writes would silence the rest.
Knows no study: which cell comes next, what a process is and what becomes of a finished cell are the
study's.
"""

from __future__ import annotations

import multiprocessing as mp
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
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
        work: what a process runs: `work(settings, number, line, deadline)`, which calls `do_cells`;
            a function of a module, since it is sent to a new interpreter.
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
        self.members: list[tuple[Any, Connection]] = []
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
                lines = {self.members[number][1]: number for number in self.busy}
                for line in wait(list(lines), timeout=LOOK_EVERY):
                    self.hear(lines[line], take)  # pyright: ignore[reportArgumentType]
        finally:
            self.dismiss()

    def give_out(self, following: Following) -> None:
        """A cell to everybody who has none."""
        for number in range(self.size):
            if number in self.busy or time.time() > self.deadline:
                continue
            if number < len(self.members) and not self.members[number][0].is_alive():
                continue
            cell = following(set(self.busy.values()))
            if cell is None:
                return
            while len(self.members) <= number:
                self.hire()
            self.busy[number] = self.key_of(cell)
            with suppress(BrokenPipeError):  # it has died just now, as its line will say
                self.members[number][1].send(cell)

    def hire(self) -> None:
        """One more process."""
        ours, theirs = self.context.Pipe()
        words = (self.settings, len(self.members), theirs, self.deadline)
        process = self.context.Process(target=self.work, args=words, daemon=False)
        process.start()
        theirs.close()  # the process has its own end now: when it dies, ours says so
        self.members.append((process, ours))

    def hear(self, number: int, take: Take) -> None:
        """What a process says of its cell; one that has died says nothing more."""
        process, line = self.members[number]
        try:
            cell, error = line.recv()
        except (EOFError, ConnectionResetError):
            process.join()
            cell, error = None, "the process died"
        take(self.busy.pop(number), cell, error)

    def dismiss(self) -> None:
        """Let everybody go."""
        for _, line in self.members:
            with suppress(BrokenPipeError):  # of one that has died
                line.send(None)
        until = time.time() + GOODBYE
        for process, _ in self.members:
            process.join(timeout=max(until - time.time(), 0.0))
            if process.is_alive():
                process.terminate()


def do_cells(line: Connection, run: Callable[[Cell], Cell | None]) -> None:
    """What a process does: cells as they are ordered, until it is let go.

    Args:
        line: where cells come from, None ends it, and where `(finished cell or None, what went
            wrong)` goes.
        run: makes a finished cell of one; None gives it back, as when the time is up.
    """
    while (cell := line.recv()) is not None:
        try:
            found = run(cell), ""
        except Exception:
            # One cell must not end the others; what it said goes to the study.
            found = None, traceback.format_exc()
        line.send(found)
