"""`mesotron compare sweep FILE`: trials side by side, each a run; the watch prunes dead ones.

The study is kept by Optuna (arXiv 1907.10902). The next worker takes up what a dead one has left.
"""

import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import IO, Any, Literal

import optuna
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mesotron.compare.health import diverged_at, is_not_finite
from mesotron.compare.jobs import make_pool, run_jobs
from mesotron.compare.kind import XLA_ONE_THREAD
from mesotron.compare.space import Dimension, Space, Value, read_space
from mesotron.compare.standings import count
from mesotron.config import SnakeConfig, SweepConfig, TrainConfig, VlaTrainConfig, WatchSettings
from mesotron.config.base import suggest
from mesotron.config.flags import read_setting
from mesotron.runs import RunFolder
from mesotron.runs.console import SafeConsole, print_line, spell_time
from mesotron.runs.extras import require
from mesotron.runs.files import append_row, read_rows, write_json
from mesotron.runs.folder import try_lock
from mesotron.runs.links import make_own_folder, refuse_links, refuse_links_to_write
from mesotron.runs.workers import Job
from mesotron.watch.engine import Engine

JOURNAL = "study.log"
MAX_CRASHES = 3  # in a row, before the whole sweep is at fault
MAX_ROWS = 10
EVERY = 0.25  # seconds between looks at the running trials
LAST_SHARE = 0.1  # of a run's rows, over which a metric is averaged


def run(config: SweepConfig) -> int:
    space = read_space(config.file, config.space)
    name = command_name(space.command)
    require(COMMANDS[name].extra, what=f"mesotron {name}")

    for one in space.dimensions:
        if one.name != "config":  # which every command has
            read_setting(COMMANDS[name].config_type, f"{one.name}={one.first}")

    folder = (config.out or Path("runs") / f"sweep-{space.name}").resolve()
    make_own_folder(folder / "trials")
    refuse_links(folder / "trials")
    refuse_links_to_write(folder / JOURNAL)  # Optuna opens it
    console = SafeConsole()
    study = Study(space, config, folder)
    Sweep(study, space, config, console).run()
    finish(study, space, folder, console)

    return 0


@dataclass(frozen=True, kw_only=True)
class Sweepable:
    """A command whose runs can be trials."""

    config_type: type
    place: tuple[str, ...]  # flags for the run folder; {parent} and {name} stand for its parts
    score: tuple[str, ...]  # path of the score in result.json
    extra: str  # whose packages it needs
    threads: str | None = None  # flag for CPU threads, if it has one
    defaults: tuple[str, ...] = ()  # flags of a trial that the sweep's own override
    env: dict[str, str] = field(default_factory=dict)  # environment variables if it has one thread


OUT = ("--out={parent}/{name}",)
COMMANDS = {
    "train": Sweepable(
        config_type=TrainConfig,
        place=OUT,
        score=("after", "value"),
        extra="rlvr",
        threads="--threads",
    ),
    "vla train": Sweepable(
        config_type=VlaTrainConfig,
        place=OUT,
        score=("success",),
        extra="vla",
        threads="--threads",
        defaults=("--workers=1",),
    ),
    "ppo snake": Sweepable(
        config_type=SnakeConfig,
        place=("--save-dir={parent}", "--run-name={name}"),
        score=("greedy_fruit",),
        extra="ppo",
        env=XLA_ONE_THREAD,
    ),
}


def command_name(arguments: Sequence[str]) -> str:
    for length in (1, 2):
        if " ".join(arguments[:length]) in COMMANDS:
            return " ".join(arguments[:length])

    known = ", ".join(COMMANDS)
    raise ValueError(f"mesotron {' '.join(arguments[:2])} cannot be swept: choose from {known}")


def start_arguments(arguments: Sequence[str], run: Path, threads: int) -> list[str]:
    name = command_name(arguments)
    command = COMMANDS[name]
    words = name.split()

    place = [flag.format(parent=run.parent, name=run.name) for flag in command.place]
    if command.threads:
        place.append(f"{command.threads}={threads}")

    return [*words, *command.defaults, *arguments[len(words) :], *place]


