"""What a log format is: a class that recognizes its files and reads their rows.

A new format is one file in `formats/` with one class:

    @log_format("minimind", about="MiniMind's console")
    class MiniMind(LineReader):
        def parse(self, line): ...      the rows that a line completes

Files are not trusted: sizes are bounded, no pickle, no eval, and an error names file and line.
"""

import gzip
import io
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from mesotron.config.registry import FORMATS
from mesotron.watch.rows import Row, RunNames

R = TypeVar("R", bound="type[Reader]")

MAX_FILE = 2**31
MAX_DOCUMENT = 2**27  # it is held in memory
MAX_LINE = 2**20
MAX_HEAD = 100  # lines before the first that names its run
BLOCK = 2**18  # bytes read at once
PEEK = 2**16  # bytes to recognize a format by
PRINTED = (".log", ".out", ".txt", ".err")  # suffixes of files with what a program printed


def log_format(name: str, *, about: str) -> Callable[[R], R]:
    """Register a reader as the log format `name`, which is also its value of `--kind`.

    In a file of `formats/` that is called like the format, that is all it takes. `about` is its
    cell in the table of docs/watch_logs.md.
    """

    def register(reader: R) -> R:
        FORMATS.add(name, reader, reader.__module__)
        reader.kind = name
        reader.about = about
        return reader

    return register


class Reader(ABC):
    """Reads the rows of one file, or of one run (`part`) of a file with several."""

    kind: ClassVar[str]
    about: ClassVar[str]
    rank: ClassVar[int] = 0  # where several formats fit, the lowest is taken
    suffixes: ClassVar[tuple[str, ...]] = ()  # that say all
    in_folders: ClassVar[bool] = True  # files with these suffixes in a folder are its runs
    printed: ClassVar[bool] = False  # lines among others: sought where there is no other log
    whole: ClassVar[bool] = False  # see `WholeReader`
    joins: ClassVar[bool] = True  # late rows may belong to earlier steps
    # Names that only this format has -> names that the watch knows.
    names: ClassVar[dict[str, str]] = {}

    @classmethod
    def has_name(cls, path: Path) -> bool:
        """Whether the name of a file alone says that it has this format."""
        return inner_suffix(path) in cls.suffixes

    @classmethod
    def recognizes(cls, head: bytes) -> bool:
        """Whether a file that begins with these bytes has this format."""
        return False

    @classmethod
    def run_files(cls, folder: Path) -> list[Path]:
        """The files of the log, if the folder is that of one run."""
        return []

    @classmethod
    def parts(cls, path: Path) -> list[str]:
        """The names of the runs in a file, if it has several."""
        return []

    @classmethod
    def size(cls, path: Path) -> int:
        """Bytes of the log; it has not changed while this has not."""
        return path.stat().st_size

    def __init__(self, path: Path, part: str | None = None) -> None:
        self.path = path
        self.part = part
        self.offset = 0  # bytes read so far
        self.actions: list[dict[str, Any]] = []  # records of a guard's actions, if there are any
        self.notes: list[str] = []

    def planned_steps(self) -> float | None:
        """The step at which the run will end, if the log says so."""
        return None

    @abstractmethod
    def read(self) -> Iterable[Row]:
        """The rows completed since the last call."""

    def end(self) -> list[Row]:
        """The rows that were waiting for more."""
        return []

    def finish(self) -> Iterable[Row]:
        """The remaining rows: nothing will follow."""
        if self.path.exists() and self.offset < self.path.stat().st_size:
            self.notes.append(f"{self.path.name} is damaged or cut off at byte {self.offset}")

        return self.end()


class WholeReader(Reader):
    """Reads a log again as a whole, in `finish`, when it has changed."""

    whole = True

    def read(self) -> list[Row]:
        self.offset = self.size(self.path)
        return []


class MalformedLine(ValueError):
    """A line that its format does not allow; the text names file and line."""


