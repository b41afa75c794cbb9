"""A log as a stream of rows: read once to its end, or again and again while it grows.

Where steps go back, the run was resumed from a checkpoint, and the rows after it are dropped.
"""

import math
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from mesotron.config import LogKind
from mesotron.watch.readers.parsers import MAX_FILE, PARSERS, Parser, Row, recognize

MAX_ROWS = 2_000_000
MAX_NOTES = 20
MAX_ENTRIES = 10_000  # searched for event files at each level of a folder


@dataclass
class Log:
    """A log that was read."""

    path: Path
    kind: LogKind
    rows: list[Row]  # each with its step; steps never go back
    notes: list[str] = field(default_factory=list)
    actions: list[dict[str, Any]] = field(default_factory=list)  # of a guard, if the log has them


def read_log(path: Path, kind: LogKind = "auto") -> Log:
    """Read a run folder, a log file, or a folder with one, to its end."""
    stream = Stream(path, kind)
    stream.poll()
    stream.finish()
    if not stream.log.rows:
        raise ValueError(f"{path} has no row of numbers (read as {stream.log.kind})")
    return stream.log


class Stream:
    """A log that may still grow."""

    def __init__(self, path: Path, kind: LogKind = "auto") -> None:
        found, _ = locate(path, kind)
        self.log = Log(path, found, [])
        self.resumed = False  # whether the last poll replaced earlier rows
        self._parsers: dict[Path, Parser] = {}
        self._num_counted = 0

    def poll(self) -> int:
        """Read what is new; returns the number of new rows, or of all if `resumed` is set."""
        self.resumed = False
        rows: list[Row] = []
        *earlier, last = self._open()
        for parser in earlier:  # complete, since a later file exists
            rows += parser.read() + parser.finish()
        rows += last.read()
        return self._replace(last) if last.whole else self._add(rows)

    def finish(self) -> int:
        """Read an incomplete end, when nothing more will follow."""
        self.resumed = False
        rows: list[Row] = []
        for parser in self._parsers.values():
            rows += parser.finish()
            for note in parser.notes:
                self._note(note)
        return 0 if PARSERS[self.log.kind].whole else self._add(rows)

    def _open(self) -> list[Parser]:
        _, paths = locate(self.log.path, self.log.kind)
        make = PARSERS[self.log.kind]
        for path in paths:
            size, parser = path.stat().st_size, self._parsers.get(path)
            if size > MAX_FILE:
                raise ValueError(f"{path} has {size} bytes, more than {MAX_FILE}: give a part")
            # A file that shrank was begun again; a document is rewritten as a whole.
            if parser is None or size < parser.offset or (make.whole and size != parser.offset):
                self._parsers[path] = make(path)
        return [self._parsers[path] for path in paths]

    def _replace(self, parser: Parser) -> int:
        """Take the rows of a document in place of those of its earlier versions."""
        try:
            rows = parser.finish()
        except ValueError as error:  # perhaps it is being written: `finish` will tell
            self._note(f"not read yet: {error}")
            return 0
        if len(rows) == len(self.log.rows) and parser.actions == self.log.actions:
            return 0
        self.log.actions = parser.actions
        self.log.rows.clear()
        self.log.notes.clear()
        self.resumed, self._num_counted = True, 0
        return self._add(rows)

    def _add(self, rows: list[Row]) -> int:
        kept = self.log.rows
        before = len(kept)
        for row in rows:
            step = row.get("step")
            if step is None or not math.isfinite(step):
                self._num_counted += 1
                self._note("rows have no step: they are counted")
                numbers = {key: value for key, value in row.items() if key != "step"}
                row = {"step": float(self._num_counted)} | numbers
            elif kept and step < kept[-1]["step"]:
                self._note(f"resumed at step {step:.0f}: the rows after it were written again")
                while kept and kept[-1]["step"] >= step:
                    kept.pop()
                self.resumed = True
            kept.append(row)
        if len(kept) > MAX_ROWS:
            raise ValueError(f"{self.log.path} has more than {MAX_ROWS} rows: give a part of it")
        return len(kept) - (0 if self.resumed else before)

    def _note(self, note: str) -> None:
        if note not in self.log.notes and len(self.log.notes) < MAX_NOTES:
            self.log.notes.append(note)


def locate(path: Path, kind: LogKind = "auto") -> tuple[LogKind, list[Path]]:
    """The format of a log and its files in the order they were written."""
    if not path.exists():
        raise ValueError(f"{path} does not exist: give a run folder or a log file")
    if path.is_file():
        return (recognize(path) if kind == "auto" else kind), [path]
    if not path.is_dir():
        raise ValueError(f"{path} is not a regular file: give a run folder or a log file")
    for found, files in _candidates(path):
        if files and kind in ("auto", found):
            return found, files
    raise ValueError(
        f"{path} has no {'' if kind == 'auto' else f'{kind} '}log: looked for metrics.jsonl, "
        "trainer_state.json (also in checkpoint-*), TensorBoard events, one .jsonl and one .csv"
    )


def _candidates(path: Path) -> list[tuple[LogKind, list[Path]]]:
    """What a folder may contain, the best source first."""
    run, state = path / "metrics.jsonl", path / "trainer_state.json"
    states = {
        int(number): file for file in path.glob("checkpoint-*/trainer_state.json")
        if (number := file.parent.name.removeprefix("checkpoint-")).isdecimal()
    }  # fmt: skip
    newest = [states[max(states)]] if states else []
    lines, tables = sorted(path.glob("*.jsonl")), sorted(path.glob("*.csv"))
    return [
        ("run", [run] if run.is_file() else []),
        ("trainer_state", [state] if state.is_file() else newest),
        ("tensorboard", _event_files(path)),
        ("jsonl", lines if len(lines) == 1 else []),
        ("csv", tables if len(tables) == 1 else []),
    ]


def _event_files(path: Path) -> list[Path]:
    """Event files in a folder, or else up to two levels below, by the time in their names."""
    found: list[Path] = []
    for depth, pattern in enumerate(("*", "*/*", "*/*/*")):
        entries = islice(path.glob(pattern), MAX_ENTRIES)
        found += [file for file in entries if "tfevents" in file.name and file.is_file()]
        if found and depth == 0:
            break
    return sorted(found, key=lambda file: (file.name, str(file)))
