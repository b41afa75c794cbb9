"""TensorBoard event files, read from their bytes: no TensorFlow, no protobuf library, no pickle.

A file is a sequence of records: length, checksum, data, checksum, the checksum being CRC-32C. Each
is an Event message, of which the step and the scalar values are read; images, texts and histograms
are passed over.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

from mesotron.watch.readers.parser import Parser, Row

# A scalar's record is some 60 bytes; larger ones hold pictures or graphs and are skipped unread.
MAX_SCALAR = 2**16
MAX_RECORD = 2**30
HEADER, FOOTER = 12, 4
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
DT_FLOAT, DT_DOUBLE = 1, 2
Field = tuple[int, int, int | bytes]


class EventFile(Parser):
    """Records to rows: the scalars of one step, which are written one by one, are one row."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._rest = bytearray()
        self._offset = 0  # of the first byte of _rest in the file
        self._skip = 0  # bytes still to pass over
        self._row: Row = {}

    def feed(self, data: bytes) -> list[Row]:
        """Read the whole records."""
        self._rest += data
        rows: list[Row] = []
        for record in self._records():
            step, scalars = self._event(record)
            if scalars and (self._row.get("step") != step or scalars.keys() & self._row.keys()):
                rows += self._take()
                self._row = {"step": float(step)}
            self._row |= scalars
        return rows

    def finish(self) -> list[Row]:
        """The last row; a record that was being written is left out."""
        return self._take()

    def _take(self) -> list[Row]:
        row, self._row = self._row, {}
        return [row] if len(row) > 1 else []

    def _records(self) -> Iterator[bytes]:
        """Whole small records; large ones are passed over as their bytes come."""
        while True:
            passed = min(self._skip, len(self._rest))
            self._drop(passed)
            self._skip -= passed
            if self._skip or len(self._rest) < HEADER:
                return
            length, check = struct.unpack_from("<QI", self._rest)
            if check != masked_crc(bytes(self._rest[:8])) or length > MAX_RECORD:
                raise self._damaged("its length does not fit its checksum")
            if length > MAX_SCALAR:
                self._skip = HEADER + length + FOOTER
                continue
            if len(self._rest) < HEADER + length + FOOTER:
                return
            record = bytes(self._rest[HEADER : HEADER + length])
            if struct.unpack_from("<I", self._rest, HEADER + length)[0] != masked_crc(record):
                raise self._damaged("its data does not fit its checksum")
            yield record
            self._drop(HEADER + length + FOOTER)

    def _drop(self, count: int) -> None:
        del self._rest[:count]
        self._offset += count

    def _damaged(self, why: str) -> ValueError:
        return ValueError(f"{self.path}: the record at byte {self._offset} is damaged: {why}")

    def _event(self, record: bytes) -> tuple[int, Row]:
        """Step and scalars of an Event message (2: step, 5: summary)."""
        step, scalars = 0, {}
        try:
            for number, kind, value in fields(record):
                if number == 2 and kind == VARINT:
                    step = signed(value)
                elif number == 5 and isinstance(value, bytes):
                    scalars |= summary(value)
        except (IndexError, struct.error) as error:
            raise self._damaged("it is no Event message") from error
        return step, scalars


def summary(data: bytes) -> Row:
    """Scalars of a Summary message (1: values; of each 1: tag, 2: number, 8: tensor)."""
    out: Row = {}
    for number, _, value in fields(data):
        if number != 1 or not isinstance(value, bytes):
            continue
        tag, scalar = "", None
        for inner, kind, content in fields(value):
            if inner == 1 and isinstance(content, bytes):
                tag = content.decode("utf-8", errors="replace")
            elif inner == 2 and kind == FIXED32 and isinstance(content, bytes):
                scalar = struct.unpack("<f", content)[0]
            elif inner == 8 and isinstance(content, bytes):
                scalar = tensor_scalar(content)
        if scalar is not None:
            out[tag] = scalar
    return out


def tensor_scalar(data: bytes) -> float | None:
    """The number of a TensorProto of one float (1: type, 4: raw content, 5 and 6: values)."""
    kind, content = 0, b""
    for number, _, value in fields(data):
        if number == 1 and isinstance(value, int):
            kind = value
        elif number in (4, 5, 6) and isinstance(value, bytes):
            content = value
    shape = {DT_FLOAT: ("<f", 4), DT_DOUBLE: ("<d", 8)}.get(kind)
    if shape is None or len(content) != shape[1]:
        return None
    return struct.unpack(shape[0], content)[0]


def fields(data: bytes) -> Iterator[Field]:
    """(number, wire type, value) of each field of a protobuf message.

    Raises:
        IndexError: the message ends inside a field, or uses a wire type that is not in use.
    """
    place = 0
    while place < len(data):
        key, place = varint(data, place)
        kind = key & 7
        if kind == VARINT:
            value, place = varint(data, place)
            yield key >> 3, kind, value
            continue
        if kind == BYTES:
            size, place = varint(data, place)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
        else:
            raise IndexError(f"wire type {kind}")
        if place + size > len(data):
            raise IndexError("the message ends inside a field")
        yield key >> 3, kind, data[place : place + size]
        place += size


def varint(data: bytes, place: int) -> tuple[int, int]:
    """A number of seven bits a byte, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise IndexError("a number of more than ten bytes")


def signed(value: int | bytes) -> int:
    """A varint as the signed 64-bit number it stands for."""
    assert isinstance(value, int)
    return value - 2**64 if value >= 2**63 else value


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC = _crc_table()


def masked_crc(data: bytes) -> int:
    """CRC-32C, turned and shifted as record files have it.

    Example:
        >>> hex(masked_crc(b"123456789"))
        '0xc78ab0e5'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 255] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
