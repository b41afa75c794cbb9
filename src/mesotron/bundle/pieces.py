"""A bundle's contents as one tar stream, cut into pieces of a given size, each with its hash."""

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterable
from pathlib import Path

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
MANIFEST = "pieces.json"


def read_size(text: str) -> int:
    """A size in bytes from words like 60M.

    Example:
        >>> read_size("1.5K")
        1536
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise ValueError(f"piece {text!r} is no size; write it as in 60M or 2G")
    return size


class Pieces(io.RawIOBase):
    """A file to write to that begins a new file whenever the present one is full.

    Args:
        folder: where the pieces go; older pieces there are removed.
        largest: bytes in one piece; None for a single piece.

    Attributes:
        written: name, bytes and sha256 of each finished piece.
    """

    def __init__(self, folder: Path, largest: int | None) -> None:
        for old in folder.glob("piece-*"):
            old.unlink()
        self.folder, self.largest = folder, largest
        self.written: list[dict[str, str | int]] = []
        self._begin()

    def _begin(self) -> None:
        self._path = self.folder / f"piece-{len(self.written):03d}"
        self._file = self._path.open("wb")
        self._hash = hashlib.sha256()
        self._size = 0

    def _finish(self) -> None:
        self._file.close()
        facts = {"name": self._path.name, "bytes": self._size, "sha256": self._hash.hexdigest()}
        self.written.append(facts)

    def writable(self) -> bool:
        """The tar writer asks."""
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Append, over as many pieces as it takes."""
        rest = memoryview(data)
        while rest:
            if self._size == self.largest:
                self._finish()
                self._begin()
            part = rest if self.largest is None else rest[: self.largest - self._size]
            self._file.write(part)
            self._hash.update(part)
            self._size += len(part)
            rest = rest[len(part) :]
        return len(data)

    def close(self) -> None:
        """Finish the last piece."""
        if not self.closed:
            self._finish()
        super().close()


def write_pieces(
    folder: Path, contents: Iterable[tuple[Path, str]], largest: int | None
) -> list[dict[str, str | int]]:
    """Pack files under the given names and list the pieces in `pieces.json`.

    Args:
        folder: where the pieces go.
        contents: files or folders, each with its name inside the bundle.
        largest: bytes in one piece.

    Returns:
        Name, bytes and sha256 of each piece.
    """
    # No compression: wheels and weights are compressed already.
    with Pieces(folder, largest) as sink, tarfile.open(fileobj=sink, mode="w|") as tar:
        for path, name in contents:
            tar.add(path, name)
    text = json.dumps({"pieces": sink.written}, indent=1) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    return sink.written
