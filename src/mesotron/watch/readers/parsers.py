"""Parsers of logs: JSON lines, JSON documents, CSV, console output, and TensorBoard files."""

import csv
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from mesotron.config import LogKind
from mesotron.watch.events import ACTION_KEY
from mesotron.watch.metrics import STEP_NAMES, plain_name

Row = dict[str, float]

MAX_FILE = 2**30
MAX_DOCUMENT = MAX_FILE // 4  # it is held in memory
MAX_LINE = 2**20
MAX_KEYS = 5000
MAX_DEPTH = 8
# verl and others put a row's numbers under one of these next to its step.
WRAPPERS = {"data", "metrics", "logs"}

PEEK = 2**16  # bytes to recognize a format by
FRAME = 16  # bytes around each record of an event file: its length and two checksums

COLOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Ray puts the worker in front: (TaskRunner pid=15930, ip=10.4.1.33)
WORKER = re.compile(r"^\(\w{1,64} pid=\d{1,12}[^)\n]{0,64}\)\s*")
VERL = re.compile(r"(?:^|\s)step:(\d{1,12})(?=\s|$)")
PAIR = re.compile(r"([\w@./()-]{1,200}):(?:np\.\w{1,16}\()?([-+\w.]{1,40})\)?$")
PRINTED = re.compile(r"'([^'\n]{1,200})':\s*'?([-+\w.]{1,40})'?[,}]")


class Parser(ABC):
    """Reads the rows of one file."""

    whole: ClassVar[bool] = False  # rewritten as a whole, so `finish` may be called many times

    def __init__(self, path: Path) -> None:
        self.path, self.offset = path, 0  # bytes read so far
        self.actions: list[dict[str, Any]] = []  # records of a guard's actions, if there are any
        self.notes: list[str] = []
        self._row: Row = {}  # not complete yet

    @abstractmethod
    def read(self) -> list[Row]:
        """The rows completed since the last call."""

    @abstractmethod
    def finish(self) -> list[Row]:
        """The rows that were waiting for more: nothing will follow."""

    def _take(self) -> list[Row]:
        row, self._row = self._row, {}
        return [row] if len(row) > 1 else []  # a step is no row


class LineParser(Parser):
    """Reads line by line; an incomplete last line waits for its end."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.num_lines = 0

    @abstractmethod
    def parse(self, line: str) -> list[Row]:
        """The rows that one line completes."""

    def last(self) -> list[Row]:
        """The rows that wait for another line."""
        return []

    def read(self) -> list[Row]:
        rows: list[Row] = []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while (line := file.readline(MAX_LINE + 1)).endswith(b"\n"):
                rows += self._parse(line)
        if len(line) > MAX_LINE:
            self.num_lines += 1
            raise self.error(f"is longer than {MAX_LINE} bytes")
        return rows

    def finish(self) -> list[Row]:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            rest = file.readline(MAX_LINE)
        try:
            rows = self._parse(rest) if rest.strip() else []
        except MalformedLine:  # cut off when the writer was killed
            rows = []
        return rows + self.last()

    def _parse(self, line: bytes) -> list[Row]:
        self.offset += len(line)
        self.num_lines += 1
        rows = self.parse(line.decode("utf-8", errors="replace").rstrip("\r\n"))
        return [row for row in rows if row]

    def error(self, problem: str) -> "MalformedLine":
        return MalformedLine(f"{self.path} line {self.num_lines} {problem}")


class MalformedLine(ValueError):
    """A line that its format does not allow; the text names file and line."""


class JsonLines(LineParser):
    """One JSON object per line: our metrics.jsonl, verl's file logger, and most others."""

    def parse(self, line: str) -> list[Row]:
        if not line.strip():
            return []
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self.error(f"is not JSON: {_reason(error)}") from error
        if not isinstance(value, dict):
            raise self.error(f"is not a JSON object but {type(value).__name__}")
        return [to_row(value)]


