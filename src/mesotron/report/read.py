"""Reads a run folder, or any log that `mesotron watch` reads, for the report."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from mesotron.runs import RunFolder
from mesotron.runs.best import read_record
from mesotron.runs.files import Row, read_rows, rows_of_steps
from mesotron.watch.detectors import Action, Event, Evidence
from mesotron.watch.diagnosis import Condition, Diagnosis, diagnose_run
from mesotron.watch.engine import Monitor, is_number, merge_history
from mesotron.watch.log import MAX_ROWS, NO_STEPS, read_log
from mesotron.watch.metrics import Names, canonical, standard_row
from mesotron.watch.reader import BLOCK

Kind = Literal["train", "sft", "snake", "vla", "other"]
Column = list[float | None]
SPECTRUM = {"block", "before", "after", "rank", "shape", "rule"}  # keys of a row of spectra.jsonl

# Held-out scores, the first that a run has, and their names.
HELD_OUT = {
    "eval/greedy": "held-out accuracy",
    "eval/accuracy": "held-out accuracy",
    "eval/reward": "held-out reward",
    "eval/success": "success",
}

# Fields that only the config of this kind of run has.
_SIGNATURES: dict[Kind, tuple[str, ...]] = {
    "train": ("recipe", "rollout", "objective"),
    "sft": ("loose", "batch", "optim"),
    "snake": ("muon_lr", "num_envs", "total_timesteps"),
    "vla": ("demos", "policy", "optim"),
}


@dataclass(frozen=True)
class Best:
    """The best evaluation of a run."""

    step: int
    value: float
    measure: str
    checkpoint: str = ""  # the name of its folder, where that is still there


@dataclass(frozen=True)
class Run:
    name: str  # as shown on the page
    path: Path  # its folder, or the log
    rows: list[Row]  # of metrics.jsonl
    config: Row = field(default_factory=dict)
    environment: Row = field(default_factory=dict)
    logged_events: list[Row] = field(default_factory=list)
    forecasts: list[str] = field(default_factory=list)  # made during the run, as paragraphs
    samples: list[Row] = field(default_factory=list)
    result: Row | None = None  # None while the run goes on
    before: Row | None = None  # the evaluations before and after training
    after: Row | None = None
    routing: list[Row] = field(default_factory=list)
    spectra: list[Row] = field(default_factory=list)
    by_run: list[Row] = field(default_factory=list)  # where one folder trained several runs
    chosen: Row | None = None  # best.json: the evaluation whose checkpoint is the run's model

    @property
    def kind(self) -> Kind:
        for kind, signature in _SIGNATURES.items():
            if all(name in self.config for name in signature):
                return kind
        return "other"

    @cached_property
    def columns(self) -> dict[str, Column]:
        """Metric, under our name if it has one -> one number per row, None where there is none."""
        if self.kind != "other":
            return make_columns(self.rows)

        return make_columns([standard_row(row) for row in self.rows])

    @cached_property
    def steps(self) -> list[float]:
        return [float(row["step"]) for row in self.rows]

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]) if self.rows else 0

    @cached_property
    def diagnosis(self) -> Diagnosis | None:
        """The diagnosis of `mesotron watch`; None without a metric that it knows."""
        has_reward = any("reward" in canonical(row) for row in self.rows[:50])
        others = {"vla": self.logged_events, "other": any(map(canonical, self.rows))}
        if not (has_reward or others.get(self.kind)):
            return None

        monitor = Monitor()
        monitor.replay(merge_history(self.rows, self.logged_events), ())

        return diagnose_run(monitor)

    @cached_property
    def events(self) -> list[Row]:
        """The logged events; for a foreign log, those that the watch detects."""
        if self.kind != "other" or self.diagnosis is None:
            return self.logged_events

        detected = [event.record() for event in self.diagnosis.events]
        return sorted([*detected, *self.logged_events], key=lambda row: row["step"])

    @property
    def condition(self) -> Condition | None:
        """The diagnosis's condition; None for a run not watched."""
        is_watched = self.kind in ("train", "vla", "other")
        if is_watched and self.diagnosis:
            return self.diagnosis.condition

        return None

    @cached_property
    def best(self) -> Best | None:
        """The evaluation that chose the run's model, else the highest of several, else None."""
        if self.chosen is not None:
            measure = f"held-out {self.chosen.get('measure', 'accuracy')}"
            return self._best_at(self.chosen["step"], self.chosen["score"], measure)

        for metric, measure in HELD_OUT.items():
            column = self.columns.get(metric, [])
            scores = []
            for step, value in zip(self.steps, column):
                if value is not None and math.isfinite(value):
                    scores.append((value, -int(step)))

            if len(scores) > 1:
                value, negative = max(scores)  # the first of equal ones
                return self._best_at(-negative, value, measure)

        return None

    def _best_at(self, step: int, value: float, measure: str) -> Best:
        name = f"checkpoint-{step}"
        is_kept = (self.path / "checkpoints" / name).is_dir()
        return Best(step, value, measure, name if is_kept else "")

    def finite(self, metric: str) -> list[float]:
        return finite_values(self.columns.get(metric, []))

    def last(self, metric: str) -> float | None:
        return next(reversed(self.finite(metric)), None)