class LineReader(Reader):
    """Reads line by line; an incomplete last line waits for its end."""

    def __init__(self, path: Path, part: str | None = None) -> None:
        super().__init__(path, part)
        self.num_lines = 0
        self.runs = RunNames()
        self._rest = b""  # the incomplete line at the end

    @abstractmethod
    def parse(self, line: str) -> list[Row]:
        """The rows that one line completes."""

    @classmethod
    def parts(cls, path: Path) -> list[str]:
        log = cls(path)
        with suppress(ValueError, OSError):  # named when the log is read
            for _ in log.read():
                if not log.runs.num_rows and log.num_lines > MAX_HEAD:
                    break

        return log.runs.several()

    def read(self) -> Iterator[Row]:
        self._rest = b""
        with open_bytes(self.path) as file:
            file.seek(self.offset)
            while data := read_bytes(file, BLOCK, self.path):
                block, newline, self._rest = (self._rest + data).rpartition(b"\n")
                if newline:
                    yield from self.parse_block(block)

                if len(self._rest) > MAX_LINE:
                    self.parse_bytes(self._rest)  # raises

    def parse_block(self, block: bytes) -> Iterator[Row]:
        for line in block.split(b"\n"):
            yield from self.parse_bytes(line)

    def parse_bytes(self, line: bytes) -> list[Row]:
        self.offset += len(line) + 1
        self.num_lines += 1
        if len(line) > MAX_LINE:
            raise self.error(f"is longer than {MAX_LINE} bytes")
        if self.offset > MAX_FILE:  # a compressed file may be larger inside
            raise self.error(f"is beyond {MAX_FILE} bytes: give a part of the log")

        text = line.decode("utf-8", errors="replace").removesuffix("\r")
        if self.num_lines == 1:
            text = text.removeprefix("\ufeff")

        return [row for row in self.parse(text) if row]

    def finish(self) -> list[Row]:
        rest = self._rest
        self._rest = b""
        rows: list[Row] = []

        if rest.strip():
            with suppress(MalformedLine):  # cut off when the writer was killed
                rows = self.parse_bytes(rest)
        if rows:
            self.offset -= 1  # there was no newline

        return [*rows, *self.end()]

    def error(self, problem: str) -> MalformedLine:
        return MalformedLine(f"{self.path} line {self.num_lines} {problem}")


def reason(error: Exception) -> str:
    """Why JSON could not be read."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error)


def inner_suffix(path: Path) -> str:
    """The suffix of a file, without a .gz after it."""
    if path.suffix == ".gz":
        path = path.with_suffix("")
    return path.suffix.lower()


def first_bytes(path: Path) -> bytes:
    with open_bytes(path) as file:
        return read_bytes(file, PEEK, path)


def first_line(head: bytes) -> str:
    text = head.decode("utf-8-sig", errors="replace")
    return text.lstrip().partition("\n")[0]


def open_bytes(path: Path) -> io.BufferedIOBase:
    """A text file as UTF-8, decompressed if it is gzipped."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")

    with path.open("rb") as file:
        mark = file.read(2)

    if mark not in (b"\xff\xfe", b"\xfe\xff"):
        return path.open("rb")

    # UTF-16, which PowerShell writes.
    if path.stat().st_size > MAX_DOCUMENT:
        raise ValueError(f"{path} is UTF-16 and larger than {MAX_DOCUMENT} bytes: convert it")

    text = path.read_bytes().decode("utf-16", errors="replace")
    return io.BytesIO(text.encode())


def read_bytes(file: io.BufferedIOBase, count: int, path: Path) -> bytes:
    """At most `count` bytes; fewer at the end, or where a compressed file is cut off."""
    data = bytearray()
    try:
        with suppress(EOFError):
            while len(data) < count:
                more = file.read1(count - len(data))
                if not more:
                    break
                data += more
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a gzip file, or is damaged") from error

    return bytes(data)