def own_code(arguments: Sequence[str]) -> list[str]:
    """The arguments that name the sweep's own reward: a resumed trial needs them again."""
    words: list[str] = []
    for word in arguments:
        is_value = bool(words) and not word.startswith("--")
        if is_value or word.partition("=")[0] in ("--reward", "--reward.parts"):
            words.append(word)
        elif words:
            break

    if any(":" in word for word in words):
        return words

    return []


def process_command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-P", "-m", "mesotron", *arguments]


def read_score(run: Path, metric: str | None, arguments: Sequence[str]) -> float | None:
    """The score of a finished run; None if unfinished or not finite, LookupError if it has none."""
    if not (run / "config.json").is_file():
        return None

    folder = RunFolder(run)
    if folder.result is None:
        return None

    rows = folder.rows("metrics")
    path: Sequence[str] = COMMANDS[command_name(arguments)].score
    if metric is not None:
        name = metric.removeprefix("train/")
        values = [row[name] for row in rows if name in row]
        if values:
            number = max(1, round(LAST_SHARE * len(values)))
            return if_finite(fmean(values[-number:]))

        path = name.removeprefix("eval/").split(".")

    value: Any = folder.result
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None

    if not isinstance(value, int | float):
        known = set(folder.result).union(*rows)
        name = metric or ".".join(path)
        raise LookupError(f"{run} has no metric {name}{suggest(name, known)}: see --metric")

    return if_finite(float(value))


def if_finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass
class Trial:
    number: int  # in the study
    values: dict[str, Value]  # of the dimensions
    run: Path  # run folder
    claim: IO[str]  # a locked file; while this process or the trial's holds it, the trial is taken
    engine: Engine = field(default_factory=lambda: Engine(WatchSettings()))
    num_seen: int = 0  # rows of metrics that the engine has seen
    dead: str | None = None  # why it is dead, if it is

    def look(self) -> None:
        """Let the watch see the rows that are new."""
        rows = read_rows(self.run / "metrics.jsonl")
        new = rows[self.num_seen :]
        self.num_seen = len(rows)

        for row in new:
            for event in self.engine.update(row):
                if event.severity == "stop" and self.dead is None:
                    self.dead = event.sentence(False)

        step = diverged_at(new)
        if step is not None:
            self.dead = f"the loss is not finite at step {step}"


