"""Readers of experiment trackers' own files: W&B, trackio, MLflow and Parquet exports.

All are read as data, with neither the tracker's package nor anything that the files might execute.
"""

import json
import math
import sqlite3
import struct
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import groupby, islice
from pathlib import Path
from typing import IO, Any

from mesotron.watch.readers import parsers
from mesotron.watch.readers.parsers import Parser, Row, Whole, to_number, to_row

BLOCK = 2**15  # bytes of a block in a .wandb file
MAX_RECORD = 2**24
MAX_CELLS = 50_000_000  # of a Parquet file
MAX_FILES = 5000  # metrics of one MLflow run
MAX_SQL = 100_000  # thousands of steps of SQLite's machine, some minutes


class Wandb(Parser):
    """A `run-<id>.wandb` file: LevelDB's log format, with protobuf messages as records.

    W&B's own reader opens the file for writing and fails on one that is still being written.
    """

    def __init__(self, path: Path, part: str | None = None) -> None:
        super().__init__(path, part)
        self.offset = 7  # after the header

    def read(self) -> Iterator[Row]:
        with self.path.open("rb") as file:
            if file.read(4) != b":W&B":
                raise ValueError(f"{self.path} is not a W&B run: its first bytes are not ':W&B'")

            for record in self._records(file):
                try:
                    yield from _history_rows(record)
                except (ValueError, IndexError):
                    self.notes = [f"{self.path.name} has damaged records before {self.offset}"]

    def _records(self, file: IO[bytes]) -> Iterator[bytes]:
        """Complete records from the offset on: one full chunk, or a first to a last one."""
        pieces = bytearray()
        position = self.offset
        while True:
            left = BLOCK - position % BLOCK
            if left < 7:  # padding
                position += left
                continue

            file.seek(position)
            head = file.read(7)
            if len(head) < 7:
                return

            _, length, kind = struct.unpack("<IHB", head)
            data = file.read(length)
            if len(data) < length or kind not in (1, 2, 3, 4) or length > left - 7:
                return

            position += 7 + length
            if kind in (1, 2):
                pieces.clear()

            pieces += data
            if len(pieces) > MAX_RECORD:
                raise ValueError(f"{self.path} has a record longer than {MAX_RECORD} bytes")

            if kind in (1, 4):
                self.offset = position
                yield bytes(pieces)


def _history_rows(record: bytes) -> Iterator[Row]:
    """The row of a Record with a history: items of key (or nested keys) and JSON value."""
    for number, history in _fields(record):
        if number != 2 or not isinstance(history, bytes):
            continue

        values: dict[str, Any] = {}
        for _, item in (field for field in _fields(history) if field[0] == 1):
            fields = [*_fields(item)] if isinstance(item, bytes) else []
            names = [part for number, part in fields if number in (1, 2)]

            key = "/".join(str(name, "utf-8", "replace") for name in names if type(name) is bytes)
            if key:
                values[key] = _json(next((part for number, part in fields if number == 16), b""))

        if row := to_row(values):
            yield row


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Number and value of each field of a protobuf message; ValueError if it is none."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue

        size, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}.get(kind, 0), at)
        if not size and kind != 2:
            raise ValueError(f"unknown wire type {kind}")

        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = data[at]
        value = value | (byte & 127) << shift
        at = at + 1
        shift = shift + 7
        if byte < 128:
            return value, at

    raise ValueError("a number longer than 64 bits")


def _json(text: Any) -> Any:
    with suppress(RecursionError, TypeError, ValueError):
        return json.loads(text) if len(text) < parsers.MAX_LINE else None


class Database(Whole):
    """An SQLite database of trackio or MLflow, one of its runs."""

    @classmethod
    def size(cls, path: Path) -> int:
        log = path.with_name(f"{path.name}-wal")  # what is not in the file itself yet
        return path.stat().st_size + (log.stat().st_size if log.is_file() else 0)

    @classmethod
    def parts(cls, path: Path) -> list[str]:
        with _connect(path) as (database, columns):
            run = "run_name" if "run_name" in columns else "run_uuid"
            query = f"SELECT DISTINCT {run} FROM metrics ORDER BY {run} LIMIT 1000"
            return [str(name) for (name,) in database.execute(query)]

    def finish(self) -> Iterator[Row]:
        with _connect(self.path) as (database, columns):
            if "run_name" in columns:
                query = "SELECT step, metrics FROM metrics WHERE run_name IS ? ORDER BY id"
                for step, text in database.execute(query, (self.part,)):
                    if isinstance(values := _json(text), dict):
                        yield to_row({**values, "_step": step})  # it counts calls, as W&B's does

                return

            query = (
                "SELECT step, key, CASE WHEN is_nan THEN NULL ELSE value END FROM metrics "
                "WHERE run_uuid IS ? ORDER BY step, timestamp"
            )

            cells = database.execute(query, (self.part,))
            for step, group in groupby(cells, key=lambda cell: cell[0]):
                values = {str(key): math.nan if x is None else x for _, key, x in group}
                yield to_row({**values, "step": step})


