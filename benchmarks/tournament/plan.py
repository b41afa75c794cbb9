"""Which runs the tournament has and which come next: a pure function of what is finished.

PROTOCOL.md has the rules. A cell is a dictionary of plain values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.tournament.tasks import TASKS
from mesotron.compare.search import Grid, GridSearch, search

Cell = dict[str, Any]
Done = dict[str, Cell]
Tasks = Sequence[str]

PARTS = ("search", "report", "stable")
TUNING_SEEDS = (100,)
REPORTING_SEEDS = (200, 201, 202, 203, 204)
STEPS = 100
RANK = 16
ABOVE = 3  # rates above the grid that the highest stable one is searched in


class Contender(NamedTuple):
    middle: float  # of the rate grid
    changes: tuple[str, ...]

    @property
    def grid(self) -> Grid:
        return Grid(self.middle, factor=2.0, rates=3, extend=2)


REST = "optim.aux_lr=1e-5"
LORA = f"model.lora={RANK}"
CONTENDERS = {
    "adamw": Contender(1e-5, ("optim.name=adamw",)),
    "muon": Contender(5e-5, ("optim.name=muon", REST)),
    "normuon": Contender(5e-5, ("optim.name=normuon", REST)),
    "pion": Contender(2e-4, ("optim.name=pion", "optim.cutoff=aligned", REST)),
    "muon_sgd": Contender(5e-5, ("optim.name=muon_sgd", "optim.aux_lr=1e-3")),
    "lora_adamw": Contender(2e-4, ("optim.name=adamw", LORA)),
    "lora_product": Contender(5e-5, ("optim.name=muon", "optim.lora=product", LORA, REST)),
}


def make(use: str, task: str, contender: str, k: int, seed: int) -> Cell:
    rate = CONTENDERS[contender].grid.rate(k)
    return {"use": use, "task": task, "contender": contender, "rate": rate, "seed": seed}


def key_of(cell: Cell) -> str:
    return "-".join(str(cell[name]) for name in ("use", "task", "contender", "rate", "seed"))


def tuned(tasks: Tasks, contender: str, k: int, done: Done) -> list[Cell | None]:
    """The tuning runs of a rate on these tasks; None for those to come."""
    runs = []
    for task in tasks:
        for seed in TUNING_SEEDS:
            cell = make("tuning", task, contender, k, seed)
            runs.append(done.get(key_of(cell)))
    return runs


def scores_of(tasks: Tasks, contender: str, done: Done) -> dict[int, float]:
    """Mean final accuracy over the tasks, by rate, where all of them are there."""
    scores = {}
    for k in range(-9, 10):
        cells = tuned(tasks, contender, k, done)
        known = []
        for cell in cells:
            if cell is not None:
                known.append(cell["accuracy"])

        if len(known) == len(cells):
            scores[k] = fmean(known)
    return scores


def search_of(tasks: Tasks, contender: str, done: Done) -> GridSearch:
    return search(CONTENDERS[contender].grid, scores_of(tasks, contender, done))


def stable_at(tasks: Tasks, contender: str, k: int, done: Done) -> bool | None:
    """Whether all tuning runs are stable at a rate; None before that is known."""
    cells = tuned(tasks, contender, k, done)
    if any(cell is not None and not cell["stable"] for cell in cells):
        return False

    return None if None in cells else True


def highest_stable(tasks: Tasks, contender: str, done: Done) -> int | None:
    """The index of the largest rate below which everything tried is stable; None if none is."""
    highest = None
    for k in sorted(scores_of(tasks, contender, done)):
        if not stable_at(tasks, contender, k, done):
            break
        highest = k
    return highest


def plan(
    parts: Sequence[str],
    done: Done,
    tasks: Tasks = tuple(TASKS),
    contenders: Sequence[str] = tuple(CONTENDERS),
) -> Iterator[Cell]:
    """Cells in their order, those that are done included.

    Round by round over all contenders and tasks, so that all have come equally far when time ends.
    """
    searches = {name: search_of(tasks, name, done) for name in contenders}

    if "search" in parts:
        yield from search_cells(searches, tasks)

    # Reported runs wait for all searches: nothing is chosen after the first of them.
    if "report" in parts and all(found.done for found in searches.values()):
        yield from report_cells(searches, tasks)

    if "stable" in parts:
        yield from stable_cells(searches, tasks, done)


def search_cells(searches: dict[str, GridSearch], tasks: Tasks) -> Iterator[Cell]:
    """The rates that the searches want, the first of each contender first."""
    longest = max(len(found.wanted) for found in searches.values())
    for place in range(longest):
        for seed in TUNING_SEEDS:
            for name, found in searches.items():
                if place >= len(found.wanted):
                    continue
                for task in tasks:
                    yield make("tuning", task, name, found.wanted[place], seed)


def report_cells(searches: dict[str, GridSearch], tasks: Tasks) -> Iterator[Cell]:
    """Each contender at its best rate, on the reporting seeds."""
    for seed in REPORTING_SEEDS:
        for name, found in searches.items():
            if found.best is None:
                continue
            for task in tasks:
                yield make("reporting", task, name, found.best, seed)


def stable_cells(searches: dict[str, GridSearch], tasks: Tasks, done: Done) -> Iterator[Cell]:
    """Rates above a grid, while everything below them is stable."""
    for above in range(1, ABOVE + 1):
        for name, found in searches.items():
            k = max(found.wanted) + above
            below = range(min(found.wanted), k)
            if found.done and all(stable_at(tasks, name, j, done) for j in below):
                for task in tasks:
                    yield make("tuning", task, name, k, TUNING_SEEDS[0])