class Study:
    """Optuna's study, and which trial is next."""

    def __init__(self, space: Space, config: SweepConfig, folder: Path) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space = space
        self.config = config
        self.folder = folder
        self.metric = config.metric or space.metric
        self.reasons = folder / "reasons.jsonl"  # why trials have no score
        goal = config.goal or space.goal
        self.study = self._open(goal)

        runs = [int(path.stem[6:]) for path in folder.glob("trials/trial-*.lock")]
        trials = self.study.get_trials(deepcopy=False)
        if max(runs, default=-1) >= len(trials):
            raise ValueError(f"{folder} has trials of another study: use another --out")

        has_scores = any(one.value is not None for one in trials)
        self._check_same_meaning(goal, has_scores)

    def _open(self, goal: Literal["maximize", "minimize"]) -> optuna.Study:
        log = str(self.folder / JOURNAL)
        lock = JournalFileOpenLock(log)  # Optuna's other lock is a symbolic link
        try:
            return optuna.create_study(
                study_name=self.config.study or self.space.name,
                storage=self.config.storage or JournalStorage(JournalFileBackend(log, lock)),
                direction=goal,
                load_if_exists=True,
            )
        except Exception as error:  # of a database, its driver or a damaged journal
            place = "--storage" if self.config.storage else log
            reason = " ".join(str(error).split())
            raise ValueError(f"{place} is not a usable study: {reason}") from error

    def _check_same_meaning(self, goal: str, has_scores: bool) -> None:
        """Scores of one study must mean the same and have the same direction."""
        fixed: dict[str, Value] = {}
        for one in self.space.dimensions:
            fixed[one.name] = "" if one.varies else one.first

        known = {"goal": self.study.direction.name.lower(), **self.study.user_attrs}
        if not has_scores:
            known.pop("metric", None)  # perhaps it was mistyped

        now = {
            "goal": goal,
            "metric": self.metric or "score",
            "command": " ".join(self.space.arguments(fixed)),
        }
        for name, new in now.items():
            old = known.get(name, new)
            if old != new:
                raise ValueError(
                    f"the study has the {name} {old}, not {new}: use another --study and --out"
                )

            self.study.set_user_attr(name, new)

    def next(self) -> Trial | None:
        """A trial that a dead worker has left, or a new one; None if there are enough."""
        trials = self.study.get_trials(deepcopy=False)
        for trial in trials:
            if trial.state.name == "RUNNING":
                taken = self._take_up(trial)
            else:
                taken = None

            if taken is not None:
                return taken

        counted = [trial for trial in trials if trial.state.name != "FAIL"]
        if len(counted) >= self.config.trials:
            return None

        trial = self.study.ask()
        claim = self._claim(trial.number)
        assert claim is not None  # the number is new

        # Seeded by the number: workers that start together do not draw the same values.
        self.study.sampler = TPESampler(seed=self.config.seed * 1_000_003 + trial.number)
        values = {one.name: _suggest(trial, one) for one in self.space.dimensions}

        return Trial(trial.number, values, self._run(trial.number), claim)

    def _run(self, number: int) -> Path:
        return self.folder / "trials" / f"trial-{number:04d}"

    def _claim(self, number: int) -> IO[str] | None:
        return try_lock(self._run(number).with_suffix(".lock"))

    def _take_up(self, trial: FrozenTrial) -> Trial | None:
        if not self._run(trial.number).with_suffix(".lock").exists():
            return None  # another machine's
        if any(one.name not in trial.params for one in self.space.dimensions):
            return None  # its worker is about to draw them, or died there: one trial fewer

        claim = self._claim(trial.number)
        if claim is None:
            return None

        now = self.study.get_trials(deepcopy=False)[trial.number]
        if now.state.name != "RUNNING":  # it ended before the claim
            claim.close()
            return None

        return Trial(trial.number, dict(trial.params), self._run(trial.number), claim)

    def end_without_score(self, trial: Trial, state: Literal["PRUNED", "FAIL"], why: str) -> None:
        """End a trial that is dead (pruned) or crashed (failed: it does not count)."""
        append_row(self.reasons, {"trial": trial.number, "state": state, "why": why})
        self.study.tell(trial.number, state=TrialState[state])


def _suggest(trial: optuna.Trial, one: Dimension) -> Value:
    if one.choices:
        choice = trial.suggest_categorical(one.name, one.choices)
        assert choice is not None
        return choice

    if isinstance(one.low, int) and isinstance(one.high, int):
        return trial.suggest_int(one.name, one.low, one.high, log=one.log)

    return trial.suggest_float(one.name, one.low, one.high, log=one.log)


