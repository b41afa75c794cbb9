"""Parsers of text logs: JSON lines, JSON documents, CSV, console output; and TensorBoard files."""

import csv
import gzip
import io
import json
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from mesotron.watch.events import ACTION_KEY
from mesotron.watch.metrics import STEP_NAMES, is_known, plain_name

Row = dict[str, float]

MAX_FILE = 2**31
MAX_DOCUMENT = 2**27  # it is held in memory
MAX_LINE = 2**20
MAX_OPEN = 2000  # lines of one row, each of which copies those before it
MAX_HEAD = 100  # lines before the first that names its run
MAX_KEYS = 5000
MAX_DEPTH = 8
# verl and others put a row's numbers under one of these next to its step.
WRAPPERS = {"data", "metrics", "logs"}
# Columns of a table that name the run of a row (next to its seed), or the metric of its value.
RUN_COLUMNS = ("run_name", "run_id", "run", "experiment", "exp_name", "exp")
METRIC_COLUMNS = ("metric", "tag", "key", "metric_name")
# Bookkeeping of W&B.
IGNORED = {"_timestamp", "_runtime", "_wandb"}

BLOCK = 2**18  # bytes read at once
FRAME = 16  # bytes around each record of an event file: its length and two checksums

COLOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Ray puts the worker in front: (TaskRunner pid=15930, ip=10.4.1.33)
WORKER = re.compile(r"^\(\w{1,64} pid=\d{1,12}[^)\n]{0,64}\)\s*")
VERL = re.compile(r"(?:^|\s)step:(\d{1,12})(?=\s|$)")
PAIR = re.compile(r"([\w@./()-]{1,200}):(?:np\.\w{1,16}\()?([-+\w.]{1,40})\)?$")
PRINTED = re.compile(
    r"""['"]([^'"\n]{1,200})['"]:\s{0,8}(?:[\w.]{1,20}\()?['"]?([-+\w.]{1,40})['"]?\)?\s{0,8}(?:[,}]|$)"""
)
# "Step 12 | Loss 0.1 | Reward: 0.5", "[step 3/100] loss=0.1", "METRICS STEP 3", "rollout 7: {...}"
COUNT = r"(\d{1,3}(?:,\d{3}){1,3}(?!\d)|\d{1,12}(?!\d|\.\d))"
STEP = re.compile(rf"\b(?:step|iteration|iter|update)[\s:=#]{{1,12}}{COUNT}", re.IGNORECASE)
COUNTED = re.compile(rf"\b(?:batch|episode|round)\s{{1,12}}#?{COUNT}", re.IGNORECASE)
NUMBERED = re.compile(r"\b(?:step|rollout|perf|eval) (\d{1,12}): ?$")
NUMBER = r"([-+]?[\d.]{1,24}(?:e[-+]?\d{1,3})?|nan|[-+]?inf)(%?)"
NAMED = re.compile(
    rf"\W{{0,4}}([a-z][\w @./-]{{0,80}}?)\s{{0,4}}[:=]?\s{{0,4}}{NUMBER}"
    r"\s?[a-z/]{0,20}[\s\]).]{0,4}",
    re.IGNORECASE,
)
JOINED = re.compile(rf"([a-z][\w@./-]{{0,80}})\s?[:=]\s?{NUMBER}(?![\w.])", re.IGNORECASE)
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d)")
PADDING = re.compile(r"(?<=[a-z:=])\s{2,}(?=[-+.\d])", re.IGNORECASE)  # as f"{x:8.3f}" leaves it
# A decimal comma, where cells are not separated by commas.
COMMA = re.compile(r"^(\s{0,9}[-+]?\d{1,24}),(\d{1,24}(?:e[-+]?\d{1,3})?\s{0,9}%?)$", re.I)


