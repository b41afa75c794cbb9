"""`mesotron compare RECIPE`: which cells are due, their processes, and the result.

Everything follows from the record and the run folders, so a stopped tournament can continue.
"""

import re
import shutil
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from mesotron.compare import record as records
from mesotron.compare import standings
from mesotron.compare.cell import cell_command
from mesotron.compare.jobs import make_pool, run_jobs
from mesotron.compare.kind import Kind, Outcome, is_for_choosing
from mesotron.compare.kinds import make_kind
from mesotron.compare.record import Cell, Contender, Stage, Tournament
from mesotron.compare.search import Grid, GridSearch, gain_of, search
from mesotron.compare.standings import count
from mesotron.config import CompareConfig, SnakeConfig, TrainConfig
from mesotron.config.base import from_plain, to_plain
from mesotron.report import standings as tables
from mesotron.report.command import write as write_report
from mesotron.rlvr.train import check
from mesotron.runs import RunFolder, describe_environment
from mesotron.runs.console import SafeConsole, print_line, spell_time
from mesotron.runs.extras import require
from mesotron.runs.files import printable, write_whole
from mesotron.runs.folder import try_lock, warn_of_failure
from mesotron.runs.links import make_own_folder, refuse_links
from mesotron.runs.resume import settings_to_resume
from mesotron.runs.trust import check_trusted, code_names
from mesotron.runs.workers import Job, last_line

# How a comparison is made fair; the record and the report show it, filled in.
RULE = (
    "All runs with one seed have the same data order; all runs have the same start and the same "
    "held-out problems.",
    "{kind.unit}",
    "Every contender tries {config.rates} rates with {searched}, a factor of {config.factor:g} "
    "apart around the recipe's, {kind.base_rate:g}.",
    "If the best rate is the smallest or the largest tried, up to {config.extend} more beyond it "
    "are tried; the table counts all trials.",
    "A rate is chosen by its score smoothed over its neighbors (weights 1/4, 1/2, 1/4) on one half "
    "of the held-out problems. The other half ranks, with {ranked} per contender.",
    "Intervals are 95% bootstrap intervals over seeds and problems. Contenders are compared with "
    "the best by a t-test paired by seed and problem, with the variance clustered by both (seed "
    "variance pooled over all pairs where a pair's own is smaller), and Holm's correction for all "
    "pairs.",
)
POLL_SECONDS = 0.2
STAGES = ("probe", "search", "final")
ENDED = ("done", "failed")
MAX_INDEX = 100  # indices of the grid that a search can ever reach
# What may not change between two calls on one folder: its cells would not be comparable.
FIXED = ("factor", "seed", "search_seeds", "rates", "base_rate", "config")
MIN_HALF = 10  # problems that choose rates, and problems that rank
MIN_PROBLEMS = 4 * MIN_HALF  # a hash halves them, never quite evenly


def run(config: CompareConfig) -> int:
    kind = make_kind(config.recipe, config.set)
    require(kind.extra, what=f"mesotron compare {config.recipe}")

    if config.trust and not isinstance(kind.config, SnakeConfig):
        kind.config = replace(kind.config, trust=True)

    folder = config.out or Path("runs") / f"compare-{config.recipe}"
    check_comparable(kind, config, folder)  # before the folder is made

    make_own_folder(folder / "cells")
    refuse_links(folder / "cells")  # they are written, or removed and made again
    console = SafeConsole()

    lock = try_lock(folder / "lock")
    if lock is None:
        raise ValueError(f"{folder} is in use by another process or running cell")

    with lock:  # cells keep it open: it ends with the last of them
        if (folder / records.NAME).exists():
            old = records.read_tournament(folder)
        else:
            old = None

        progress = Progress(kind, config, folder, old)
        Runner(progress, console, lock.fileno()).run()
        finish(progress, console)

    has_failed = any(cell.state == "failed" for cell in progress.record.cells)
    return 1 if has_failed else 0


