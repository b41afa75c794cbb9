"""SQLite databases of trackio and MLflow, one run of each."""

import math
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import groupby
from pathlib import Path

from mesotron.watch.reader import WholeReader, log_format
from mesotron.watch.rows import Row, parse_json, to_row

MAX_SQL = 100_000  # thousands of steps of SQLite's machine, some minutes
STEPS = 1000
TRACKIO = {"run_name", "step", "metrics", "id"}  # columns of its table of metrics
MLFLOW = {"run_uuid", "key", "value", "step", "is_nan"}


@log_format("database", about="trackio's `<project>.db`, or `mlflow.db`")
class Database(WholeReader):
    rank = 70
    suffixes = (".db", ".sqlite", ".sqlite3")

    @classmethod
    def recognizes(cls, head: bytes) -> bool:
        return head.startswith(b"SQLite format 3\0")

    @classmethod
    def size(cls, path: Path) -> int:
        size = path.stat().st_size
        log = path.with_name(f"{path.name}-wal")  # what is not in the file itself yet
        if log.is_file():
            size += log.stat().st_size

        return size

    @classmethod
    def parts(cls, path: Path) -> list[str]:
        with _connect(path) as (database, columns):
            run = "run_name" if "run_name" in columns else "run_uuid"
            query = f"SELECT DISTINCT {run} FROM metrics ORDER BY {run} LIMIT 1000"
            return [str(name) for (name,) in database.execute(query)]

    def finish(self) -> Iterator[Row]:
        with _connect(self.path) as (database, columns):
            if "run_name" in columns:
                yield from self._trackio_rows(database)
            else:
                yield from self._mlflow_rows(database)

    def _trackio_rows(self, database: sqlite3.Connection) -> Iterator[Row]:
        query = "SELECT step, metrics FROM metrics WHERE run_name IS ? ORDER BY id"
        for step, text in database.execute(query, (self.part,)):
            values = parse_json(text)
            if isinstance(values, dict):
                yield to_row({**values, "_step": step})  # it counts calls, as W&B's does

    def _mlflow_rows(self, database: sqlite3.Connection) -> Iterator[Row]:
        query = (
            "SELECT step, key, CASE WHEN is_nan THEN NULL ELSE value END FROM metrics "
            "WHERE run_uuid IS ? ORDER BY step, timestamp"
        )
        cells = database.execute(query, (self.part,))
        for step, group in groupby(cells, key=lambda cell: cell[0]):
            values: dict[str, float] = {}
            for _, key, value in group:
                values[str(key)] = math.nan if value is None else value

            yield to_row({**values, "step": step})


@contextmanager
def _connect(path: Path) -> Iterator[tuple[sqlite3.Connection, set[str]]]:
    """A database opened for reading, and the columns of its table of metrics."""
    uri = path.resolve().as_uri()
    try:
        with closing(sqlite3.connect(f"{uri}?mode=ro", uri=True)) as database:
            _limit(database)
            columns = _columns_of_metrics(database)
            if not (columns >= TRACKIO or columns >= MLFLOW):
                raise ValueError(f"{path} has no table of metrics as trackio or MLflow write it")

            yield database, columns
    except sqlite3.Error as error:
        raise ValueError(f"{path} cannot be read as a database: {error}") from error


def _limit(database: sqlite3.Connection) -> None:
    """Let a query neither run for ever nor call functions that the file defines."""
    ticks = iter(range(MAX_SQL))
    database.execute("PRAGMA trusted_schema = OFF")
    database.set_progress_handler(lambda: next(ticks, None) is None, STEPS)


def _columns_of_metrics(database: sqlite3.Connection) -> set[str]:
    query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'metrics'"
    if not database.execute(query).fetchone():  # a view would compute
        return set()

    info = database.execute("PRAGMA table_info(metrics)")
    return {str(name) for _, name, *_ in info}