class Parser(ABC):
    """Reads the rows of one file, or of one run (`part`) of a file with several."""

    whole: ClassVar[bool] = False  # see `Whole`

    def __init__(self, path: Path, part: str | None = None) -> None:
        self.path = path
        self.part = part
        self.offset = 0  # bytes read so far
        self.actions: list[dict[str, Any]] = []  # records of a guard's actions, if there are any
        self.notes: list[str] = []
        self._row: Row = {}  # not complete yet

    @abstractmethod
    def read(self) -> Iterable[Row]:
        """The rows completed since the last call."""

    def finish(self) -> Iterable[Row]:
        """The rows that were waiting for more: nothing will follow."""
        if self.path.exists() and self.offset < self.path.stat().st_size:
            self.notes.append(f"{self.path.name} is damaged or cut off at byte {self.offset}")
        return self._take()

    @classmethod
    def parts(cls, path: Path) -> list[str]:
        """The names of the runs in a file, if it has several."""
        return []

    @classmethod
    def size(cls, path: Path) -> int:
        """Bytes of the log; it has not changed while this has not."""
        return path.stat().st_size

    def _take(self) -> list[Row]:
        row = self._row
        self._row = {}
        return [row] if len(row) > 1 else []  # a step is no row


class LineParser(Parser):
    """Reads line by line; an incomplete last line waits for its end."""

    def __init__(self, path: Path, part: str | None = None) -> None:
        super().__init__(path, part)
        self.num_lines = 0
        self.runs = Runs()
        self._rest = b""  # the incomplete line at the end

    @abstractmethod
    def parse(self, line: str) -> list[Row]:
        """The rows that one line completes."""

    @classmethod
    def parts(cls, path: Path) -> list[str]:
        log = cls(path)
        with suppress(ValueError, OSError):  # named when the log is read
            for _ in log.read():
                if not log.runs and log.num_lines > MAX_HEAD:
                    break

        return log.runs.names()

    def read(self) -> Iterator[Row]:
        self._rest = b""
        with open_bytes(self.path) as file:
            file.seek(self.offset)
            while data := read_bytes(file, BLOCK, self.path):
                block, newline, self._rest = (self._rest + data).rpartition(b"\n")
                if newline:
                    yield from self._parse_block(block)

                if len(self._rest) > MAX_LINE:
                    self._parse(self._rest)  # raises

    def _parse_block(self, block: bytes) -> Iterator[Row]:
        for line in block.split(b"\n"):
            yield from self._parse(line)

    def finish(self) -> list[Row]:
        rest = self._rest
        self._rest = b""

        try:
            rows = self._parse(rest) if rest.strip() else []
            self.offset -= bool(rows)  # there was no newline
        except MalformedLine:  # cut off when the writer was killed
            rows = []

        return [*rows, *self._take()]

    def _parse(self, line: bytes) -> list[Row]:
        self.offset += len(line) + 1
        self.num_lines += 1
        if len(line) > MAX_LINE:
            raise self.error(f"is longer than {MAX_LINE} bytes")
        if self.offset > MAX_FILE:  # a compressed file may be larger inside
            raise self.error(f"is beyond {MAX_FILE} bytes: give a part of the log")

        text = line.decode("utf-8", errors="replace").removesuffix("\r")
        rows = self.parse(text.removeprefix("\ufeff") if self.num_lines == 1 else text)

        return [row for row in rows if row]

    def error(self, problem: str) -> "MalformedLine":
        return MalformedLine(f"{self.path} line {self.num_lines} {problem}")


class MalformedLine(ValueError):
    """A line that its format does not allow; the text names file and line."""


class JsonLines(LineParser):
    """One JSON object per line: our metrics.jsonl, verl's file logger, and most others."""

    def _parse_block(self, block: bytes) -> Iterator[Row]:
        # Parsing many lines at once takes two thirds of the time.
        lines = block.count(b"\n") + 1
        try:
            values = json.loads(b"[%b]" % block.replace(b"\n", b",")) if self.num_lines else []
        except (ValueError, RecursionError):
            values = []

        if len(values) != lines or any(type(value) is not dict for value in values):
            yield from super()._parse_block(block)  # names the line that is wrong
            return

        self.offset += len(block) + 1
        self.num_lines += lines

        for value in values:
            if row := self._to_row(value):
                yield row

    def _to_row(self, value: dict[str, Any]) -> Row:
        texts = {key for key in RUN_COLUMNS if type(value.get(key)) is str}
        names = {name: value[name] for name in run_columns(texts | value.keys() & {"seed"})}
        if names and self.part not in (None, self.runs.add(names, value)):
            return {}

        return to_row(value)

    def parse(self, line: str) -> list[Row]:
        if not line or line.isspace():
            return []

        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self.error(f"is not JSON: {_reason(error)}") from error

        if not isinstance(value, dict):
            raise self.error(f"is not a JSON object but {type(value).__name__}")

        return [self._to_row(value)]


