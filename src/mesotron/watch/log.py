"""Reads a log as rows in the order of their steps: once to its end, or while it grows.

A `Stream` opens the files of a log with the reader of their format. A `Timeline` puts the rows of
all of them in order. Where steps go back, the run was resumed from a checkpoint, and the rows after
it are dropped.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mesotron.config.registry import FORMATS
from mesotron.watch.find import AUTO, locate
from mesotron.watch.reader import MAX_FILE, Reader
from mesotron.watch.rows import MAX_KEYS, Row
from mesotron.watch.thin import Thinned

# A longer log is thinned: a million lines take constant memory, and the detectors stay fast.
MAX_ROWS = 8192
MAX_CELLS = 1_000_000
LEAST_ROWS = 256
MAX_NOTES = 20
NO_STEPS = "rows have no step: they are counted"
MAX_LATE = 64  # rows to look back for the step of a late row


@dataclass
class Log:
    path: Path
    kind: str
    rows: list[Row]  # each with its step; steps never go back
    notes: list[str] = field(default_factory=list)
    actions: list[dict[str, Any]] = field(default_factory=list)  # of a guard, if the log has them
    num_dropped: int = 0  # rows before the log began again
    planned_steps: float | None = None  # the step at which the run will end, if the log says so

    def note(self, text: str) -> None:
        if text not in self.notes and len(self.notes) < MAX_NOTES:
            self.notes.append(text)


def read_log(path: Path, kind: str = AUTO) -> Log:
    """Read a run folder, a log file, or a folder with one, to its end."""
    stream = Stream(path, kind)
    stream.poll()
    stream.finish()
    if not stream.log.rows:
        raise ValueError(f"{path} has no row of numbers (read as {stream.log.kind}): give a log")

    return stream.log


class Stream:
    """A log that may still grow."""

    def __init__(self, path: Path, kind: str = AUTO) -> None:
        self.log = Log(path, locate(path, kind).kind, [])
        self.resumed = False  # whether the last poll replaced earlier rows
        self._format = FORMATS[self.log.kind]
        self._readers: dict[Path, Reader] = {}
        self._timeline = Timeline(self.log)
        self._unread: ValueError | None = None  # why a document could not be read last time

    @property
    def num_ready(self) -> int:
        """Rows that will not change; the others may still get numbers of their steps."""
        return self._timeline.num_ready

    def poll(self) -> int:
        """Read what is new; returns the number of new rows, or of all if `resumed` is set."""
        *earlier, last = self._open()
        before = self.num_ready

        for reader in earlier:  # complete, since a later file exists
            self._add(reader.read())
            self._add(reader.finish())

        rows = last.read()
        if last.whole:
            return self._replace(last)

        self._add(rows)
        return self._count(before)

    def finish(self) -> int:
        """Read an incomplete end, when nothing more will follow."""
        before = self.num_ready
        if self._unread:
            raise self._unread

        for reader in self._readers.values():
            if not reader.whole:
                self._add(reader.finish())
            for note in reader.notes:
                self.log.note(note)
            self.log.planned_steps = reader.planned_steps()

        self._timeline.finish()
        return self._count(before)

    def _add(self, rows: Iterable[Row]) -> None:
        """Take the rows of a reader, with the names of their format as the watch knows them."""
        names = self._format.names
        if names:
            rows = ({names.get(key, key): x for key, x in row.items()} for row in rows)

        self._timeline.add(rows)

    def _count(self, before: int) -> int:
        self.resumed = self._timeline.changed
        self._timeline.changed = False
        if self.resumed:
            return self.num_ready

        return self.num_ready - before

    def _open(self) -> list[Reader]:
        """The readers of the log's files; a file that was begun again gets a new one."""
        source = locate(self.log.path, self.log.kind)
        for path in source.files:
            size = self._format.size(path)
            if size > MAX_FILE:
                raise ValueError(f"{path} has {size} bytes, more than {MAX_FILE}: give a part")

            reader = self._readers.get(path)
            if reader is None or is_outdated(reader, size):
                self._readers[path] = self._format(path, source.part)

        return [self._readers[path] for path in source.files]

    def _replace(self, reader: Reader) -> int:
        """Take the rows of a document in place of those of its earlier versions."""
        try:
            rows = [*reader.finish()]
        except ValueError as error:  # perhaps it is being written: `finish` will raise
            self._unread = error
            return 0

        self._unread = None
        self.resumed = False
        if len(rows) == self._timeline.num_added and reader.actions == self.log.actions:
            return 0

        self.log.actions = reader.actions
        self.log.rows.clear()
        self.log.num_dropped = 0
        self.log.notes.clear()

        self._timeline = Timeline(self.log)
        self._add(rows)
        self._timeline.finish()
        self.resumed = True

        return self.num_ready


