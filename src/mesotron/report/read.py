"""A run folder as the report needs it: columns of numbers, events, the story, transcripts.

Reads files alone, of runs that are over, still going or broken off. The story is told anew from
the rows by the watch; nothing else is judged here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from mesotron.runs import RunFolder
from mesotron.runs.files import Row, read_rows
from mesotron.watch import DETECTORS
from mesotron.watch.diagnosis import Condition, Diagnosis, diagnose
from mesotron.watch.events import Event, Evidence
from mesotron.watch.guard import Monitor, merge_history
from mesotron.watch.metrics import canonical
from mesotron.watch.readers import read_log

Kind = Literal["train", "sft", "snake", "vla", "other"]
Column = list[float | None]

# Fields that only the config of this kind of run has.
_SIGNS: dict[Kind, tuple[str, ...]] = {
    "train": ("recipe", "rollout", "objective"),
    "sft": ("loose", "batch", "optim"),
    "snake": ("muon_lr", "num_envs", "total_timesteps"),
    "vla": ("demos", "policy", "optim"),
}


@dataclass(frozen=True)
class Run:
    """One run, read.

    Args:
        name: what the page calls it.
        path: of its folder.
        config: the resolved config.
        environment: versions, device and seed.
        rows: of metrics.jsonl.
        written: rows of events.jsonl.
        samples: of samples.jsonl.
        result: how it ended, None while it has not.
        before: the evaluation before training, None if there was none.
        after: and after it.
        routing: rows of the routing table, [] if the run did not write one.
        spectra: rows of spectra.jsonl.
        by_run: rows of single runs, where one folder trained several side by side.
    """

    name: str
    path: Path
    config: Row
    environment: Row
    rows: list[Row]
    written: list[Row]
    samples: list[Row]
    result: Row | None
    before: Row | None
    after: Row | None
    routing: list[Row]
    spectra: list[Row]
    by_run: list[Row]

    @property
    def kind(self) -> Kind:
        """Which command made it, from the fields of its config."""
        for kind, signs in _SIGNS.items():
            if all(sign in self.config for sign in signs):
                return kind
        return "other"

    @cached_property
    def columns(self) -> dict[str, Column]:
        """Metric -> one number a row, None where the row has none."""
        return make_columns(self.rows)

    @cached_property
    def steps(self) -> list[float]:
        """The step of each row."""
        return [float(row["step"]) for row in self.rows]

    @property
    def planned_steps(self) -> int | None:
        """How many steps the run was to make, if its config says so."""
        planned = self.config.get("steps")
        return planned if isinstance(planned, int) else None

    @cached_property
    def story(self) -> Diagnosis | None:
        """The run in the watch's words; None if its rows have nothing that the watch knows.

        Of a run that was watched, by what was seen then; of somebody else's log, by what is seen
        in it now.
        """
        if not any("reward" in canonical(row) for row in self.rows[:50]):
            return None
        monitor = Monitor()
        monitor.replay(merge_history(self.rows, self.written), ())
        seen = monitor.events if self.kind == "other" else read_events(self.written)
        return diagnose(self.rows, monitor.engine, seen, actions=monitor.actions)

    @cached_property
    def events(self) -> list[Row]:
        """What the watch wrote; of somebody else's log, what it sees there now."""
        if self.kind != "other" or self.written or self.story is None:
            return self.written
        return [event.record() for event in self.story.events]

    @property
    def condition(self) -> Condition | None:
        """How it ended by the events that were written; None if there was no watch to write any.

        The story would say the same, but tells it from all the rows: a page of many runs waits.
        """
        if self.kind not in ("train", "vla"):
            return self.story.condition if self.kind == "other" and self.story else None
        harmless = {detector.name for detector in DETECTORS if detector.harmless}
        warned: set[str] = set()
        dead = False
        for event in self.events:
            name, severity = str(event.get("detector")), event.get("severity")
            if event.get("action") == "rollback":
                warned, dead = set(), False
            elif severity and name not in harmless:
                dead = dead or severity == "stop"
                (warned.discard if severity == "clear" else warned.add)(name)
        return "dead" if dead else "drifting" if warned else "healthy"

    def last(self, metric: str) -> float | None:
        """The last finite value of a metric."""
        found = [x for x in self.columns.get(metric, []) if x is not None and math.isfinite(x)]
        return found[-1] if found else None

    def total(self, metric: str) -> float | None:
        """The sum of a metric over the rows."""
        found = [x for x in self.columns.get(metric, []) if x is not None and math.isfinite(x)]
        return sum(found) if found else None