class Whole(Parser):
    """A log that is read again as a whole, by `finish`, when it has changed."""

    whole = True

    def read(self) -> list[Row]:
        self.offset = self.size(self.path)
        return []


class Document(Whole):
    """A trainer_state.json, its log_history (rows and a guard's actions), a list of rows, a
    dictionary of columns, or a notebook with the output of a trainer."""

    def finish(self) -> list[Row]:
        with open_bytes(self.path) as file:
            data = read_bytes(file, MAX_DOCUMENT + 1, self.path)

        if len(data) > MAX_DOCUMENT:
            raise ValueError(f"{self.path} is larger than {MAX_DOCUMENT} bytes: use its JSONL")

        try:
            value = json.loads(data.decode("utf-8-sig", errors="replace"))
            if isinstance(value, dict) and isinstance(value.get("cells"), list):
                return [row for row in _notebook_rows(value["cells"]) if row]
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{self.path} is not JSON of a log: {_reason(error)}") from error

        rows = _find_rows(value)
        if rows is None:
            raise ValueError(
                f"{self.path} has no log_history, rows or columns: give a trainer_state.json or a "
                "file with one JSON object per line"
            )

        found = [row[ACTION_KEY] for row in rows if ACTION_KEY in row]
        self.actions = [record for record in found if isinstance(record, dict)]

        return [row for item in rows if ACTION_KEY not in item and (row := to_row(item))]


def _find_rows(value: Any, depth: int = MAX_DEPTH) -> list[dict[str, Any]] | None:
    """The longest list of objects in a document, columns or objects by their step as rows."""
    if not isinstance(value, dict):
        is_rows = isinstance(value, list) and all(isinstance(row, dict) for row in value)
        return value if is_rows else None

    if "log_history" in value:
        return _find_rows(value["log_history"], 0)
    if value and all(key.isdecimal() and isinstance(row, dict) for key, row in value.items()):
        return [{"step": key} | row for key, row in value.items()]

    lists = {key: x for key, x in value.items() if isinstance(x, list) and len(x) > 1}
    columns = {
        key: x
        for key, x in lists.items()
        if all(item is None or isinstance(item, int | float) for item in x)
    }

    length = max(map(len, columns.values()), default=0)
    rows = [
        {key: column[k] for key, column in columns.items() if k < len(column)}
        for k in range(length)
    ]

    inside = (_find_rows(item, depth - 1) for item in value.values()) if depth else ()
    found = [rows for rows in (rows or None, *inside) if rows is not None]

    return max(found, key=len, default=None)


def _notebook_rows(cells: list[Any]) -> Iterator[Row]:
    """Rows of the tables and dictionaries in the outputs of a notebook."""
    console = Console(Path())
    for output in (output for cell in cells for output in cell.get("outputs", ())):
        html = "".join(output.get("data", {}).get("text/html", ""))  # a text or its lines
        header: list[str] = []
        for line in html.split("<tr")[1:]:
            texts = re.findall(r"<t[hd][^>]{0,200}>([^<]{0,200})</t[hd]>", line)
            if "<th" in line and "<td" not in line:
                header = [text.strip() for text in texts]
            elif header and len(texts) == len(header):
                yield to_row(dict(zip(header, texts)))

        for line in "".join(output.get("text", "")).split("\n"):
            yield from console.parse(line[:MAX_LINE])

    yield from console._take()


