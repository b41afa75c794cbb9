"""W&B's own `run-<id>.wandb` files: LevelDB's log format, with protobuf messages as records.

They are read as data, without W&B: its own reader opens a file for writing, and fails on one that
is still being written.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from mesotron.watch.reader import Reader, log_format
from mesotron.watch.rows import Row, parse_json, to_row

MARK = b":W&B"
BLOCK = 2**15  # bytes of a block, which no chunk crosses
HEADER = 7  # bytes before the first chunk, and before the data of each chunk
MAX_RECORD = 2**24
# Kinds of chunks.
FULL = 1
FIRST = 2
MIDDLE = 3
LAST = 4

# Numbers of fields in W&B's messages.
RECORD_HISTORY = 2
HISTORY_ITEM = 1
ITEM_KEYS = (1, 2)  # a key, or the parts of a nested one
ITEM_VALUE = 16

# Protobuf's wire types.
VARINT = 0
BYTES = 2
FIXED = {1: 8, 5: 4}  # type -> size

Field = tuple[int, bytes | int]  # number and value


@log_format(
    "wandb",
    about="W&B: `wandb/`, an `offline-run-*` folder or a `.wandb` file, also during a run",
)
class Wandb(Reader):
    rank = 30
    suffixes = (".wandb",)

    def __init__(self, path: Path, part: str | None = None) -> None:
        super().__init__(path, part)
        self.offset = HEADER

    @classmethod
    def recognizes(cls, head: bytes) -> bool:
        return head.startswith(MARK)

    @classmethod
    def run_files(cls, folder: Path) -> list[Path]:
        files = sorted(folder.glob("*.wandb"))[:2]
        return files if len(files) == 1 else []

    def read(self) -> Iterator[Row]:
        with self.path.open("rb") as file:
            if file.read(4) != MARK:
                raise ValueError(f"{self.path} is not a W&B run: its first bytes are not ':W&B'")

            for record in self._records(file):
                try:
                    yield from history_rows(record)
                except (ValueError, IndexError):
                    self.notes = [f"{self.path.name} has damaged records before {self.offset}"]

    def _records(self, file: IO[bytes]) -> Iterator[bytes]:
        """Complete records from the offset on: one full chunk, or a first to a last one."""
        record = bytearray()
        position = self.offset
        while True:
            left = BLOCK - position % BLOCK
            if left < HEADER:  # padding
                position += left
                continue

            file.seek(position)
            chunk = _read_chunk(file, left)
            if chunk is None:
                return

            kind, data = chunk
            position += HEADER + len(data)
            if kind in (FULL, FIRST):
                record.clear()

            record += data
            if len(record) > MAX_RECORD:
                raise ValueError(f"{self.path} has a record longer than {MAX_RECORD} bytes")

            if kind in (FULL, LAST):
                self.offset = position
                yield bytes(record)


def _read_chunk(file: IO[bytes], left: int) -> tuple[int, bytes] | None:
    """Kind and data of the next chunk, if it is complete and fits into its block."""
    header = file.read(HEADER)
    if len(header) < HEADER:
        return None

    _, length, kind = struct.unpack("<IHB", header)
    data = file.read(length)
    is_complete = len(data) == length
    if not is_complete or kind not in (FULL, FIRST, MIDDLE, LAST) or length > left - HEADER:
        return None

    return kind, data


def history_rows(record: bytes) -> Iterator[Row]:
    """The row of a record with a history: items of key (or nested keys) and JSON value."""
    for number, history in fields(record):
        if number != RECORD_HISTORY or not isinstance(history, bytes):
            continue

        values: dict[str, Any] = {}
        for kind, item in fields(history):
            if kind == HISTORY_ITEM and isinstance(item, bytes):
                key, value = _read_item(item)
                if key:
                    values[key] = value

        row = to_row(values)
        if row:
            yield row


def _read_item(item: bytes) -> tuple[str, Any]:
    names: list[str] = []
    texts: list[bytes | int] = []
    for number, part in fields(item):
        if number in ITEM_KEYS and isinstance(part, bytes):
            names.append(str(part, "utf-8", "replace"))
        elif number == ITEM_VALUE:
            texts.append(part)

    text = texts[0] if texts else b""
    return "/".join(names), parse_json(text)


def fields(data: bytes) -> Iterator[Field]:
    """Number and value of each field of a protobuf message; ValueError if it is none."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue

        if kind == BYTES:
            size, at = _varint(data, at)
        elif kind in FIXED:
            size = FIXED[kind]
        else:
            raise ValueError(f"unknown wire type {kind}")

        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and the place after it."""
    value = 0
    for shift in range(0, 64, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at

    raise ValueError("a number longer than 64 bits")