def read_run(path: Path, name: str | None = None) -> Run:
    """Read a run folder, or any log that `mesotron watch` reads.

    Args:
        path: of the folder, finished or not, or of the log.
        name: what the page calls it; its own name if not given.

    Raises:
        ValueError: there is no log in it, or one of its files is damaged.
    """
    if not (path / "config.json").is_file() or not (path / "env.json").is_file():
        return _read_log(path, name or path.resolve().name)
    folder = RunFolder(path)
    return Run(
        name=name or path.resolve().name,
        path=path,
        config=folder.config,
        environment=folder.environment,
        rows=[row for row in folder.rows("metrics") if is_number(row.get("step"))],
        written=[row for row in folder.rows("events") if is_number(row.get("step"))],
        samples=folder.rows("samples"),
        result=folder.result,
        before=folder.load("before"),
        after=folder.load("after"),
        routing=(folder.load("routing") or {}).get("rows", []),
        spectra=folder.rows("spectra"),
        by_run=read_rows(path / "runs.jsonl"),
    )


def _read_log(path: Path, name: str) -> Run:
    """Somebody else's log: its rows, and nothing else is known of it."""
    rows = [dict(row) for row in read_log(path).rows]
    unknown: dict[str, Any] = {"config": {}, "environment": {}, "written": [], "samples": []}
    unknown |= {"result": None, "before": None, "after": None, "routing": [], "spectra": []}
    return Run(name=name, path=path, rows=rows, by_run=[], **unknown)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read several runs and name each by the shortest end of its path that tells it apart."""
    return [read_run(path, name) for path, name in zip(paths, short_names(paths), strict=True)]


def read_events(rows: Sequence[Row]) -> list[Event]:
    """What the watch wrote as its own events; detectors that are not known here are left out."""
    known = {detector.name for detector in DETECTORS}
    names = {field.name for field in fields(Event)}
    found = []
    for row in rows:
        if row.get("kind") == "watch" and row.get("detector") in known:
            values: dict[str, Any] = {key: row[key] for key in row.keys() & names}
            values["evidence"] = tuple(Evidence(**one) for one in row.get("evidence", ()))
            found.append(Event(**values))
    return found


def short_names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that are all different.

    Example:
        >>> short_names([Path("/a/x/run"), Path("/a/y/run")])
        ['x/run', 'y/run']
        >>> short_names([Path("/a/x"), Path("/a/y")])
        ['x', 'y']
    """
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"the same run is named twice: {', '.join(map(str, paths))}")


def make_columns(rows: Sequence[Row]) -> dict[str, Column]:
    """Rows as columns; what is not a number is left out.

    Example:
        >>> make_columns([{"step": 1, "a": 0.5}, {"step": 2, "b": 1, "c": "word"}])
        {'a': [0.5, None], 'b': [None, 1.0]}
    """
    columns: dict[str, Column] = {}
    for place, row in enumerate(rows):
        for key, value in row.items():
            if not is_number(value):
                continue
            if key not in columns:
                columns[key] = [None] * len(rows)
            columns[key][place] = float(value)
    columns.pop("step", None)
    return columns


def is_number(value: Any) -> bool:
    """Whether JSON held a number, finite or not."""
    return isinstance(value, int | float) and not isinstance(value, bool)
