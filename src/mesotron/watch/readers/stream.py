"""A log as a stream of rows: read once to its end, or again and again while it grows.

Where steps go back, the run was resumed from a checkpoint, and the rows after it are dropped.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mesotron.config import LogKind
from mesotron.watch.readers.locate import PARSERS, locate
from mesotron.watch.readers.parsers import MAX_FILE, MAX_KEYS, Parser, Row

# A longer log is averaged over neighboring rows: a million lines take constant memory, and the
# detectors, at most a millisecond per row, stay fast.
MAX_ROWS = 8192
MAX_CELLS = 1_000_000
MAX_NOTES = 20
NO_STEPS = "rows have no step: they are counted"
MAX_LATE = 64  # rows to look back for the step of a late row


@dataclass
class Log:
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
        raise ValueError(f"{path} has no row of numbers (read as {stream.log.kind}): give a log")

    return stream.log


class Stream:
    """A log that may still grow."""

    def __init__(self, path: Path, kind: LogKind = "auto") -> None:
        source = locate(path, kind)
        self.log = Log(path, source.kind, [])
        self.resumed = False  # whether the last poll replaced earlier rows
        self._parsers: dict[Path, Parser] = {}
        self._table = Table(self.log)
        self._unread: ValueError | None = None  # why a document could not be read last time

    @property
    def num_ready(self) -> int:
        """Rows that will not change; the others may still get numbers of their steps."""
        return self._table.num_ready

    def poll(self) -> int:
        """Read what is new; returns the number of new rows, or of all if `resumed` is set."""
        *earlier, last = self._open()
        before = self._table.num_ready

        for parser in earlier:  # complete, since a later file exists
            self._table.add(parser.read())
            self._table.add(parser.finish())

        rows = last.read()
        if last.whole:
            return self._replace(last)

        self._table.add(rows)
        return self._count(before)

    def finish(self) -> int:
        """Read an incomplete end, when nothing more will follow."""
        before = self._table.num_ready
        if self._unread:
            raise self._unread

        for parser in self._parsers.values():
            if not parser.whole:
                self._table.add(parser.finish())
            for note in parser.notes:
                self._table.note(note)

        self._table.finish()
        return self._count(before)

    def _count(self, before: int) -> int:
        self.resumed, self._table.changed = self._table.changed, False
        return self._table.num_ready - (0 if self.resumed else before)

    def _open(self) -> list[Parser]:
        source = locate(self.log.path, self.log.kind)
        make = PARSERS[self.log.kind]
        for path in source.files:
            size = make.size(path)
            parser = self._parsers.get(path)
            if size > MAX_FILE:
                raise ValueError(f"{path} has {size} bytes, more than {MAX_FILE}: give a part")

            # A file that shrank was begun again; a document is rewritten as a whole.
            if parser is None or (
                size != parser.offset
                if make.whole
                else path.suffix != ".gz" and size < parser.offset
            ):
                self._parsers[path] = make(path, source.part)

        return [self._parsers[path] for path in source.files]

    def _replace(self, parser: Parser) -> int:
        """Take the rows of a document in place of those of its earlier versions."""
        try:
            rows = [*parser.finish()]
        except ValueError as error:  # perhaps it is being written: `finish` will raise
            self._unread = error
            return 0

        self._unread = None
        self.resumed = False
        if len(rows) == self._table.num_added and parser.actions == self.log.actions:
            return 0

        self.log.actions = parser.actions
        self.log.rows.clear()
        self.log.notes.clear()
        self._table = Table(self.log)
        self.resumed = True
        self._table.add(rows)
        self._table.finish()

        return self._table.num_ready


class Table:
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
        self._joins = log.kind != "trainer_state"  # Trainer writes in order
        self._names: set[str] = set()
        self._last = -math.inf
        self._has_steps = False
        self._epoch = math.inf
        self._offset = 0.0  # of a step that begins again in each epoch
        self._lag = -1.0  # steps by which a row may be late; those rows are not ready yet
        self._num_counted = 0
        self._counted_names = set[str]()
        self._bin = 1
        self._open = list[Row]()
        self._num_cells = 0  # rows to average

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.num_added += 1
            if not row.keys() <= self._names:
                row = self._register(row)

            step = row.get("step")
            if step is None or not math.isfinite(step):
                row = self._give_step(row)
                step = row["step"]
            elif not self._has_steps:
                self._has_steps = True
                for earlier in (*self.rows, *self._open):  # they were counted
                    earlier["step"] = self._last = min(step, earlier["step"])
                    self.changed = True

            if self._offset or step < self._last:
                row, step = self._in_epoch(row, step)

            if "epoch" in row:
                self._epoch = row["epoch"]

            if step > self._last:
                self._append(row, step)
            elif step < self._last:
                self._join_late(row, step)
            elif not self._join_last(row):
                self._append(row, step)

        self._set_ready()

    def finish(self) -> None:
        """Nothing will follow: every row is ready."""
        if self._open:
            self.rows.append(average(self._open))
            self._open = []

        if self._bin > 1:
            self.note(f"{self.num_added} rows: each {self._bin} are averaged")

        self._lag = -1.0
        self._set_ready()

    def note(self, note: str) -> None:
        if note not in self.log.notes and len(self.log.notes) < MAX_NOTES:
            self.log.notes.append(note)

    def _register(self, row: Row) -> Row:
        new = row.keys() - self._names
        if len(self._names) + len(new) > MAX_KEYS:
            self.note(f"more than {MAX_KEYS} names: the others are left out")
            return {key: value for key, value in row.items() if key in self._names}

        self._names |= new
        return row

    def _give_step(self, row: Row) -> Row:
        """W&B's count of calls, the last known step, or a count of rows."""
        calls = row.get("_step")
        numbers = {key: x for key, x in row.items() if key not in ("step", "_step")}

        names = numbers.keys() - {"epoch"}
        if self._has_steps:
            step = self._last
        elif calls is not None and math.isfinite(calls):
            step = calls
        else:
            self.note(NO_STEPS)
            if not self._num_counted or not self._counted_names.isdisjoint(names):
                self._num_counted += 1
                self._counted_names = set()

            self._counted_names |= names  # an evaluation belongs to the row before it
            step = float(self._num_counted)

        return {"step": step} | numbers

    def _in_epoch(self, row: Row, step: float) -> tuple[Row, float]:
        """A row with steps that go on where those of the epoch before ended."""
        if step + self._offset < self._last and row.get("epoch", -math.inf) > self._epoch:
            self._offset = self._last + 1 - step
            self.note("steps begin again in each epoch: they are added up")

        step += self._offset
        return (row | {"step": step}) if self._offset else row, step

    def _append(self, row: Row, step: float) -> None:
        self._last = step
        if len(self.rows) >= MAX_ROWS or (self._num_cells > MAX_CELLS and len(self.rows) > 1):
            self.rows[:] = [average(self.rows[k : k + 2]) for k in range(0, len(self.rows), 2)]
            self._num_cells = sum(map(len, self.rows))
            self._bin *= 2
            self.changed = True

        if self._bin > 1:
            self._open.append(row)
            if len(self._open) < self._bin:
                return

            row = average(self._open)
            self._open = []

        self.rows.append(row)
        self._num_cells += len(row)

    def _join_last(self, row: Row) -> bool:
        rows = self._open or self.rows
        can_join = self._joins and rows and rows[-1]["step"] == self._last
        if not can_join or not is_other(row, rows[-1]):
            return False

        self._lag = max(self._lag, 0.0)
        self.changed |= rows is self.rows and self.num_ready >= len(rows)
        rows[-1] |= {key: x for key, x in row.items() if key not in rows[-1]}

        return True

    def _join_late(self, row: Row, step: float) -> None:
        rows = self._open or self.rows
        at = len(rows)
        while at and rows[at - 1]["step"] >= step and len(rows) - at < MAX_LATE:
            at -= 1
            if not is_other(row, rows[at]):
                break
        else:
            if self._joins and (at == 0 or rows[at - 1]["step"] < step) and at < len(rows):
                self._lag = max(self._lag, self._last - step)
                self.changed |= rows is self.rows and at < self.num_ready

                if rows[at]["step"] == step:
                    rows[at] |= {key: x for key, x in row.items() if key not in rows[at]}
                else:
                    rows.insert(at, row)

                return

        for kept in (self._open, self.rows):
            while kept and kept[-1]["step"] >= step:
                kept.pop()

        then = "the rows after it were written again"
        if not self.rows:
            then = "no earlier row is read; give each run its file, or its name in a column run"

        self.note(f"{'resumed' if self.rows else 'begun again'} at step {step:.0f}: {then}")
        self.changed = True
        self._append(row, step)

    def _set_ready(self) -> None:
        self.num_ready = len(self.rows)
        while self._lag >= 0 and self.num_ready:
            if self.rows[self.num_ready - 1]["step"] < self._last - self._lag:
                break
            self.num_ready -= 1


def is_other(row: Row, earlier: Row) -> bool:
    """Whether fewer than half of a row's names, without times, are those of an earlier one."""
    names = [key for key in row if key != "step" and not key.startswith("time")]
    return 2 * sum(key in earlier for key in names) < max(len(names), 1)


def average(rows: list[Row]) -> Row:
    """The mean of each number, at the last step; NaN if more than half of the values are not
    finite."""
    out: Row = {}
    for name in dict.fromkeys(key for row in rows for key in row):
        values = [row[name] for row in rows if name in row]
        mean = sum(values) / len(values)
        if not math.isfinite(mean):
            finite = [value for value in values if math.isfinite(value)]
            mean = sum(finite) / len(finite) if 2 * len(finite) >= len(values) else math.nan

        out[name] = mean

    return out | {"step": rows[-1]["step"]}
