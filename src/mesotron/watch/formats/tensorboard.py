"""TensorBoard's event files. Scalars of one step, which are written one by one, make one row."""

from collections.abc import Iterator
from itertools import islice, takewhile
from pathlib import Path

from mesotron.watch.reader import Reader, log_format
from mesotron.watch.rows import Row

FRAME = 16  # bytes around each record: its length and two checksums
FLOATS = (1, 2)  # types of tensors
MAX_ENTRIES = 10_000  # searched at each level of a folder
# Folders of the writers of one run.
PHASES = {"runs", "train", "training", "eval", "val", "validation", "test"}


@log_format(
    "tensorboard", about="Event files or their folder (`pip install 'mesotron[tensorboard]'`)"
)
class EventFile(Reader):
    rank = 50
    in_folders = False  # a folder is a run

    def __init__(self, path: Path, part: str | None = None) -> None:
        super().__init__(path, part)
        try:
            from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        except ImportError as error:
            raise ValueError(
                f"{path} needs the reader of TensorBoard: pip install 'mesotron[tensorboard]'"
            ) from error

        self._loader = RawEventFileLoader(str(path))
        self._row: Row = {}

    @classmethod
    def has_name(cls, path: Path) -> bool:
        return "tfevents" in path.name

    @classmethod
    def recognizes(cls, head: bytes) -> bool:
        return b"brain.Event:" in head[:64]  # the version in the first record

    @classmethod
    def run_files(cls, folder: Path) -> list[Path]:
        """Event files in a folder, or else up to two levels below, by the time in their names."""
        files: list[Path] = []
        for pattern in ("*", "*/*", "*/*/*"):
            for entry in islice(folder.glob(pattern), MAX_ENTRIES):
                if cls.has_name(entry) and entry.is_file():
                    files.append(entry)

        # add_scalars and add_hparams write into folders inside that of their run.
        folders = {file.parent for file in files}
        files = [file for file in files if folders.isdisjoint(file.parent.parents)]

        runs = {_run_of(file.relative_to(folder)) for file in files}
        if len(runs) > 1:
            return []

        return sorted(files, key=lambda file: (file.name, str(file)))

    def read(self) -> Iterator[Row]:
        for record in self._loader.Load():  # ends before an incomplete or damaged record
            step, scalars = self._parse(record)
            self.offset += len(record) + FRAME

            is_new = self._row.get("step") != step or scalars.keys() & self._row.keys()
            if scalars and is_new:
                yield from self.end()
                self._row = {"step": float(step)}

            self._row |= scalars

    def end(self) -> list[Row]:
        row = self._row
        self._row = {}
        return [row] if len(row) > 1 else []  # a step is no row

    def _parse(self, record: bytes) -> tuple[int, Row]:
        from google.protobuf.message import DecodeError
        from tensorboard.compat.proto import event_pb2
        from tensorboard.util.tensor_util import make_ndarray

        try:
            event = event_pb2.Event.FromString(record)  # pyright: ignore[reportAttributeAccessIssue]
        except DecodeError as error:
            raise ValueError(f"{self.path}: no event at byte {self.offset}") from error

        scalars: Row = {}
        for value in event.summary.value:
            if value.HasField("simple_value"):
                scalars[value.tag] = value.simple_value
                continue

            # A single value would be repeated up to any shape that the file names.
            sizes = {dim.size for dim in value.tensor.tensor_shape.dim}
            if value.HasField("tensor") and sizes <= {1} and value.tensor.dtype in FLOATS:
                scalars[value.tag] = float(make_ndarray(value.tensor).item())

        return event.step, scalars


def _run_of(file: Path) -> tuple[str, ...]:
    """The folders that name a run; what is inside `runs` was started several times."""
    folders = takewhile("runs".__ne__, file.parts[:-1])
    return tuple(folder for folder in folders if folder.lower() not in PHASES)