class Document(Parser):
    """A trainer_state.json, its log_history (rows and a guard's actions), or any list of rows."""

    whole = True

    def read(self) -> list[Row]:
        self.offset = self.path.stat().st_size
        if self.offset > MAX_DOCUMENT:
            raise ValueError(f"{self.path} is larger than {MAX_DOCUMENT} bytes: use its JSONL")
        self._data = self.path.read_bytes()
        return []

    def finish(self) -> list[Row]:
        try:
            value = json.loads(self._data.decode("utf-8", errors="replace"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.path} is not JSON: {_reason(error)}") from error
        rows = value.get("log_history") if isinstance(value, dict) else value
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(
                f"{self.path} has no log_history and is not a list of rows: give a "
                "trainer_state.json or a file with one JSON object per line"
            )
        found = [row[ACTION_KEY] for row in rows if ACTION_KEY in row]
        self.actions = [record for record in found if isinstance(record, dict)]
        return [row for item in rows if ACTION_KEY not in item and (row := to_row(item))]


class Csv(LineParser):
    """A table with a header, which also tells the delimiter. Empty cells and text are skipped."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._header: list[str] | None = None
        self._delimiter = ","
        self._open = ""  # a row whose quoted cell continues in the next line

    def parse(self, line: str) -> list[Row]:
        line = f"{self._open}{line}"
        if len(line) > MAX_LINE:
            raise self.error(f"ends a row longer than {MAX_LINE} bytes")
        # An odd number of quotes leaves a cell open.
        self._open = f"{line}\n" if line.count('"') % 2 else ""
        if self._open or not line.strip() or (self._header is None and line.startswith("#")):
            return []
        if self._header is None:
            line = line.removeprefix("\ufeff")
            self._delimiter = max(",\t;", key=line.count)
        try:
            cells = next(csv.reader([line], delimiter=self._delimiter))
        except csv.Error as error:
            raise self.error(f"is not CSV: {error}") from error
        if self._header is None:
            self._header = cells
            return []
        if len(cells) > len(self._header):
            raise self.error(f"has {len(cells)} cells, the header {len(self._header)}")
        return [to_row(dict(zip(self._header, cells)))]

    def last(self) -> list[Row]:
        if self._open.count("\n") > 1:  # it has swallowed the rest of the table
            raise self.error("ends inside a quoted cell: a quote is missing")
        return []


class Console(LineParser):
    """What trainers print among other lines: verl's `step:3 - actor/entropy:0.4 - ...`, which may
    be wrapped, and Trainer's `{'loss': 0.1}`."""

    def parse(self, line: str) -> list[Row]:
        rows: list[Row] = []
        # A progress bar overwrites its line again and again.
        for part in COLOR.sub("", line).split("\r"):
            part = WORKER.sub("", part)
            if self._row and part.lstrip().startswith("- "):
                self._row |= parse_pairs(part)
                continue
            rows += self._take()  # a verl row is complete when another line begins
            if step := VERL.search(part):
                self._row = {"step": float(step[1])} | parse_pairs(part[step.end() :])
            elif "{'" in part:
                row = to_row(dict(PRINTED.findall(part[part.index("{'") :])))
                rows += [row] if len(row) > 1 else []
        return rows

    def last(self) -> list[Row]:
        return self._take()


class EventFile(Parser):
    """A TensorBoard file; the scalars of one step, which are written one by one, make one row."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        except ImportError as error:
            raise ValueError(
                f"{path} needs the reader of TensorBoard: pip install 'mesotron[tensorboard]'"
            ) from error
        self._loader = RawEventFileLoader(str(path))

    def read(self) -> list[Row]:
        rows: list[Row] = []
        for record in self._loader.Load():  # ends before an incomplete or damaged record
            step, scalars = self._parse(record)
            self.offset += len(record) + FRAME
            if scalars and (self._row.get("step") != step or scalars.keys() & self._row.keys()):
                rows += self._take()
                self._row = {"step": float(step)}
            self._row |= scalars
        return rows

    def finish(self) -> list[Row]:
        if self.offset < self.path.stat().st_size:
            self.notes.append(f"{self.path.name} is damaged or cut off at byte {self.offset}")
        return self._take()

    def _parse(self, record: bytes) -> tuple[int, Row]:
        from google.protobuf.message import DecodeError
        from tensorboard.compat.proto import event_pb2
        from tensorboard.util.tensor_util import make_ndarray

        try:
            event = event_pb2.Event.FromString(record)  # pyright: ignore[reportAttributeAccessIssue]
        except DecodeError as error:
            raise ValueError(f"{self.path}: no event at byte {self.offset}") from error
        scalars: Row = {}
        for value in event.summary.value:
            if value.HasField("simple_value"):
                scalars[value.tag] = value.simple_value
            elif value.HasField("tensor") and value.tensor.dtype in (1, 2):  # float, double
                array = make_ndarray(value.tensor)
                scalars |= {value.tag: float(array.item())} if array.size == 1 else {}
        return event.step, scalars


PARSERS: dict[LogKind, type[Parser]] = {
    "run": JsonLines, "jsonl": JsonLines, "trainer_state": Document, "csv": Csv,
    "tensorboard": EventFile, "console": Console,
}  # fmt: skip
SUFFIXES: dict[str, LogKind] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "csv",
}  # fmt: skip


def recognize(path: Path) -> LogKind:
    """The format of a file, by its name or its first bytes."""
    if "tfevents" in path.name:
        return "tensorboard"
    if path.suffix in SUFFIXES:
        return SUFFIXES[path.suffix]
    with path.open("rb") as file:
        head = file.read(PEEK)
    if b"brain.Event:" in head[:64]:  # the version in the first record
        return "tensorboard"
    text = head.decode("utf-8", errors="replace")
    first = text.lstrip().split("\n", 1)[0].strip()
    if path.suffix == ".json" or first in ("{", "["):
        return "trainer_state"
    if first.startswith('{"'):
        return "jsonl"
    if VERL.search(text) or PRINTED.search(text):
        return "console"
    if any(mark in first for mark in ",\t;"):
        return "csv"
    raise ValueError(f"{path} is not a known kind of log: give --kind, one of {', '.join(PARSERS)}")


def parse_pairs(text: str) -> Row:
    matches = (PAIR.fullmatch(part.strip()) for part in re.split(r"(?:^|\s)-\s", text))
    numbers = ((match[1], to_number(match[2])) for match in matches if match)
    return {name: value for name, value in numbers if value is not None}


def to_row(values: Mapping[str, Any]) -> Row:
    """The numbers of a logged row: nested names are joined by /, the step is named "step"."""
    flat: Row = {}
    _flatten("", values, flat, MAX_DEPTH)
    names = {plain_name(key).lower(): key for key in flat}
    for name in STEP_NAMES:
        if plain_name(name) in names:
            return {"step": flat.pop(names[plain_name(name)])} | flat
    return flat


def _flatten(prefix: str, values: Mapping[str, Any], flat: Row, depth: int) -> None:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            if depth:
                _flatten(prefix if key in WRAPPERS else f"{name}/", value, flat, depth - 1)
        elif (found := to_number(value)) is not None and len(flat) < MAX_KEYS:
            flat[name] = found


def to_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value) if not isinstance(value, str) or len(value) < 64 else None
    except ValueError:
        return None
    except OverflowError:  # an integer beyond the floats
        return float("inf") if value > 0 else float("-inf")  # type: ignore[operator]


def _reason(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
