"""JSON and CSV: one object a line, one table, or one whole document such as trainer_state.json."""

import csv
import json
from pathlib import Path
from typing import Any

from mesotron.watch.events import ACTION_KEY
from mesotron.watch.readers.parser import MAX_FILE, MAX_LINE, LineParser, Parser, Row, tidy

# A document is held in memory as a whole.
MAX_DOCUMENT = MAX_FILE // 4


class JsonLines(LineParser):
    """One JSON object a line: our metrics.jsonl, verl's file logger, and most others."""

    def line(self, text: str) -> list[Row]:
        """Read one object."""
        if not text.strip():
            return []
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self.error(f"is not JSON: {reason(error)}") from error
        if not isinstance(value, dict):
            raise self.error(f"is not a JSON object but {type(value).__name__}")
        row = tidy(value)
        return [row] if row else []


class Document(Parser):
    """One JSON document: a trainer_state.json, its log_history, or any list of rows.

    A guard that went back has left its acts among the rows of a log_history.
    """

    whole = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Row]:
        """Wait for the end: a document is read as a whole."""
        self._data += data
        if len(self._data) > MAX_DOCUMENT:
            raise ValueError(f"{self.path} is longer than {MAX_DOCUMENT} bytes: give its JSONL")
        return []

    def finish(self) -> list[Row]:
        """Read the whole document."""
        try:
            value = json.loads(bytes(self._data).decode("utf-8", errors="replace"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.path} is not JSON: {reason(error)}") from error
        history = self._history(value)
        self.actions = [
            item[ACTION_KEY] for item in history if isinstance(item.get(ACTION_KEY), dict)
        ]
        rows = [item for item in history if ACTION_KEY not in item]
        return [row for item in rows if (row := tidy(item))]

    def _history(self, value: Any) -> list[dict[str, Any]]:
        rows = value.get("log_history") if isinstance(value, dict) else value
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(
                f"{self.path} holds no log_history and is no list of rows: give a "
                "trainer_state.json or a file of one JSON object a line"
            )
        return rows


class Csv(LineParser):
    """A table with a header; the delimiter is found in it. Empty cells and text are left out."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._header: list[str] | None = None
        self._delimiter = ","
        self._open = ""  # a row whose quoted cell goes on in the next line

    def line(self, text: str) -> list[Row]:
        """Read one line; a quoted cell may span several."""
        text = f"{self._open}{text}"
        if len(text) > MAX_LINE:
            raise self.error(f"ends a row longer than {MAX_LINE} bytes")
        # An odd number of quotes leaves a cell open.
        self._open = f"{text}\n" if text.count('"') % 2 else ""
        if self._open or not text.strip() or (self._header is None and text.startswith("#")):
            return []
        cells = self._cells(text)
        if self._header is None:
            self._header = cells
            return []
        if len(cells) > len(self._header):
            raise self.error(f"has {len(cells)} cells, the header {len(self._header)}")
        row = tidy(dict(zip(self._header, cells)))
        return [row] if row else []

    def _cells(self, text: str) -> list[str]:
        if self._header is None:
            text = text.removeprefix("\ufeff")
            self._delimiter = max(",\t;", key=text.count)
        try:
            return next(csv.reader([text], delimiter=self._delimiter))
        except csv.Error as error:
            raise self.error(f"is not CSV: {error}") from error

    def last(self) -> list[Row]:
        """Complain of a quote that was never closed: it has swallowed the rest of the table."""
        if self._open.count("\n") > 1:
            raise self.error("ends inside a quoted cell: a quote is missing")
        return []


def reason(error: Exception) -> str:
    """Why JSON could not be read, in a few words."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