class Csv(LineParser):
    """A table with a header, which also tells the delimiter. Empty cells and text are skipped.

    A column may name the run, or the metric whose value another column holds; columns of a W&B
    chart are named `<run> - <metric>`, and TensorBoard's export has the metric in the file's name.
    """

    def __init__(self, path: Path, part: str | None = None) -> None:
        super().__init__(path, part)
        self.header: list[str] | None = None
        self._delimiter = ","
        self._open = ""  # a row whose quoted cell continues in the next line
        self._runs: dict[str, str] = {}  # columns that name the run
        self._metric = self._value = ""  # columns with a name, its value

    def parse(self, line: str) -> list[Row]:
        line = f"{self._open}{line}"
        if len(line) > MAX_LINE or self._open.count("\n") > MAX_OPEN:
            raise self.error("ends a row that is too long: is a quote missing?")

        # An odd number of quotes leaves a cell open.
        self._open = f"{line}\n" if line.count('"') % 2 else ""
        if self._open or not line.strip() or (self.header is None and line.startswith("#")):
            return []

        if self.header is None:
            self._delimiter = max(",\t;", key=line.count)

        try:
            cells = next(csv.reader([line], delimiter=self._delimiter))
        except csv.Error as error:
            raise self.error(f"is not CSV: {error}") from error

        if self.header is None:
            self._set_header(cells)
            return []

        if len(cells) > len(self.header):
            raise self.error(f"has {len(cells)} cells, the header {len(self.header)}")

        if self._delimiter != ",":
            cells = [COMMA.sub(r"\1.\2", cell) for cell in cells]

        values = {name: cell for name, cell in zip(self.header, cells) if name}
        names = {name: values.pop(column, "") for name, column in self._runs.items()}
        if names and self.part not in (None, self.runs.add(names, values)):
            return []

        if self._value and (value := values.pop(self._value, "")):
            values[values.pop(self._metric, self._metric)] = value

        return [to_row(values)]

    def _set_header(self, cells: list[str]) -> None:
        charts = [cell.rpartition(" - ")[0] for cell in cells]
        for run in filter(None, charts * 2):
            self.runs.add({"run": run}, {})

        self.header = [
            ""
            if cell.endswith(("__MIN", "__MAX")) or (run and self.part not in (None, run))
            else cell
            for cell, run in zip(cells, charts)
        ]

        columns = {cell.strip().lower(): cell for cell in cells}
        self._runs = {name: columns[name] for name in run_columns(columns)}
        self._metric = next((columns[name] for name in METRIC_COLUMNS if name in columns), "")

        if not self._metric and columns.keys() == {"wall time", "step", "value"}:
            self._metric = self.path.stem.rpartition("tag-")[2]

        self._value = columns.get("value", "") if self._metric else ""

    def _take(self) -> list[Row]:
        if self._open.count("\n") > 1:  # it has swallowed the rest of the table
            raise self.error("ends inside a quoted cell: a quote is missing")
        return []


