"""What every reader shares: the contract, the limits, and rows out of nested values."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from mesotron.watch.metrics import STEP_NAMES, plain_name

Row = dict[str, float]

MAX_FILE = 2**30
MAX_LINE = 2**20
MAX_KEYS = 5000
MAX_ROWS = 2_000_000
MAX_DEPTH = 8
# verl and others put a row's numbers under one of these beside its step.
WRAPPERS = {"data", "metrics", "logs"}


class Parser(ABC):
    """Bytes of one file, in order, to rows.

    Args:
        path: the file, for sentences.

    Attributes:
        whole: the file has a meaning as a whole alone; `finish` may be called again and again.
        actions: what a guard did, as `events.Action.record` gives it, where the file has it.
    """

    whole: ClassVar[bool] = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.actions: list[dict[str, Any]] = []

    @abstractmethod
    def feed(self, data: bytes) -> list[Row]:
        """The rows that these next bytes complete."""

    @abstractmethod
    def finish(self) -> list[Row]:
        """The rows that were waiting for more bytes; there are none to come."""


class LineParser(Parser):
    """A parser of lines; keeps an unfinished one until its end comes, and knows line numbers."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.number = 0
        self._rest = b""

    @abstractmethod
    def line(self, text: str) -> list[Row]:
        """The rows that one whole line completes."""

    def last(self) -> list[Row]:
        """The rows that wait for another line; none unless a parser keeps some."""
        return []

    def feed(self, data: bytes) -> list[Row]:
        """Split into lines."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE:
            raise self.error(f"is longer than {MAX_LINE} bytes", self.number + len(lines) + 1)
        return [row for line in lines for row in self._numbered(line)]

    def finish(self) -> list[Row]:
        """Read a last line without its end; one torn by a killed writer is left out."""
        rest, self._rest = self._rest, b""
        rows: list[Row] = []
        if rest.strip():
            try:
                rows = self._numbered(rest)
            except MalformedLine:
                rows = []
        return rows + self.last()

    def _numbered(self, line: bytes) -> list[Row]:
        self.number += 1
        if len(line) > MAX_LINE:
            raise self.error(f"is longer than {MAX_LINE} bytes")
        return self.line(line.decode("utf-8", errors="replace").rstrip("\r"))

    def error(self, problem: str, number: int | None = None) -> "MalformedLine":
        """A sentence on a line, the present one if no number is given."""
        return MalformedLine(f"{self.path} line {number or self.number} {problem}")


class MalformedLine(ValueError):
    """A line that its format does not allow; the text names file and line."""


def tidy(values: Mapping[str, Any]) -> Row:
    """Numbers out of a row of anything: nested names are joined by /, the rest is left out.

    Args:
        values: a row as it was logged.

    Returns:
        Name -> number; the step, whatever it was called, under "step".

    Example:
        >>> tidy({"step": 3, "data": {"reward": "0.5", "text": "hello"}})
        {'step': 3.0, 'reward': 0.5}
    """
    flat: Row = {}
    _flatten("", values, flat, MAX_DEPTH)
    names = {plain_name(key).lower(): key for key in flat}
    for name in STEP_NAMES:
        if plain_name(name) in names:
            # In front, as rows are written.
            return {"step": flat.pop(names[plain_name(name)])} | flat
    return flat


def _flatten(prefix: str, values: Mapping[str, Any], flat: Row, depth: int) -> None:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            inner = prefix if key in WRAPPERS else f"{name}/"
            if depth:
                _flatten(inner, value, flat, depth - 1)
        elif (found := number(value)) is not None and len(flat) < MAX_KEYS:
            flat[name] = found


def number(value: Any) -> float | None:
    """A number, or the number that a short word spells; None for anything else.

    Example:
        >>> number("1e-3"), number("nan"), number(True), number("seven")
        (0.001, nan, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value) if not isinstance(value, str) or len(value) < 64 else None
    except ValueError:
        return None
    except OverflowError:  # a whole number beyond the floats
        return float("inf") if value > 0 else float("-inf")  # type: ignore[operator]
