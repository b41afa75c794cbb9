"""The one folder that a client may read and start runs in, and its texts as data."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from mesotron.report.command import is_run
from mesotron.runs.files import printable

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
MAX_RUNS = 200
MAX_TEXT = 16_000  # characters of one text in an answer
OWN = ".mcp"  # logs and notes of started runs


@dataclass(frozen=True)
class Folder:
    """A folder of runs, whose links were followed once.

    Example:
        >>> Folder(Path("/data/runs")).inside("a/b")
        PosixPath('/data/runs/a/b')
        >>> Folder(Path("/data/runs")).inside("../etc")
        Traceback (most recent call last):
        ...
        ValueError: ../etc lies outside the folder of this server: name a run or a file inside it
    """

    root: Path

    @classmethod
    def open(cls, path: Path) -> Self:
        """Make the folder unless it is there."""
        path = path.expanduser()
        path.mkdir(parents=True, exist_ok=True)
        return cls(path.resolve())

    def inside(self, name: str) -> Path:
        """The path that a client names; ValueError outside the folder, links followed."""
        if "\0" in name:
            raise ValueError(f"{name!r:.80} has a NUL character: give a name without one")

        # Of `run#name` only the file exists, so a link in it is looked at too.
        path = (self.root / name).resolve()
        file = (self.root / name.partition("#")[0]).resolve()
        if not (path.is_relative_to(self.root) and file.is_relative_to(self.root)):
            raise ValueError(
                f"{name:.80} lies outside the folder of this server: name a run or a file inside it"
            )

        return path

    def run(self, name: str) -> Path:
        """The folder of an existing run."""
        path = self.inside(name)
        if not is_run(path):
            raise ValueError(f"{name:.80} is no run of this folder: list_runs names them")

        return path

    def runs(self) -> list[Path]:
        """The run folders, links left out; the latest first."""
        found = []
        for path in self.root.iterdir():
            if is_run(path) and not path.is_symlink():
                found.append(path)

        found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        return found[:MAX_RUNS]

    def new_run(self, name: str) -> Path:
        """Where a new run of this name will lie."""
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r:.80} is no name for a run: use letters, digits, - and _")

        path = self.root / name
        if path.exists() or path.is_symlink():
            raise ValueError(f"there is a {name} already: give another name, or resume it")

        return path

    def own(self, name: str) -> Path:
        """A file of the server's, beside the runs."""
        place = self.root / OWN
        if place.is_symlink():
            raise ValueError(f"{place} is a link: remove it")

        place.mkdir(exist_ok=True)
        return place / name


def as_data(value: Any) -> Any:
    """Plain values that every client reads: texts cut and without control characters, numbers
    that are not finite as null.

    >>> as_data({"a": float("nan"), "b": ["\\x1b[2J"]})
    {'a': None, 'b': ['\\\\x1b[2J']}
    """
    if isinstance(value, dict):
        return {as_data(str(key)): as_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_data(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if not isinstance(value, str):
        return value

    text = printable(value[:MAX_TEXT])
    if len(value) > MAX_TEXT:
        text += " [cut]"

    return text
