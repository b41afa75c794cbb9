"""Tables with a header, which also tells the delimiter. Empty cells and text are skipped.

A column may name the run, or the metric whose value another column holds. Columns of a W&B chart
are named `<run> - <metric>`. TensorBoard's export has the metric in the file's name.
"""

import csv
import re
from pathlib import Path

from mesotron.watch.reader import MAX_LINE, LineReader, log_format
from mesotron.watch.rows import METRIC_COLUMNS, Row, run_columns, to_row

DELIMITERS = ",\t;"
MAX_OPEN = 2000  # lines of one row, each of which copies those before it
# A decimal comma, where cells are not separated by commas.
COMMA = re.compile(r"^(\s{0,9}[-+]?\d{1,24}),(\d{1,24}(?:e[-+]?\d{1,3})?\s{0,9}%?)$", re.I)


@log_format(
    "csv",
    about="A column for each metric, or rows of metric and value; exports of W&B and TensorBoard",
)
class Csv(LineReader):
    rank = 90
    suffixes = (".csv", ".tsv")

    def __init__(self, path: Path, part: str | None = None) -> None:
        super().__init__(path, part)
        self.header: list[str] | None = None
        self._delimiter = ","
        self._open = ""  # a row whose quoted cell continues in the next line
        self._run_columns: dict[str, str] = {}  # what names a run -> its column
        self._metric_column = ""
        self._value_column = ""

    @classmethod
    def recognizes(cls, head: bytes) -> bool:
        text = head.decode("utf-8-sig", errors="replace").lstrip()
        lines = text.split("\n", 2)
        if len(lines) < 2 or "{" in lines[0]:
            return False

        header = lines[0].strip()
        delimiter = max(DELIMITERS, key=header.count)
        names = header.split(delimiter)
        values = lines[1].strip().split(delimiter)

        return len(names) == len(values) > 1 and any(map(_is_number, values))

    def parse(self, line: str) -> list[Row]:
        cells = self._complete(line)
        if cells is None:
            return []

        if self.header is None:
            self._set_header(cells)
            return []

        if len(cells) > len(self.header):
            raise self.error(f"has {len(cells)} cells, the header {len(self.header)}")
        if self._delimiter != ",":
            cells = [COMMA.sub(r"\1.\2", cell) for cell in cells]

        values = {name: cell for name, cell in zip(self.header, cells) if name}
        if self._is_of_other_run(values):
            return []

        if self._value_column:
            value = values.pop(self._value_column, "")
            if value:
                name = values.pop(self._metric_column, self._metric_column)
                values[name] = value

        return [to_row(values)]

    def end(self) -> list[Row]:
        if self._open.count("\n") > 1:  # it has swallowed the rest of the table
            raise self.error("ends inside a quoted cell: a quote is missing")
        return []

    def _complete(self, line: str) -> list[str] | None:
        """The cells of the row that a line completes, if it does."""
        text = f"{self._open}{line}"
        if len(text) > MAX_LINE or self._open.count("\n") > MAX_OPEN:
            raise self.error("ends a row that is too long: is a quote missing?")

        # An odd number of quotes leaves a cell open.
        self._open = f"{text}\n" if text.count('"') % 2 else ""
        if self._open or not text.strip():
            return None

        if self.header is None:
            if text.startswith("#"):
                return None
            self._delimiter = max(DELIMITERS, key=text.count)

        try:
            return next(csv.reader([text], delimiter=self._delimiter))
        except csv.Error as error:
            raise self.error(f"is not CSV: {error}") from error

    def _set_header(self, cells: list[str]) -> None:
        self.header = [self._chart_name(cell) for cell in cells]

        columns = {cell.strip().lower(): cell for cell in cells}
        for name in run_columns(columns):
            self._run_columns[name] = columns[name]
        for name in METRIC_COLUMNS:
            if name in columns:
                self._metric_column = columns[name]
                break

        if not self._metric_column and columns.keys() == {"wall time", "step", "value"}:
            self._metric_column = self.path.stem.rpartition("tag-")[2]
        if self._metric_column:
            self._value_column = columns.get("value", "")

    def _chart_name(self, cell: str) -> str:
        """The name of a column; "" for the extremes of a chart, and for other runs."""
        run = cell.rpartition(" - ")[0]
        if run:
            for _ in range(2):  # a run with a single row would not count
                self.runs.add({"run": run}, {})

        is_extreme = cell.endswith(("__MIN", "__MAX"))
        is_other = run != "" and self.part not in (None, run)
        return "" if is_extreme or is_other else cell

    def _is_of_other_run(self, values: dict[str, str]) -> bool:
        """Take the names of its run out of a row."""
        if not self._run_columns:
            return False

        names: dict[str, str] = {}
        for name, column in self._run_columns.items():
            names[name] = values.pop(column, "")

        run = self.runs.add(names, values)
        return self.part not in (None, run)


def _is_number(cell: str) -> bool:
    return cell.strip(' "').replace(".", "").lstrip("-").isdigit()