def read_run(path: Path, name: str | None = None, rename: Sequence[str] = ()) -> Run:
    """Read a run folder, or any log that `mesotron watch` reads; `rename` is as there."""
    name = name or path.resolve().name
    if not (path / "config.json").is_file() or not (path / "env.json").is_file():
        return read_foreign(path, name, rename)

    folder = RunFolder(path)
    events = [row for row in folder.rows("events") if parse_event(row) is not None]
    forecasts = [str(row.get("text")) for row in folder.rows("events") if is_forecast(row)]
    runs = rows_of_steps(read_rows(path / "runs.jsonl"))

    return Run(
        name,
        path,
        read_metrics(folder),
        folder.config,
        folder.environment,
        logged_events=events,
        forecasts=forecasts,
        samples=folder.rows("samples"),
        spectra=[row for row in folder.rows("spectra") if row.keys() >= SPECTRUM],
        result=folder.result,
        before=folder.load("before"),
        after=folder.load("after"),
        routing=(folder.load("routing") or {}).get("rows", []),
        by_run=[row for row in runs if is_number(row.get("run"))],
        chosen=read_record(folder),
    )


def read_metrics(folder: RunFolder) -> list[Row]:
    """The rows of metrics.jsonl; of a long run those that the watch reads."""
    file = folder.path / "metrics.jsonl"
    if file.is_file() and count_lines(file) > MAX_ROWS:
        return [dict(row) for row in read_log(file).rows]

    return folder.rows("metrics")


def count_lines(file: Path) -> int:
    count = 0
    with file.open("rb") as data:
        while block := data.read(BLOCK):
            count += block.count(b"\n")

    return count


def read_foreign(path: Path, name: str, rename: Sequence[str]) -> Run:
    """A log of any framework as a run."""
    log = read_log(path)
    names = Names(path, rename)
    names.learn(set().union(*log.rows))
    names.check()

    rows = [dict(names.apply(row)) for row in log.rows]
    if NO_STEPS in log.notes:  # perhaps data for training instead of a log
        names.require_known(path, rows)

    return Run(name, path, rows, logged_events=log.actions)


def read_runs(paths: Sequence[Path], rename: Sequence[str] = ()) -> list[Run]:
    """Read several runs; each is named by the shortest end of its path that is unique."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return [read_run(path, name, rename) for path, name in zip(paths, names, strict=True)]

    raise ValueError(f"the same run is given twice: {', '.join(map(str, paths))}")


def finite_values(column: Column) -> list[float]:
    return [x for x in column if x is not None and math.isfinite(x)]


def is_forecast(row: Row) -> bool:
    return row.get("kind") == "forecast"


def parse_event(row: Row) -> Event | Action | None:
    """A row of events.jsonl; None if it is incomplete, such as one of another program."""
    names = {each.name for each in fields(Event)}
    try:
        if row.get("kind") == "guard":
            event: Event | Action = Action.from_record(row)
        else:
            values: dict[str, Any] = {key: row[key] for key in row.keys() & names}
            values["evidence"] = tuple(Evidence(**one) for one in row.get("evidence", ()))
            event = Event(**values)

        event.sentence()
    except (AttributeError, KeyError, TypeError, ValueError):
        return None

    return event


def make_columns(rows: Sequence[Row]) -> dict[str, Column]:
    """Rows as columns of numbers, without `step`."""
    columns: dict[str, Column] = {}
    for index, row in enumerate(rows):
        for key, value in row.items():
            if is_number(value):
                if key not in columns:
                    columns[key] = [None] * len(rows)
                columns[key][index] = float(value)

    columns.pop("step", None)
    return columns