def check_comparable(kind: Kind, config: CompareConfig, folder: Path) -> None:
    """Refuse what no cell could run, or what could not be ranked."""
    if kind.num_problems < MIN_PROBLEMS:
        raise ValueError(_too_few_problems(kind, kind.num_problems))
    if kind.base_rate == 0:
        raise ValueError("the recipe's rate is 0, and rates are searched around it: --set another")

    for one in kind.contenders(config.optims or kind.usual, config.objectives):
        settings = kind.settings(one, kind.base_rate, config.seed, folder)
        if isinstance(settings, TrainConfig):
            check(settings)


class Progress:
    """The record of a tournament, and which cells are due next."""

    def __init__(
        self, kind: Kind, config: CompareConfig, folder: Path, old: Tournament | None = None
    ) -> None:
        self.kind = kind
        self.config = config
        self.folder = folder
        self.grid = Grid(kind.base_rate, config.factor, config.rates, config.extend)
        self.contenders = kind.contenders(config.optims or kind.usual, config.objectives)
        self.search_seeds = [config.seed + k for k in range(config.search_seeds)]
        self.final_seeds = [config.seed + config.search_seeds + k for k in range(config.seeds)]
        self.record = _new_record(kind, config, self.contenders)
        self._start = time.monotonic()
        self._wall_before = 0.0
        if old is not None:
            self._continue(old)

    def _continue(self, old: Tournament) -> None:
        # Settings that a later version added have their defaults.
        config_type = type(self.kind.config)
        file = str(self.folder)
        old.plan["config"] = to_plain(from_plain(config_type, old.plan.get("config", {}), file))
        _check_same_rule(self.folder, old, self.record)

        self.record.cells = old.cells
        self.record.problems = old.problems
        self.record.start = old.start
        self._wall_before = old.wall

        known = {one.name for one in self.contenders}
        self.record.contenders += [one for one in old.contenders if one.name not in known]
        self.contenders = self.record.contenders

        for cell in self.record.cells:
            if cell.state in ("running", "failed"):  # stopped, or to be tried again
                cell.state = "waiting"
                cell.why = ""

    def plan(self) -> None:
        """Add the cells that the results so far call for."""
        for contender in self.contenders:
            gain = self._gain(contender)
            if gain is None:
                continue

            state = self.search_of(contender)
            for k in state.wanted:
                for seed in self.search_seeds:
                    self._add(contender, self.grid.rate(k), seed, "search", gain)

            if state.best is not None:
                for seed in self.final_seeds:
                    self._add(contender, self.grid.rate(state.best), seed, "final", gain)

    def _gain(self, contender: Contender) -> float | None:
        """By what the matrices' rate is multiplied; None until a probe has measured it."""
        if self.kind.probe(contender, self.config.seed, self.folder) is None:
            return 1.0

        self._add(contender, self.grid.base, self.config.seed, "probe", gain=1.0)
        probe = self._cells_of(contender, "probe")[0]
        if probe.state != "done":
            return None  # if it failed, any gain would be a guess

        return gain_of(probe.update_ratio)

    def _cells_of(self, contender: Contender, stage: Stage) -> list[Cell]:
        own = (contender.name, stage)
        return [cell for cell in self.record.cells if (cell.contender, cell.stage) == own]

    def search_of(self, contender: Contender) -> GridSearch:
        indices = {self.grid.rate(k): k for k in range(-MAX_INDEX, MAX_INDEX + 1)}
        by_index: dict[int, list[Cell]] = {}
        for cell in self._cells_of(contender, "search"):
            by_index.setdefault(indices[cell.rate], []).append(cell)

        known: dict[int, float | None] = {}
        for k, cells in by_index.items():
            ended = [cell for cell in cells if cell.state in ENDED]
            if len(ended) == len(cells) == len(self.search_seeds):
                known[k] = mean_score(cells)

        return search(self.grid, known)

    def _add(self, contender: Contender, rate: float, seed: int, stage: Stage, gain: float) -> None:
        short = re.sub(r"[^\w+-]", "_", contender.name)

        if stage == "probe":
            id = f"{short}.probe"
        else:
            id = f"{short}.lr{rate:g}.s{seed}"

        if any(cell.id == id for cell in self.record.cells):
            return

        cell = Cell(
            id=id,
            contender=contender.name,
            objective=contender.objective,
            rate=rate,
            seed=seed,
            stage=stage,
            gain=gain,
            run=f"cells/{id}",
        )
        self.record.cells.append(cell)

    def num_done(self) -> int:
        return sum(cell.state in ENDED for cell in self.record.cells)

    def num_expected(self) -> int:
        total = 0
        for contender in self.contenders:
            state = self.search_of(contender)
            total += self.kind.probe(contender, self.config.seed, self.folder) is not None
            if any(cell.state == "failed" for cell in self._cells_of(contender, "probe")):
                continue

            total += max(len(state.wanted), self.config.rates) * len(self.search_seeds)
            if not state.done or state.best is not None:
                total += len(self.final_seeds)

        return total

    def settings(self, cell: Cell) -> object:
        """The config of a cell: of the run that it continues, or a new one."""
        run = (self.folder / cell.run).resolve()
        if (run / "config.json").is_file():
            return self._settings_to_resume(run)

        shutil.rmtree(run, ignore_errors=True)  # stopped before it was a run
        contender = next(one for one in self.contenders if one.name == cell.contender)
        if cell.stage == "probe":
            return self.kind.probe(contender, cell.seed, run)

        return self.kind.settings(contender, cell.rate, cell.seed, run, cell.gain)

    def _settings_to_resume(self, run: Path) -> object:
        settings: Any = settings_to_resume(self.kind.config_type, run)
        own = code_names(self.kind.config)
        names = []
        for name in code_names(settings):
            if name not in own:
                names.append(name)

        check_trusted(names, run / "config.json", trust=False)

        is_trusted = bool(own) or getattr(self.kind.config, "trust", False)
        if is_trusted:
            return replace(settings, trust=True)

        return settings

    def take_outcome(self, cell: Cell) -> bool:
        """Read a cell's run into the record; False if it has not finished."""
        run = self.folder / cell.run
        outcome = self.kind.outcome(run, last_line(run.with_name(f"{cell.id}.log")))
        if outcome is None:
            return False

        cell.state = "done"
        cell.seconds = outcome.seconds
        cell.tokens = outcome.tokens
        cell.steps = outcome.steps
        cell.verdict = outcome.health.verdict
        cell.cause = outcome.health.cause
        cell.story = outcome.health.story
        cell.update_ratio = outcome.update_ratio

        if cell.verdict == "diverged":
            cell.why = cell.story

        if cell.stage != "probe":
            self._take_scores(cell, outcome)
        elif outcome.update_ratio is None:
            cell.state = "failed"
            cell.why = cell.why or "it logged no finite update"

        if not self.config.keep_weights:
            self.write()  # first: a run without weights must be known as finished
            shutil.rmtree(run / "checkpoints", ignore_errors=True)
            (run / "checkpoints").mkdir(exist_ok=True)

        return True

    def _take_scores(self, cell: Cell, outcome: Outcome) -> None:
        if cell.verdict == "diverged" and not outcome.scores:
            cell.score = self.kind.floor  # `judge` adds `per_problem`
            return

        chosen = [id for id in outcome.scores if is_for_choosing(id) == (cell.stage == "search")]
        known = self.record.problems.setdefault(cell.stage, chosen)
        if set(known) != set(chosen) or not known:
            cell.state = "failed"
            cell.why = "it was evaluated on other problems than the others"
            return

        if len(known) < MIN_HALF:  # no other cell would do better
            raise ValueError(_too_few_problems(self.kind, len(outcome.scores)))

        cell.per_problem = [round(outcome.scores[id], 6) for id in known]
        cell.score = fmean(cell.per_problem)

        if outcome.start:
            self.record.start[cell.stage] = fmean(outcome.start[id] for id in known)

    def judge(self) -> None:
        """Rank the contenders by the cells that have ended."""
        for cell in self.record.cells:
            problems = self.record.problems.get(cell.stage)
            if cell.verdict == "diverged" and cell.per_problem is None and problems:
                cell.per_problem = [self.kind.floor] * len(problems)

        searches = {one.name: self.search_of(one) for one in self.contenders}
        rates = {}
        for name, state in searches.items():
            if state.best is not None:
                rates[name] = self.grid.rate(state.best)

        curves = {}
        for cell in self.record.cells:
            is_ranked = cell.stage == "final" and cell.state == "done"
            if is_ranked and cell.rate == rates.get(cell.contender):
                curves[cell.id] = RunFolder(self.folder / cell.run).rows("metrics")

        standings.time_to_threshold(self.kind, self.record, curves)
        standings.rank(self.record, searches, rates)
        self.record.words = standings.conclude(self.record)

    def write(self) -> None:
        self.record.wall = self._wall_before + time.monotonic() - self._start
        records.write_tournament(self.folder, self.record)


