"""TensorBoard event files, read by the `tensorboard` package; only scalars are kept."""

from pathlib import Path
from typing import Any

from mesotron.watch.readers.parsers import Parser, Row

FRAME = 16  # bytes around each record: its length and two checksums
DT_FLOAT, DT_DOUBLE = 1, 2


class EventFile(Parser):
    """The scalars of one step, which are written one by one, make one row."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        except ImportError as error:
            raise ValueError(
                f"{path} is a TensorBoard file: install its reader with "
                "pip install 'mesotron[tensorboard]'"
            ) from error
        self._loader = RawEventFileLoader(str(path))
        self._row: Row = {}

    def read(self) -> list[Row]:
        rows: list[Row] = []
        for record in self._loader.Load():  # ends before an incomplete or damaged record
            step, scalars = self._parse(record)
            self.offset += len(record) + FRAME
            if scalars and (self._row.get("step") != step or scalars.keys() & self._row.keys()):
                rows += self._take()
                self._row = {"step": float(step)}
            self._row |= scalars
        return rows

    def finish(self) -> list[Row]:
        size = self.path.stat().st_size
        if self.offset < size:
            self.notes.append(f"{self.path.name} is damaged or cut off at byte {self.offset}")
        return self._take()

    def _take(self) -> list[Row]:
        row, self._row = self._row, {}
        return [row] if len(row) > 1 else []

    def _parse(self, record: bytes) -> tuple[int, Row]:
        from google.protobuf.message import DecodeError
        from tensorboard.compat.proto import event_pb2

        try:
            event = event_pb2.Event.FromString(record)  # pyright: ignore[reportAttributeAccessIssue]
        except DecodeError as error:
            raise ValueError(
                f"{self.path}: the record at byte {self.offset} is no event"
            ) from error
        values = {value.tag: _scalar(value) for value in event.summary.value}
        return event.step, {tag: value for tag, value in values.items() if value is not None}


def _scalar(value: Any) -> float | None:
    from tensorboard.util import tensor_util

    if value.HasField("simple_value"):
        return value.simple_value
    if value.HasField("tensor") and value.tensor.dtype in (DT_FLOAT, DT_DOUBLE):
        array = tensor_util.make_ndarray(value.tensor)
        return float(array.item()) if array.size == 1 else None
    return None
