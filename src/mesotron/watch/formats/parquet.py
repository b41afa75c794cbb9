"""Parquet files: a column per metric, as W&B and trackio export, or rows of metric and value."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesotron.watch.reader import WholeReader, log_format
from mesotron.watch.rows import METRIC_COLUMNS, Row, RunNames, run_columns, to_row

MAX_CELLS = 50_000_000
MAX_RUNS = 1000
ROWS = 1024  # read at once
TYPES = {"float", "double", "halffloat", "string", "large_string"}


@log_format(
    "parquet",
    about="Exports of W&B and trackio, or the columns of a CSV (needs pyarrow, which `datasets` "
    "installs)",
)
class Parquet(WholeReader):
    rank = 80
    suffixes = (".parquet",)

    @classmethod
    def recognizes(cls, head: bytes) -> bool:
        return head.startswith(b"PAR1")

    @classmethod
    def parts(cls, path: Path) -> list[str]:
        runs = RunNames()
        with _open(path) as file:
            if file.run_columns:
                for _ in file.rows(runs):
                    pass

        return sorted(runs.several())[:MAX_RUNS]

    def finish(self) -> Iterator[Row]:
        with _open(self.path) as file:
            for run, values in file.rows(RunNames()):
                if self.part not in (None, run):
                    continue

                _name_value(values)
                yield to_row(values)


@dataclass(frozen=True)
class ParquetTable:
    table: Any  # pyarrow's file
    columns: list[str]  # with numbers and texts
    run_columns: list[str]  # those that name the run

    def rows(self, runs: RunNames) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each row with the name of its run, which `runs` counts."""
        for batch in self.table.iter_batches(batch_size=ROWS, columns=self.columns):
            for values in batch.to_pylist():
                names = {name: values.pop(name) for name in self.run_columns}
                yield runs.add(names, values), values


def _name_value(values: dict[str, Any]) -> None:
    """Put a value under the name of its metric."""
    if "value" not in values:
        return

    for column in METRIC_COLUMNS:
        if column in values:
            if values[column]:
                values[str(values[column])] = values.pop("value")
            return


@contextmanager
def _open(path: Path) -> Iterator[ParquetTable]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ValueError(f"{path} needs the reader of Parquet: pip install pyarrow") from error

    try:
        table = ParquetFile(path)
        if table.metadata.num_rows * table.metadata.num_columns > MAX_CELLS:
            raise ValueError(f"{path} has more than {MAX_CELLS} cells: export fewer metrics")

        columns = []
        for column in table.schema_arrow:
            kind = str(column.type)
            if kind in TYPES or "int" in kind:
                columns.append(column.name)

        yield ParquetTable(table, columns, run_columns(columns))
    except (ArrowException, OSError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"{path} is not Parquet, or is damaged: {why}") from error