class Console(LineParser):
    """What trainers print among other lines: verl's `step:3 - actor/entropy:0.4 - ...`, which may
    be wrapped, dictionaries on one line or several, with a numbered step before them or not, and
    `Step 3 | Loss 0.1 | Reward: 0.5`."""

    @classmethod
    def parts(cls, path: Path) -> list[str]:
        return []

    def __init__(self, path: Path, part: str | None = None) -> None:
        super().__init__(path, part)
        self._block = ""  # how the open row goes on: "verl", or "pairs" on lines under its step
        self._names: set[str] = set()

    def parse(self, line: str) -> list[Row]:
        # A progress bar overwrites its line again and again.
        parts = COLOR.sub("", line).split("\r")
        return [row for part in parts for row in self._parse_part(WORKER.sub("", part))]

    def _parse_part(self, part: str) -> list[Row]:
        text = part.strip(" \t{}[]=-")
        if self._row and self._block == "verl" and part.lstrip().startswith("- "):
            self._row |= parse_pairs(part)
            return []

        if self._row and self._block == "pairs":
            pairs = _pairs_of_block(part) if text else {}
            self._row |= {key: value for key, value in pairs.items() if key != "step"}
            if pairs or not text:
                return []

        rows = self._take()  # a row of several lines is complete when another line begins
        quote = next((k for k in (part.find("{'"), part.find('{"')) if k >= 0), -1)
        if verl := VERL.search(part):
            self._block = "verl"
            self._row = {"step": float(verl[1])} | parse_pairs(part[verl.end() :])
        elif quote >= 0 and (printed := PRINTED.findall(part[quote:])):
            row = to_row(dict(printed))
            if (number := NUMBERED.search(part[max(quote - 40, 0) : quote])) and "step" not in row:
                row = {"step": float(number[1])} | row
            rows += [row] if len(row) > 1 else []
        elif step := STEP.search(part) or COUNTED.search(part):
            row = {"step": float(step[1].replace(",", ""))}
            row = parse_named(part[: step.start()]) | parse_named(part[step.end() :]) | row
            if self._is_known(row):
                rows.append(row)
            else:  # "Step 3:", with the numbers on the next lines
                self._row = {"step": row["step"]}
                self._block = "pairs"

        return rows

    def _take(self) -> list[Row]:
        return [row for row in super()._take() if self._is_known(row)]

    def _is_known(self, row: Row) -> bool:
        """Whether a row has a metric; a text like "step 5: saved 3 files" has none."""
        if len(self._names) < MAX_KEYS:
            self._names |= row.keys()
        return any(is_known(name) for name in row if name in self._names)


def _pairs_of_block(line: str) -> Row:
    """The numbers of a line in a block under a step: `'name': '0.5',` or `name: 0.5`."""
    pairs = dict(PRINTED.findall(line)) if line.lstrip(" {").startswith(("'", '"')) else {}
    if not pairs and (named := NAMED.fullmatch(line)) and re.search("[:=]", line):
        return _numbers([named.groups()])
    return to_row(pairs)


def parse_named(text: str) -> Row:
    """Numbers with names, as in "Loss 0.1 | Mismatch KL: 0.02 | Truncation 1.0%"."""
    row: Row = {}
    text = THOUSANDS.sub(lambda match: match[0].replace(",", ""), PADDING.sub(" ", text[:4096]))
    for piece in re.split(r"[|,;]|\s-\s|\s{2,}", text):
        whole = NAMED.fullmatch(piece)
        row |= _numbers([whole.groups()] if whole else JOINED.findall(piece))

    return row


def _numbers(found: Iterable[tuple[str | Any, ...]]) -> Row:
    values = ((name.strip(), to_number(number + percent)) for name, number, percent in found)
    return {name: value for name, value in values if value is not None}


class EventFile(Parser):
    """A TensorBoard file; the scalars of one step, which are written one by one, make one row."""

    def __init__(self, path: Path, part: str | None = None) -> None:
        super().__init__(path, part)
        try:
            from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        except ImportError as error:
            raise ValueError(
                f"{path} needs the reader of TensorBoard: pip install 'mesotron[tensorboard]'"
            ) from error

        self._loader = RawEventFileLoader(str(path))

    def read(self) -> Iterator[Row]:
        for record in self._loader.Load():  # ends before an incomplete or damaged record
            step, scalars = self._parse(record)
            self.offset += len(record) + FRAME

            if scalars and (self._row.get("step") != step or scalars.keys() & self._row.keys()):
                yield from self._take()
                self._row = {"step": float(step)}

            self._row |= scalars

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
            # A single value would be repeated up to any shape that the file names.
            is_one = {dim.size for dim in value.tensor.tensor_shape.dim} <= {1}
            if value.HasField("simple_value"):
                scalars[value.tag] = value.simple_value
            elif is_one and value.HasField("tensor") and value.tensor.dtype in (1, 2):  # floats
                scalars[value.tag] = float(make_ndarray(value.tensor).item())

        return event.step, scalars


