"""A log as a stream of rows: read to its end once, or again and again while it grows.

Rows come with their step. Where steps go back, the run was resumed from an earlier checkpoint, and
the rows after it are forgotten, as the run itself forgot them.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mesotron.config import LogKind
from mesotron.watch.readers.locate import PARSERS, locate
from mesotron.watch.readers.parser import MAX_FILE, MAX_ROWS, Parser, Row

CHUNK = 2**20


@dataclass
class Log:
    """A log that was read.

    Args:
        path: what was given.
        kind: how it was read.
        rows: rows of numbers, each with its step; steps never go back.
        notes: what a reader of the story should know about the rows.
        actions: what a guard did, where the log itself has it.
    """

    path: Path
    kind: LogKind
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    actions: list[dict[str, Any]] = field(default_factory=list)


def read_log(path: Path, kind: LogKind = "auto") -> Log:
    """Read a log to its end.

    Args:
        path: a run folder, a log file, or a folder with one.
        kind: what it is, found out if auto.

    Raises:
        ValueError: it cannot be found, told apart or read; the sentence names file and line.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        ...     _ = file.write("Step,train/reward\\n1,0.5\\n2,0.6\\n")
        ...     file.flush()
        ...     read_log(Path(file.name)).rows[0]
        {'step': 1.0, 'train/reward': 0.5}
    """
    stream = Stream(path, kind)
    stream.poll()
    stream.finish()
    if not stream.log.rows:
        raise ValueError(f"{path} holds no row of numbers (read as {stream.log.kind})")
    return stream.log


class Stream:
    """A log that may still grow.

    Args:
        path: what to read.
        kind: what it is, found out if auto.
    """

    def __init__(self, path: Path, kind: LogKind = "auto") -> None:
        found, _ = locate(path, kind)
        self.log = Log(path, found, [])
        self.resumed = False  # whether the last poll made earlier rows wrong
        self._files: dict[Path, _File] = {}
        self._counted = 0

    def poll(self) -> int:
        """Read what is new.

        Returns:
            How many rows at the end of `log.rows` are new; all of them if `resumed` is set.
        """
        self.resumed = False
        rows: list[Row] = []
        files = self._open()
        for file in files:
            rows += file.read()
            # A file that has a successor is at its end: its last row must not come after it.
            rows += file.finish() if file is not files[-1] else []
        return self._replace() if PARSERS[self.log.kind].whole else self._add(rows)

    def _replace(self) -> int:
        """Take a document's rows in place of those of its earlier versions."""
        (file,) = self._files.values()
        try:
            rows = file.finish()
        except ValueError as error:  # perhaps it is being written: `finish` will tell
            self._note(f"not read yet: {error}")
            return 0
        if len(rows) == len(self.log.rows) and file.parser.actions == self.log.actions:
            return 0
        self.log.actions = file.parser.actions
        self.log.rows.clear()
        self.log.notes.clear()
        self.resumed, self._counted = True, 0
        return self._add(rows)

    def finish(self) -> int:
        """Read what waits for an end that will not come."""
        self.resumed = False
        rows = [row for file in self._files.values() for row in file.finish()]
        return 0 if PARSERS[self.log.kind].whole else self._add(rows)

    def _open(self) -> list["_File"]:
        _, paths = locate(self.log.path, self.log.kind)
        for path in paths:
            if path not in self._files:
                self._files[path] = _File(path, PARSERS[self.log.kind])
        return [self._files[path] for path in paths]

    def _add(self, rows: list[Row]) -> int:
        before = len(self.log.rows)
        for row in rows:
            self._append(row)
        if len(self.log.rows) > MAX_ROWS:
            raise ValueError(f"{self.log.path} has more than {MAX_ROWS} rows: give a part of it")
        return len(self.log.rows) - (0 if self.resumed else before)

    def _append(self, row: Row) -> None:
        kept = self.log.rows
        step = row.get("step")
        if step is None or not math.isfinite(step):
            self._counted += 1
            self._note("rows carry no step: they are counted")
            row = {"step": float(self._counted)} | {k: v for k, v in row.items() if k != "step"}
        elif kept and step < kept[-1]["step"]:
            self._note(f"resumed at step {step:.0f}: the rows after it were written again")
            while kept and kept[-1]["step"] >= step:
                kept.pop()
            self.resumed = True
        kept.append(row)

    def _note(self, note: str) -> None:
        if note not in self.log.notes and len(self.log.notes) < 20:
            self.log.notes.append(note)


class _File:
    """One file, its parser, and how much of it was read."""

    def __init__(self, path: Path, parser: type[Parser]) -> None:
        self.path, self.kind = path, parser
        self.parser, self.offset = parser(path), 0

    def read(self) -> list[Row]:
        """Rows of the bytes that are new; a file that shrank is read from its start."""
        size = self.path.stat().st_size
        if size > MAX_FILE:
            raise ValueError(f"{self.path} has {size} bytes, more than {MAX_FILE}: give a part")
        # A document is written anew as a whole, so that its new bytes alone mean nothing.
        if size < self.offset or (self.kind.whole and size != self.offset):
            self.parser, self.offset = self.kind(self.path), 0
        rows: list[Row] = []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while self.offset < MAX_FILE and (data := file.read(CHUNK)):
                self.offset += len(data)
                rows += self.parser.feed(data)
        return rows

    def finish(self) -> list[Row]:
        """Rows that waited for more."""
        return self.parser.finish()
