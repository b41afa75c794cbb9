"""A tournament in progress: which cells are due, what came of those that ended, what to write.

It starts no process. Everything follows from the record and the run folders, so that one that was
stopped, or killed, goes on where it was.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from time import monotonic

from mesotron.compare import standings, words
from mesotron.compare.fairness import (
    LEAST_HALF,
    refuse_another,
    refuse_namesakes,
    rule_in_words,
    too_few,
)
from mesotron.compare.grid import Grid, Search, gain_of, search
from mesotron.compare.kind import Kind, Outcome, is_for_choosing
from mesotron.compare.record import (
    Cell,
    Contender,
    Stage,
    Threshold,
    Tournament,
    write_tournament,
)
from mesotron.config import CompareConfig
from mesotron.config.base import from_plain, to_plain
from mesotron.runs import RunFolder, describe_environment
from mesotron.runs.workers import last_line

STAGES = ("probe", "search", "final")
# Notches that a search can ever reach.
FURTHEST = 100


class Progress:
    """The state of a tournament.

    Args:
        kind: of its runs.
        config: as typed.
        folder: where it is written.
        record: what an earlier call has left; None begins a new one.
    """

    def __init__(
        self, kind: Kind, config: CompareConfig, folder: Path, record: Tournament | None = None
    ) -> None:
        self.kind = kind
        self.config = config
        self.folder = folder
        self.grid = Grid(kind.base_rate, config.factor, config.rates, config.extend)
        self.contenders = kind.contenders(config.optims or kind.usual, config.objectives)
        self.record = new_record(kind, config, self.contenders)
        self._began, self._wall_before = monotonic(), 0.0
        if record is not None:
            self._take_over(record)

    @property
    def search_seeds(self) -> list[int]:
        """Seeds that choose rates."""
        return [self.config.seed + k for k in range(self.config.search_seeds)]

    @property
    def final_seeds(self) -> list[int]:
        """Seeds that judge; none of them has chosen a rate."""
        first = self.config.seed + self.config.search_seeds
        return [first + k for k in range(self.config.seeds)]

    def _take_over(self, old: Tournament) -> None:
        # What a later version can be told has its default in what an earlier one began.
        config_type, file = type(self.kind.config), str(self.folder)
        old.plan["config"] = to_plain(from_plain(config_type, old.plan["config"], file))
        refuse_another(self.folder, old.plan, self.record.plan)
        refuse_namesakes(self.folder, old.contenders, self.contenders)
        self.record.cells, self.record.problems = old.cells, old.problems
        self.record.start = old.start
        self._wall_before = old.wall
        known = {one.name for one in self.contenders}
        self.record.contenders += [one for one in old.contenders if one.name not in known]
        self.contenders = self.record.contenders
        for cell in self.record.cells:
            if cell.state in ("running", "failed"):  # stopped, or to be tried again
                cell.state, cell.why = "waiting", ""

    def plan(self) -> None:
        """Add the cells that have become due."""
        for contender in self.contenders:
            gain = self._gain(contender)
            if gain is None:
                continue
            found = self.search_of(contender)
            for k in found.wanted:
                for seed in self.search_seeds:
                    self._add(contender, self.grid.rate(k), seed, "search", gain)
            if found.best is not None:
                for seed in self.final_seeds:
                    self._add(contender, self.grid.rate(found.best), seed, "final", gain)

    def _gain(self, contender: Contender) -> float | None:
        """What a contender's rates are multiplied by; None until its probe has measured it.

        A contender whose probe fails goes no further: any gain would be a guess.
        """
        if self.kind.probe(contender, self.config.seed, self.folder) is None:
            return 1.0
        self._add(contender, self.grid.base, self.config.seed, "probe", 1.0)
        probe = self._cells_of(contender, "probe")[0]
        return gain_of(probe.update_ratio) if probe.state == "done" else None

    def _cells_of(self, contender: Contender, stage: Stage) -> list[Cell]:
        return [
            cell
            for cell in self.record.cells
            if cell.contender == contender.name and cell.stage == stage
        ]

    def search_of(self, contender: Contender) -> Search:
        """Where a contender's search stands."""
        notches = {self.grid.rate(k): k for k in range(-FURTHEST, FURTHEST + 1)}
        by_notch: dict[int, list[Cell]] = {}
        for cell in self._cells_of(contender, "search"):
            by_notch.setdefault(notches[cell.rate], []).append(cell)
        known = {
            k: mean_score(cells)
            for k, cells in by_notch.items()
            if len(cells) == len(self.search_seeds)
            and all(cell.state in ("done", "failed") for cell in cells)
        }
        return search(self.grid, known)

    def _add(self, contender: Contender, rate: float, seed: int, stage: Stage, gain: float) -> None:
        short = slug(contender.name)
        id = f"{short}.probe" if stage == "probe" else f"{short}.lr{rate:g}.s{seed}"
        if all(cell.id != id for cell in self.record.cells):
            self.record.cells.append(
                Cell(
                    id=id,
                    contender=contender.name,
                    objective=contender.objective,
                    rate=rate,
                    seed=seed,
                    stage=stage,
                    gain=gain,
                    run=f"cells/{id}",
                )
            )

    def waiting(self) -> list[Cell]:
        """Cells to run, those that decide what comes next first."""
        open_cells = [cell for cell in self.record.cells if cell.state == "waiting"]
        return sorted(open_cells, key=lambda cell: STAGES.index(cell.stage))

    def cells_left(self) -> int:
        """Cells that have not ended, and those that will become due if no search is extended."""
        ended = sum(cell.state in ("done", "failed") for cell in self.record.cells)
        return self.expected() - ended

    def expected(self) -> int:
        """Cells of the whole, if no further search is extended."""
        total = 0
        for contender in self.contenders:
            found = self.search_of(contender)
            total += self.kind.probe(contender, self.config.seed, self.folder) is not None
            if any(cell.state == "failed" for cell in self._cells_of(contender, "probe")):
                continue
            tried = max(len(found.wanted), self.config.rates)
            total += tried * len(self.search_seeds)
            if not found.done or found.best is not None:
                total += len(self.final_seeds)
        return total

    def settings(self, cell: Cell) -> object:
        """The config of a cell's run: the rest of one that was stopped, or all of a new one."""
        run = (self.folder / cell.run).resolve()
        if (run / "config.json").is_file():
            return self.kind.resuming(run)
        shutil.rmtree(run, ignore_errors=True)  # stopped before it was a run
        contender = next(one for one in self.contenders if one.name == cell.contender)
        if cell.stage == "probe":
            return self.kind.probe(contender, cell.seed, run)
        return self.kind.settings(contender, cell.rate, cell.seed, run, cell.gain)

    def take_outcome(self, cell: Cell) -> bool:
        """Read a cell's run into the record; False if it has not ended."""
        run = self.folder / cell.run
        found = self.kind.outcome(run, last_line(run.with_name(f"{cell.id}.log")))
        if found is None:
            return False
        cell.state = "done"
        cell.seconds, cell.tokens, cell.steps = found.seconds, found.tokens, found.steps
        cell.verdict, cell.cause, cell.story = found.health
        cell.update_ratio = found.update_ratio
        if cell.verdict == "diverged":
            cell.why = cell.story
        if cell.stage != "probe":
            self._take_scores(cell, found)
        elif found.update_ratio is None:
            cell.state, cell.why = "failed", cell.why or "it logged no update of a finite size"
        if not self.config.keep_weights:
            self.write()  # a run whose weights are gone must be known to have ended
            shutil.rmtree(run / "checkpoints", ignore_errors=True)
            (run / "checkpoints").mkdir(exist_ok=True)
        return True

    def _take_scores(self, cell: Cell, found: Outcome) -> None:
        if cell.verdict == "diverged" and not found.scores:
            cell.score = self.kind.floor
            self._floor(cell)
            return
        chosen = [id for id in found.scores if is_for_choosing(id) == (cell.stage == "search")]
        known = self.record.problems.setdefault(cell.stage, chosen)
        if set(known) != set(chosen) or not known:
            cell.state, cell.why = "failed", "it was evaluated on other problems than the others"
            return
        if len(known) < LEAST_HALF:  # which no other cell would mend
            raise ValueError(too_few(self.kind, len(found.scores)))
        cell.per_problem = [round(found.scores[id], 6) for id in known]
        cell.score = fmean(cell.per_problem)
        if found.start:
            self.record.start[cell.stage] = fmean(found.start[id] for id in known)

    def _floor(self, cell: Cell) -> None:
        """No problem is solved by a run that diverged before it was asked any."""
        if cell.stage in self.record.problems:
            cell.per_problem = [self.kind.floor] * len(self.record.problems[cell.stage])

    def judge(self) -> None:
        """The standings as far as they are known, and the words for them."""
        for cell in self.record.cells:
            if cell.verdict == "diverged" and cell.stage != "probe" and cell.per_problem is None:
                self._floor(cell)
        searches = {one.name: self.search_of(one) for one in self.contenders}
        rates = {
            name: self.grid.rate(found.best)
            for name, found in searches.items()
            if found.best is not None
        }
        curves = {
            cell.id: RunFolder(self.folder / cell.run).rows("metrics")
            for cell in self.record.cells
            if cell.stage == "final"
            and cell.state == "done"
            and rates.get(cell.contender) == cell.rate
        }
        standings.time_to_threshold(self.kind, self.record, curves)
        standings.rank(self.record, searches, rates)
        self.record.words = words.conclude(self.record)

    def write(self) -> None:
        """Bring the record to the disk."""
        self.record.wall = self._wall_before + monotonic() - self._began
        write_tournament(self.folder, self.record)


def new_record(kind: Kind, config: CompareConfig, contenders: Sequence[Contender]) -> Tournament:
    """A record without cells."""
    plan = {
        name: to_plain(getattr(config, name))
        for name in ("seeds", "search_seeds", "rates", "factor", "extend", "seed", "threads", "set")
    }
    plan |= {"base_rate": kind.base_rate, "config": to_plain(kind.config)}
    return Tournament(
        recipe=kind.recipe,
        kind=kind.name,
        measure=kind.measure,
        before=kind.before,
        rule=rule_in_words(config, kind),
        contenders=list(contenders),
        plan=plan,
        threshold=Threshold(metric=kind.curve),
        environment=describe_environment("see the cells", config.seed),
    )


def mean_score(cells: Sequence[Cell]) -> float | None:
    """Mean score of cells of one rate; None if any has none."""
    found = [cell.score for cell in cells if cell.score is not None]
    return fmean(found) if len(found) == len(cells) else None


def slug(name: str) -> str:
    """A name that a folder can have.

    Example:
        >>> slug("pion:promote=2+gmpo")
        'pion_promote_2+gmpo'
    """
    return "".join(c if c.isalnum() or c in "_+-" else "_" for c in name)