class Runs(dict[str, tuple[int, float | None]]):
    """The runs that columns of a table name: how many rows each has, and a seed's first step."""

    def add(self, names: Mapping[str, Any], values: Mapping[str, Any]) -> str:
        run = "/".join(str(name) for name in names.values() if name not in (None, ""))
        if run in self:
            self[run] = self[run][0] + 1, self[run][1]
        elif len(self) < MAX_KEYS:
            self[run] = 1, to_row(values).get("step") if names.keys() == {"seed"} else None

        return run

    def names(self) -> list[str]:
        names = [run for run, (count, _) in self.items() if run and count > 1]  # one is a config
        # Seeds that begin at different steps are of one run, which drew new ones or was resumed.
        return names if len({self[name][1] for name in names}) < len(names) else []


def run_columns(names: Container[str]) -> list[str]:
    return [name for name in RUN_COLUMNS if name in names][:1] + ["seed"] * ("seed" in names)


def open_bytes(path: Path) -> io.BufferedIOBase:
    """A text file as UTF-8, decompressed if it is gzipped."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")

    with path.open("rb") as file:
        mark = file.read(2)

    if mark in (b"\xff\xfe", b"\xfe\xff"):  # what PowerShell writes
        if path.stat().st_size > MAX_DOCUMENT:
            raise ValueError(f"{path} is UTF-16 and larger than {MAX_DOCUMENT} bytes: convert it")
        return io.BytesIO(path.read_bytes().decode("utf-16", errors="replace").encode())

    return path.open("rb")


def read_bytes(file: io.BufferedIOBase, count: int, path: Path) -> bytes:
    data = bytearray()
    try:
        with suppress(EOFError):  # a compressed file that is cut off
            while len(data) < count and (more := file.read1(count - len(data))):
                data += more
        return bytes(data)
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a gzip file, or is damaged") from error


def parse_pairs(text: str) -> Row:
    matches = (PAIR.fullmatch(part.strip()) for part in re.split(r"(?:^|\s)-\s", text))
    return _numbers((match[1], match[2], "") for match in matches if match)


def to_row(values: Mapping[str, Any]) -> Row:
    """The numbers of a logged row: nested names are joined by /, the step is named "step", or
    "_step" where it is W&B's count of calls."""
    flat: Row = {}
    best = _flatten(
        "",
        values,
        flat,
        MAX_DEPTH,
        ("", len(STEP_NAMES)),
    )
    if best[0]:
        step = flat.pop(best[0])
        flat.pop("_step", None)
        return {"_step" if best[1] == CALLS else "step": step} | flat

    return flat


def _flatten(
    prefix: str, values: Mapping[str, Any], flat: Row, depth: int, best: tuple[str, int]
) -> tuple[str, int]:
    """Put the numbers into `flat`; returns the name of the step and its rank."""
    for key, value in values.items():
        kind = type(value)
        if kind is dict:
            if depth:
                inner = prefix if key in WRAPPERS else f"{prefix}{key}/"
                best = _flatten(
                    inner,
                    value,
                    flat,
                    depth - 1,
                    best,
                )

            continue

        name, rank = _known_key(f"{prefix}{key}" if prefix else key)
        if rank is not None and kind is str:  # ms-swift logs "5/100"
            value = value.partition("/")[0]

        number = value if kind is float else to_number(value)
        if number is not None and name and len(flat) < MAX_KEYS:
            flat[name] = number
            if rank is not None and rank < best[1]:
                best = name, rank

    return best


@lru_cache(maxsize=65536)
def _known_key(key: str) -> tuple[str, int | None]:
    """One string for all equal keys ("" for those to ignore), and the rank as a step's name."""
    plain = key.lower() if len(key) < 64 else ""
    return "" if plain in IGNORED else key, _STEP_RANKS.get(plain_name(plain))


CALLS = len(STEP_NAMES) - 1  # rank of W&B's count of calls
_STEP_RANKS = {plain_name(name): rank for rank, name in reversed([*enumerate(STEP_NAMES)])}


def to_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None

    try:
        if isinstance(value, str) and len(value) < 64 and value.endswith("%"):
            return float(value[:-1]) / 100
        return float(value) if not isinstance(value, str) or len(value) < 64 else None
    except ValueError:
        return None
    except OverflowError:  # an integer beyond the floats
        return float("inf") if value > 0 else float("-inf")  # type: ignore[operator]


def _reason(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