def mean_score(cells: Sequence[Cell]) -> float | None:
    """None if a cell has no score."""
    scores = [cell.score for cell in cells if cell.score is not None]
    if len(scores) == len(cells):
        return fmean(scores)

    return None


def _new_record(kind: Kind, config: CompareConfig, contenders: Sequence[Contender]) -> Tournament:
    plan = {
        name: to_plain(getattr(config, name))
        for name in ("seeds", "search_seeds", "rates", "factor", "extend", "seed", "threads", "set")
    }

    shared = to_plain(kind.config)
    if "trust" in shared:
        shared["trust"] = False  # of one call, not of the tournament

    plan |= {"base_rate": kind.base_rate, "config": shared}
    counts = {
        "searched": count(config.search_seeds, "seed"),
        "ranked": count(config.seeds, "other seed"),
    }

    return Tournament(
        recipe=kind.recipe,
        kind=kind.name,
        measure=kind.measure,
        before=kind.before,
        rule=[sentence.format(config=config, kind=kind, **counts) for sentence in RULE],
        contenders=list(contenders),
        plan=plan,
        threshold=records.Threshold(metric=kind.curve),
        environment=describe_environment("see the cells", config.seed),
    )


def _too_few_problems(kind: Kind, num_problems: int) -> str:
    return (
        f"{num_problems} problems to evaluate on are too few: one half chooses rates and the other "
        f"ranks, so {MIN_PROBLEMS} or more are needed (now --set {kind.problems_setting}="
        f"{attrgetter(kind.problems_setting)(kind.config)})"
    )