@contextmanager
def _connect(path: Path) -> Iterator[tuple[sqlite3.Connection, set[str]]]:
    """A database opened for reading, and the columns of its table of metrics."""
    uri = path.resolve().as_uri()
    try:
        with closing(sqlite3.connect(f"{uri}?mode=ro", uri=True)) as database:
            database.execute("PRAGMA trusted_schema = OFF")
            ticks = iter(range(MAX_SQL))
            database.set_progress_handler(lambda: next(ticks, None) is None, 1000)
            query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'metrics'"
            is_table = database.execute(query).fetchone()  # a view would compute
            info = database.execute("PRAGMA table_info(metrics)") if is_table else ()
            columns = {str(name) for _, name, *_ in info}

            if not (
                {"run_name", "step", "metrics", "id"} <= columns
                or {"run_uuid", "key", "value", "step", "is_nan"} <= columns
            ):
                raise ValueError(f"{path} has no table of metrics as trackio or MLflow write it")

            yield database, columns
    except sqlite3.Error as error:
        raise ValueError(f"{path} cannot be read as a database: {error}") from error


class Parquet(Whole):
    """A Parquet file: a column per metric, as W&B and trackio export, or rows of metric, value."""

    @classmethod
    def parts(cls, path: Path) -> list[str]:
        runs = parsers.Runs()
        with _open_parquet(path) as (table, names, columns):
            for rows in table.iter_batches(batch_size=1024, columns=columns) if names else ():
                for values in rows.to_pylist():
                    runs.add({name: values.pop(name) for name in names}, values)

        return sorted(runs.names())[:1000]

    def finish(self) -> Iterator[Row]:
        runs = parsers.Runs()
        with _open_parquet(self.path) as (table, names, columns):
            for rows in table.iter_batches(batch_size=1024, columns=columns):
                for values in rows.to_pylist():
                    run = runs.add({name: values.pop(name) for name in names}, values)
                    if self.part in (None, run):
                        name = next((values[x] for x in parsers.METRIC_COLUMNS if x in values), "")
                        if name and "value" in values:
                            values[str(name)] = values.pop("value")
                        yield to_row(values)


@contextmanager
def _open_parquet(path: Path) -> Iterator[tuple[Any, list[str], list[str]]]:
    """The table, the columns that name the run, and those with numbers and texts."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ValueError(f"{path} needs the reader of Parquet: pip install pyarrow") from error

    try:
        table = ParquetFile(path)
        if table.metadata.num_rows * table.metadata.num_columns > MAX_CELLS:
            raise ValueError(f"{path} has more than {MAX_CELLS} cells: export fewer metrics")

        types = {column.name: str(column.type) for column in table.schema_arrow}
        texts = {"float", "double", "halffloat", "string", "large_string"}
        columns = [name for name, x in types.items() if x in texts or "int" in x]
        yield table, parsers.run_columns(columns), columns
    except (ArrowException, OSError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"{path} is not Parquet, or is damaged: {why}") from error


class Mlflow(Whole):
    """A run folder of MLflow's file store: `metrics/<name>` has lines of time, value and step."""

    @classmethod
    def size(cls, path: Path) -> int:
        return sum(file.stat().st_size for file in cls._files(path))

    @staticmethod
    def _files(path: Path) -> Iterable[Path]:
        return sorted(
            file for file in islice((path / "metrics").rglob("*"), MAX_FILES) if file.is_file()
        )

    def finish(self) -> list[Row]:
        if self.offset > parsers.MAX_DOCUMENT:
            raise ValueError(f"{self.path} has more than {parsers.MAX_DOCUMENT} bytes of metrics")

        rows: dict[float, Row] = {}
        for file in self._files(self.path):
            name = file.relative_to(self.path / "metrics").as_posix()
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                cells = [to_number(cell) for cell in line.split()[:3]]
                if len(cells) == 3 and cells[1] is not None and cells[2] is not None:
                    rows.setdefault(cells[2], {"step": cells[2]})[name] = cells[1]

        return [rows[step] for step in sorted(rows)]