def is_outdated(reader: Reader, size: int) -> bool:
    """Whether a reader's file was begun again, or is a document that was rewritten."""
    if reader.whole:
        return size != reader.offset
    return reader.path.suffix != ".gz" and size < reader.offset


class Timeline:
    """The rows of a log in the order of their steps.

    Two processes may write to one file, the second later than the first: a row with other numbers
    for an earlier step joins that step. The same numbers for an earlier step are a resumed run.
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        self.rows = log.rows
        self.num_added = 0
        self.changed = False  # whether rows that were ready have changed
        self.num_ready = 0
        self._joins = FORMATS[log.kind].joins
        self._names: set[str] = set()
        self._last = -math.inf  # the latest step
        self._lag = -1.0  # steps by which a row may be late; those rows are not ready yet

        # Rows without a step are counted.
        self._has_steps = False
        self._num_counted = 0
        self._counted_names: set[str] = set()

        # Steps may begin again in each epoch.
        self._epoch = math.inf
        self._offset = 0.0

        # Of a long log, what the earlier rows stand for.
        self._thinned = Thinned()
        self._num_cells = 0
        self._most_rows = MAX_ROWS

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.num_added += 1
            row = self._with_known_names(row)
            row = self._with_step(row)

            if self._offset or row["step"] < self._last:
                row = self._in_epoch(row)
            if "epoch" in row:
                self._epoch = row["epoch"]

            self._place(row)

        self._set_ready()

    def finish(self) -> None:
        """Nothing will follow: every row is ready."""
        if self._thinned.stride > 1:
            self._thin()
            self._note_thinning()

        self._lag = -1.0
        self._set_ready()

    def _with_known_names(self, row: Row) -> Row:
        """The row without names beyond the limit."""
        if row.keys() <= self._names:
            return row

        new = row.keys() - self._names
        if len(self._names) + len(new) > MAX_KEYS:
            self.log.note(f"more than {MAX_KEYS} names: the others are left out")
            return {key: value for key, value in row.items() if key in self._names}

        self._names |= new
        return row

    def _with_step(self, row: Row) -> Row:
        step = row.get("step")
        if step is None or not math.isfinite(step):
            return self._give_step(row)

        if not self._has_steps:
            self._has_steps = True
            for earlier in self.rows:  # they were counted
                earlier["step"] = self._last = min(step, earlier["step"])
                self.changed = True

        return row

    def _give_step(self, row: Row) -> Row:
        """W&B's count of calls, the last known step, or a count of rows."""
        calls = row.get("_step")
        numbers = {}
        for key, x in row.items():
            if key not in ("step", "_step"):
                numbers[key] = x

        if self._has_steps:
            return {"step": self._last} | numbers
        if calls is not None and math.isfinite(calls):
            return {"step": calls} | numbers

        self.log.note(NO_STEPS)
        names = numbers.keys() - {"epoch"}
        if not self._num_counted or not self._counted_names.isdisjoint(names):
            self._num_counted += 1
            self._counted_names = set()

        self._counted_names |= names  # an evaluation belongs to the row before it
        return {"step": float(self._num_counted)} | numbers

    def _in_epoch(self, row: Row) -> Row:
        """The row with a step that goes on where those of the epoch before ended."""
        is_new = row.get("epoch", -math.inf) > self._epoch
        if is_new and row["step"] + self._offset < self._last:
            self._offset = self._last + 1 - row["step"]
            self.log.note("steps begin again in each epoch: they are added up")

        if not self._offset:
            return row

        return row | {"step": row["step"] + self._offset}

    def _place(self, row: Row) -> None:
        """Put a row where its step belongs."""
        step = row["step"]
        if step > self._last:
            self._append(row)
        elif step == self._last:
            if not self._join_last(row):
                self._append(row)
        elif not self._join_late(row):
            self._go_back(row)

    def _append(self, row: Row) -> None:
        self._last = row["step"]
        self.rows.append(row)
        self._num_cells += len(row)

        is_large = self._num_cells > MAX_CELLS and len(self.rows) > LEAST_ROWS
        if len(self.rows) >= MAX_ROWS or is_large:
            self._most_rows = len(self.rows)
            self._thin()

    def _thin(self) -> None:
        """Keep the last rows, and those around sudden changes; thin the others."""
        self._thinned.thin(self.rows, self._most_rows)
        self._num_cells = sum(map(len, self.rows))
        self.changed = True

    def _note_thinning(self) -> None:
        text = (
            f"{self.num_added} rows: 1 of {self._thinned.stride} is read where nothing changes "
            "suddenly, and every row elsewhere"
        )
        if self._thinned.num_lost:
            text += "; there are too many sudden changes to read every row of the earlier ones"

        self.log.note(text)

    def _join_last(self, row: Row) -> bool:
        """Add other numbers to the row of the same step."""
        rows = self.rows
        can_join = self._joins and rows and rows[-1]["step"] == self._last
        if not can_join or not is_other(row, rows[-1]):
            return False

        self._lag = max(self._lag, 0.0)
        self._note_change(len(rows) - 1)
        add_missing(rows[-1], row)

        return True

    def _join_late(self, row: Row) -> bool:
        """Add a late row to its earlier step; False if the run goes back to that step."""
        step = row["step"]
        rows = self.rows
        at = len(rows)
        while at and rows[at - 1]["step"] >= step and len(rows) - at < MAX_LATE:
            at -= 1
            if not is_other(row, rows[at]):
                return False

        is_within = at == 0 or rows[at - 1]["step"] < step
        if not self._joins or not is_within or at == len(rows):
            return False

        self._lag = max(self._lag, self._last - step)
        self._note_change(at)
        if rows[at]["step"] == step:
            add_missing(rows[at], row)
        else:
            rows.insert(at, row)

        return True

    def _note_change(self, at: int) -> None:
        """Remember that a row changes which may be ready already."""
        if at < self.num_ready:
            self.changed = True

    def _go_back(self, row: Row) -> None:
        """Drop the rows after a checkpoint from which the run was resumed."""
        step = row["step"]
        num_rows = len(self.rows)
        while self.rows and self.rows[-1]["step"] >= step:
            self.rows.pop()

        self._thinned.cut(len(self.rows))
        if self.rows:
            self.log.note(f"resumed at step {step:.0f}: the rows after it were written again")
        else:
            self.log.num_dropped += num_rows
            self.log.note(
                f"begun again at step {step:.0f}: no earlier row is read; give each run its file, "
                "or its name in a column run"
            )

        self.changed = True
        self._append(row)

    def _set_ready(self) -> None:
        self.num_ready = len(self.rows)
        if self._lag < 0:
            return

        latest = self._last - self._lag
        while self.num_ready and self.rows[self.num_ready - 1]["step"] >= latest:
            self.num_ready -= 1


def is_other(row: Row, earlier: Row) -> bool:
    """Whether fewer than half of a row's names, without times, are those of an earlier one."""
    num_names = 0
    num_shared = 0
    for name in row:
        if name != "step" and not name.startswith("time"):
            num_names += 1
            num_shared += name in earlier

    return 2 * num_shared < max(num_names, 1)


def add_missing(row: Row, other: Row) -> None:
    """Add the numbers of another row that a row does not have."""
    for name, value in other.items():
        row.setdefault(name, value)