class Sweep:
    """Runs trials side by side and tells the study how they ended."""

    def __init__(self, study: Study, space: Space, config: SweepConfig, console: Console) -> None:
        self.study = study
        self.space = space
        self.config = config
        self.say = partial(print_line, console)
        on_cpu = any("device=cpu" in argument for argument in space.command)
        self.pool = make_pool(config, not on_cpu)
        self.trials: dict[str, Trial] = {}
        self.crashes = 0

    def run(self) -> None:
        try:
            run_jobs(self.pool, self.study.folder, self.say, self)
        finally:
            for trial in self.trials.values():
                trial.claim.close()  # leaves it to the next worker

    def start(self) -> None:
        while self.pool.has_free_slot:
            trial = self.study.next()
            if trial is None:
                break
            self._start_trial(trial)

        if self.config.prune:
            self._end_dead_trials()

    def _end_dead_trials(self) -> None:
        for job in self.pool.jobs:
            trial = self.trials[job.key]
            if trial.dead is not None:
                continue

            trial.look()
            if trial.dead is not None:
                job.process.terminate()

    def wait(self) -> None:
        time.sleep(EVERY)

    def _start_trial(self, trial: Trial) -> None:
        name = command_name(self.space.command)
        given = self.space.arguments(trial.values)
        if (trial.run / "config.json").is_file():
            arguments = [*name.split(), f"--resume={trial.run}", *own_code(given)]
        else:
            arguments = start_arguments(given, trial.run, self.config.threads)

        env = {"OMP_NUM_THREADS": str(self.config.threads)}
        if self.config.threads == 1:
            env |= COMMANDS[name].env

        key = str(trial.number)
        log = trial.run.with_suffix(".log")
        command = process_command(arguments)
        self.pool.start(key, command, log, env, keep_open=(trial.claim.fileno(),))
        self.trials[key] = trial

    def end(self, job: Job, stopping: bool) -> None:
        trial = self.trials.pop(job.key)
        if self.config.prune and trial.dead is None:
            trial.look()

        score = None
        missing = ""
        try:
            score = read_score(trial.run, self.study.metric, self.space.command)
        except LookupError as error:
            missing = str(error)

        why = trial.dead
        if score is None and why is None and is_not_finite(job.failure):
            why = job.failure

        label = self._label(trial)
        took = spell_time(time.monotonic() - job.start)
        with trial.claim:  # free for another worker once the study knows the outcome
            if why is not None:
                self.study.end_without_score(trial, "PRUNED", why)
                self.say(f"{label}: pruned, {why} ({took})")
                self.crashes = 0
            elif score is not None:
                self.study.study.tell(trial.number, score)
                self.say(f"{label}: {score:.4g} ({took})")
                self.crashes = 0
            elif stopping:
                self.crashes = 0  # the next worker takes it up
            else:
                self._fail(trial, job, missing)

    def _label(self, trial: Trial) -> str:
        values = []
        for one in self.space.dimensions:
            if one.varies:
                values.append(f"{one.name}={_spell(trial.values[one.name])}")

        return f"trial {trial.number} {' '.join(values)}"

    def _fail(self, trial: Trial, job: Job, missing: str) -> None:
        """End a trial that crashed or lacks the metric (`missing` says so)."""
        failure = missing or job.failure
        if job.process.returncode == 0 and not missing:
            failure = f"{trial.run} has no finite metric {self.study.metric or ''}".rstrip()

        self.study.end_without_score(trial, "FAIL", failure)
        self.say(f"{self._label(trial)}: failed, {failure}")
        self.crashes += 1

        others = self.study.study.get_trials(deepcopy=False)
        if missing and all(other.state.name != "COMPLETE" for other in others):  # mistyped
            raise ValueError(missing)

        if self.crashes >= MAX_CRASHES:
            last = f"the last with: {failure}; see {job.log}"
            raise ValueError(f"{self.crashes} trials in a row have failed, {last}")


def _spell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"

    return str(value)


def finish(study: Study, space: Space, folder: Path, console: Console) -> None:
    reasons = {row["trial"]: row["why"] for row in read_rows(study.reasons)}
    rows: list[dict[str, Any]] = []
    for trial in study.study.get_trials(deepcopy=False):
        if trial.state.name in ("COMPLETE", "PRUNED"):
            row = {
                "number": trial.number,
                "score": trial.value,
                "values": trial.params,
                "why": reasons.get(trial.number, ""),
            }
            rows.append(row)

    sign = 1 if study.study.direction.name == "MINIMIZE" else -1
    rows.sort(key=lambda row: (row["score"] is None, sign * (row["score"] or 0.0)))

    draft = folder / f".sweep-{os.getpid()}.json"  # several processes may finish at once
    write_json(draft, {"name": space.name, "metric": study.metric, "trials": rows})
    draft.replace(folder / "sweep.json")
    show_trials(study, space, rows, console)
    print_line(console, str(folder / "sweep.json"))


def show_trials(
    study: Study, space: Space, rows: Sequence[dict[str, Any]], console: Console
) -> None:
    """The best trials as a table, and the command of the best one."""
    names = [one.name for one in space.dimensions if one.varies]
    table = Table(title=f"{space.name}: {count(len(rows), 'trial')}, best first", box=SIMPLE_HEAD)
    for heading in ("trial", study.metric or "score", *names, "pruned because"):
        table.add_column(heading)

    for row in rows[:MAX_ROWS]:
        score = "" if row["score"] is None else f"{row['score']:.4g}"
        values = [_spell(row["values"].get(name, "")) for name in names]
        table.add_row(str(row["number"]), score, *values, row["why"])

    console.print(table)
    if rows and rows[0]["score"] is not None:
        print_line(console, f"best: mesotron {' '.join(space.arguments(rows[0]['values']))}")
