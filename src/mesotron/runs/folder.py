"""A run is a folder: this class makes it and opens it, and alone knows the names of its files.

config.json   the resolved config        metrics.jsonl  one row a step: {"step": 3, "reward": 0.4}
env.json      versions, device, seed     events.jsonl   what the watch saw and did
result.json   how it ended, if it did    samples.jsonl  transcripts
report.md     the same in words          spectra.jsonl  singular values of a few blocks
routing.json  who is trained by what     checkpoints/   see `checkpoints`
"""

import dataclasses
import fcntl
import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

from mesotron.runs.lines import Row, append_row, cut_rows_after, read_rows, write_json

Stream = Literal["metrics", "events", "samples", "spectra"]
STREAMS: tuple[Stream, ...] = ("metrics", "events", "samples", "spectra")


def new_run_path(name: str, root: Path = Path("runs")) -> Path:
    """A path for a new run, `runs/NAME-DATE-TIME`, that nothing has taken yet."""
    base = root / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def check_free(path: Path, flag: str = "--out") -> None:
    """Refuse a path for a new run that holds something already.

    Args:
        path: of the folder to be.
        flag: by which the user names it.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        is_run = (path / "config.json").is_file()
        way_on = f", or continue it with --resume {path}" if is_run else ""
        raise ValueError(f"{path} is not empty; give {flag} another name{way_on}")


class RunFolder:
    """One run on disk. Writers hold its lock; readers need none.

    Args:
        path: an existing run folder; `runs/last` is the newest one.

    Raises:
        ValueError: there is no run in that folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     run = RunFolder.create(Path(root) / "a", config={"steps": 2}, environment={})
        ...     run.append("metrics", {"step": 1, "reward": 0.5})
        ...     RunFolder(Path(root) / "a").rows("metrics")
        [{'step': 1, 'reward': 0.5}]
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None
        if not (path / "config.json").is_file():
            raise ValueError(f"{path} is not a run: it has no config.json; name a folder of runs/")

    @classmethod
    def create(cls, path: Path, config: object, environment: Row) -> Self:
        """Make a new run folder and point `runs/last` at it.

        Args:
            path: where; must not hold anything yet.
            config: a config dataclass, or the same as a dictionary.
            environment: see `describe_environment`.
        """
        check_free(path)
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        write_json(path / "env.json", environment)
        write_json(path / "config.json", plain(config))
        link_last(path)
        return cls(path)

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def config(self) -> Row:
        """The resolved config as it was written."""
        return self._read_json("config.json")

    @property
    def environment(self) -> Row:
        """Versions, device and seed of the run's start."""
        return self._read_json("env.json")

    @property
    def result(self) -> Row | None:
        """How the run ended, or None while it has not."""
        return self.load("result")

    def append(self, stream: Stream, row: Row) -> None:
        """Add one row to a stream."""
        append_row(self.path / f"{stream}.jsonl", row)

    def rows(self, stream: Stream) -> list[Row]:
        """All rows of a stream; a last line that was being written is left out."""
        return read_rows(self.path / f"{stream}.jsonl")

    def cut_after(self, step: int) -> None:
        """Forget the rows after a step, as a resumed run writes them again."""
        for stream in STREAMS:
            cut_rows_after(self.path / f"{stream}.jsonl", step)

    def save(self, name: str, value: Row) -> None:
        """Write NAME.json, such as an evaluation, at once or not at all."""
        write_json(self.path / f"{name}.json", value)

    def load(self, name: str) -> Row | None:
        """What `save` wrote, or None if it has not."""
        return self._read_json(f"{name}.json") if (self.path / f"{name}.json").exists() else None

    def finish(self, result: Row, report: str) -> None:
        """Write how the run ended: numbers for tools, words for people."""
        (self.path / "report.md").write_text(report, encoding="utf-8")
        self.save("result", result)

    def check_unused(self) -> None:
        """Refuse a run that another process writes, before anything is said or loaded for it."""
        with self:
            pass

    def __enter__(self) -> Self:
        """Take the lock; the system gives it back when the process ends, however it ends."""
        self._lock = (self.path / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ValueError(
                f"{self.path} is in use by another process; wait for it or stop it first"
            ) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._lock is not None
        self._lock.close()

    def _read_json(self, name: str) -> Row:
        path = self.path / name
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from error


def plain(value: object) -> Any:
    """A config as JSON holds it: dataclasses become dictionaries, tuples lists, paths words."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def link_last(path: Path) -> None:
    """Point `runs/last` at a run that lies in a folder named runs; others get no link."""
    root = path.resolve().parent
    if root.name != "runs":
        return
    draft = root / f".last.{os.getpid()}"
    draft.unlink(missing_ok=True)
    draft.symlink_to(path.name, target_is_directory=True)
    draft.replace(root / "last")