def _check_same_rule(folder: Path, record: Tournament, continued: Tournament) -> None:
    old = record.plan
    new = continued.plan
    for name in FIXED:
        if old.get(name) != new[name]:
            changed = difference(old.get(name), new[name])
            raise ValueError(f"{folder} has another {name} ({changed}): use another --out")

    extend = old.get("extend")
    if type(extend) is not int or extend > new["extend"]:  # rates beyond it may have been chosen
        raise ValueError(f"{folder} has --extend {extend}: use that or more, or another --out")

    objectives = {one.name: one.objective for one in record.contenders}
    for one in continued.contenders:
        objective = objectives.get(one.name, one.objective)
        if objective != one.objective:
            has = f"{one.name} with {objective}, not {one.objective}"
            raise ValueError(f"{folder} has {has}: use another --out")


def difference(old: object, new: object, name: str = "") -> str:
    """The first setting in which two values differ, such as `optim.lr: 0.1, not 0.2`."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            if old.get(key) != new.get(key):
                return difference(old.get(key), new.get(key), f"{name}.{key}" if name else key)

    if name:
        return f"{name}: {old}, not {new}"

    return f"{old}, not {new}"


class Runner:
    """Runs the cells that are due, side by side, and shows how far they are."""

    def __init__(self, progress: Progress, console: Console, lock: int) -> None:
        self.progress = progress
        self.lock = lock
        self.say = partial(print_line, console)
        on_gpus = getattr(progress.kind.config, "device", None) != "cpu"
        self.pool = make_pool(progress.config, on_gpus)
        progress.record.workers = self.pool.num_workers

        self.live: Live | None = None
        self.walls: list[float] = []
        if console.is_terminal:
            self.live = Live(console=console, auto_refresh=False, transient=True)

    def run(self) -> None:
        progress = self.progress
        self.say(
            f"{count(len(progress.contenders), 'contender')}, at least "
            f"{count(progress.num_expected(), 'run')} ({progress.num_done()} done), "
            f"{self.pool.num_workers} at once, in {progress.folder}"
        )

        with self.live or nullcontext():
            run_jobs(self.pool, progress.folder, self.say, self)

    def start(self) -> None:
        progress = self.progress
        progress.plan()

        waiting = [cell for cell in progress.record.cells if cell.state == "waiting"]
        for cell in sorted(waiting, key=lambda cell: STAGES.index(cell.stage)):
            if not self.pool.has_free_slot:
                return

            if progress.take_outcome(cell):
                progress.plan()
            else:
                file = progress.folder / "cells" / f"{cell.id}.json"
                command = cell_command(file, progress.kind.name, progress.settings(cell))
                env = progress.kind.environment(progress.config.threads)
                log = file.with_suffix(".log")

                self.pool.start(cell.id, command, log, env, keep_open=(self.lock,))
                cell.state = "running"

            progress.write()

    def end(self, job: Job, stopping: bool) -> None:
        cell = next(one for one in self.progress.record.cells if one.id == job.key)
        cell.wall = time.monotonic() - job.start

        if not self.progress.take_outcome(cell):
            cell.state = "waiting" if stopping else "failed"
            cell.why = "" if stopping else job.failure

        if cell.state != "waiting":
            self.walls.append(cell.wall)
            self.progress.plan()

            if cell.stage == "final":
                self.progress.judge()

            self.say(self._ended_line(cell))

        self.progress.write()

    def wait(self) -> None:
        if self.live:
            self.live.update(self._view(), refresh=True)

        time.sleep(POLL_SECONDS)

    def _seconds_left(self) -> float | None:
        if not self.walls:
            return None

        left = self.progress.num_expected() - self.progress.num_done()
        running = sum(time.monotonic() - job.start for job in self.pool.jobs)
        return max(left * fmean(self.walls) - running, 0.0) / self.pool.num_workers

    def _ended_line(self, cell: Cell) -> str:
        done = self.progress.num_done()
        total = self.progress.num_expected()
        line = f"{done}/{total} {cell.contender} at {cell.rate:g}, seed {cell.seed}, {cell.stage}: "

        line += describe_ended(cell)
        if done < total:
            line += f"; about {spell_time(self._seconds_left())} left"

        return line

    def _view(self) -> Group:
        record = self.progress.record
        done = self.progress.num_done()
        cells = []
        for cell in record.cells:
            if cell.state == "running":
                cells.append(cell)

        running = ", ".join(f"{c.contender} {c.rate:g} s{c.seed} ({c.stage})" for c in cells)

        line = (
            f"{done} of {self.progress.num_expected()} runs, about "
            f"{spell_time(self._seconds_left())} left; running: {running or 'none'}"
        )
        return Group(tables.rate_map(asdict(record)).to_rich(), Text(line))


def describe_ended(cell: Cell) -> str:
    if cell.state == "failed":
        return f"failed, {cell.why}"

    took = "" if cell.wall is None else f", {spell_time(cell.wall)}"
    if cell.score is not None:
        return f"{cell.score:.3f}, {cell.verdict}{took}"

    if cell.update_ratio is None:
        ratio = "not logged"
    else:
        ratio = f"{cell.update_ratio:.3g}"

    return f"RMS of updates over rate {ratio}{took}"


def finish(progress: Progress, console: Console) -> None:
    progress.judge()
    progress.write()
    record = asdict(progress.record)
    text = progress.folder / "standings.md"
    page = progress.folder / "report.html"
    write_whole(text, printable(tables.to_markdown(record)))

    with warn_of_failure(page.name, progress.folder):
        write_report([progress.folder], page)

    table = tables.standings(record)

    # Two tables, since one does not fit into 80 columns.
    scores = ("contender", "rate", "score", "behind the best", "p (Holm)")
    costs = ("contender", "halfway", "time", "tokens", "trials", "dead")
    console.print(table.select(table.title, *scores).to_rich())
    console.print(table.select("cost per final run, and trials of the search", *costs).to_rich())
    console.print(tables.rate_map(record).to_rich())

    for line in (*progress.record.words, str(text), str(page)):
        print_line(console, line)
