"""One JSON object per line: our metrics.jsonl, verl's file logger, and most others."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from mesotron.watch.reader import LineReader, first_bytes, first_line, log_format, reason
from mesotron.watch.rows import RUN_COLUMNS, Row, may_name_run, run_columns, to_row

try:
    from orjson import loads as fast_loads
except ModuleNotFoundError:  # a third of the speed
    from json import loads as fast_loads

NOT_LOGS = {"samples.jsonl", "spectra.jsonl"}  # of a run folder


@log_format(
    "jsonl",
    about="One JSON object per line, also as `.gz`: verl's file logger, prime-rl, ms-swift, ART, "
    "tinker",
)
class JsonLines(LineReader):
    rank = 60
    suffixes = (".jsonl", ".ndjson")

    @classmethod
    def recognizes(cls, head: bytes) -> bool:
        return first_line(head).startswith('{"')

    def parse(self, line: str) -> list[Row]:
        if not line or line.isspace():
            return []

        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self.error(f"is not JSON: {reason(error)}") from error

        if not isinstance(value, dict):
            raise self.error(f"is not a JSON object but {type(value).__name__}")

        return [self._to_row(value)]

    def parse_block(self, block: bytes) -> Iterator[Row]:
        # Parsing many lines at once takes two thirds of the time.
        num_lines = block.count(b"\n") + 1
        values = self._parse_together(block) if self.num_lines else []

        is_valid = len(values) == num_lines and all(type(value) is dict for value in values)
        if not is_valid:
            yield from super().parse_block(block)  # names the line that is wrong
            return

        self.offset += len(block) + 1
        self.num_lines += num_lines
        for value in values:
            row = self._to_row(value)
            if row:
                yield row

    def _parse_together(self, block: bytes) -> list[Any]:
        array = b"[%b]" % block.replace(b"\n", b",")
        for loads in (fast_loads, json.loads):
            with suppress(ValueError, RecursionError):  # a NaN is for Python's reader only
                return loads(array)

        return []

    def _to_row(self, value: dict[str, Any]) -> Row:
        """The row of an object; an empty one if it belongs to another run."""
        if not may_name_run(tuple(value)):
            return to_row(value)

        columns = set()
        for key in RUN_COLUMNS:
            if type(value.get(key)) is str:
                columns.add(key)

        if "seed" in value:
            columns.add("seed")

        names = {name: value[name] for name in run_columns(columns)}
        if names:
            run = self.runs.add(names, value)
            if self.part not in (None, run):
                return {}

        return to_row(value)


def is_dump(file: Path) -> bool:
    """Whether a file is no log: samples, or the completions of one step that verl writes."""
    if file.name in NOT_LOGS:
        return True

    is_numbered = file.suffix == ".jsonl" and file.stem.isdecimal()
    return is_numbered and b'"input":' in first_bytes(file)
