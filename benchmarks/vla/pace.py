"""Estimates how long a cell takes, so that none starts that could not finish."""

from __future__ import annotations

import time
from collections.abc import Iterable

from benchmarks.vla.plan import SLOW, Cell

GRACE = 20.0  # seconds for what is being played when the time is up
ALONE = 45.0  # seconds in which the first process may compile what the others then find
SLOWER = 10  # how many times as long a step of the slow contender takes


class Pace:
    """Seconds of a step and of the episodes, as a running mean over finished cells.

    Args:
        deadline: on `time.time`.
        alone: whether the first process has something to compile.
    """

    def __init__(self, deadline: float, alone: bool) -> None:
        self.deadline = deadline
        self.seconds_per_step = self.seconds_of_play = 0.0
        self.alone_until = time.time() + ALONE * alone

    def choose(self, cells: Iterable[Cell], busy: set[str]) -> Cell | None:
        """The first cell that there is time for; none for the others while one compiles."""
        if busy and time.time() < self.alone_until:
            return None
        return next((cell for cell in cells if self.fits(cell)), None)

    def fits(self, cell: Cell) -> bool:
        """Whether a cell would be trained before the deadline and evaluated soon after."""
        slower = SLOWER if cell["contender"] == SLOW else 1
        trained = time.time() + cell["steps"] * self.seconds_per_step * slower
        return trained < self.deadline and trained + self.seconds_of_play < self.deadline + GRACE

    def note(self, cell: Cell) -> None:
        """Record the time of a finished cell."""
        self.alone_until = 0.0
        if cell["contender"] == SLOW:
            return

        step = cell["train_seconds"] / cell["steps"]
        play = cell["seconds"] - cell["train_seconds"]
        self.seconds_per_step = 0.7 * (self.seconds_per_step or step) + 0.3 * step
        self.seconds_of_play = 0.7 * (self.seconds_of_play or play) + 0.3 * play
