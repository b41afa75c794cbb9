"""A run is a folder: this module makes it, opens it, and alone knows the names of its files.

config.json   the resolved config        metrics.jsonl  one row per step: {"step": 3, "reward": 0.4}
env.json      versions, device, seed     events.jsonl   what the watch saw and did
result.json   how it ended, once it has  samples.jsonl  transcripts
report.md     the same as text           spectra.jsonl  singular values of a few blocks
routing.json  the rule of each parameter checkpoints/   see `checkpoints`
best.json     which of them is the run's model, see `best`
pocket.json   the search of --lr auto    pocket/        the forks of it, run folders themselves
sft/          the supervised start, a run of its own, with --sft-steps
"""

import fcntl
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import IO, Any, Literal, Self

from mesotron.config import SftConfig, TrainConfig
from mesotron.config.base import to_plain
from mesotron.runs.files import (
    Row,
    amend_row,
    append_row,
    cut_rows_after,
    printable,
    read_json,
    read_rows,
    rows_of_steps,
    write_json,
    write_whole,
)
from mesotron.runs.links import open_own, refuse_links
from mesotron.runs.own_code import end_copy

log = logging.getLogger("mesotron")
Stream = Literal["metrics", "events", "samples", "spectra"]
START = "sft"
STREAMS: tuple[Stream, ...] = ("metrics", "events", "samples", "spectra")
# Packages whose version can change a run's numbers.
PACKAGES = (
    "mesotron",
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "math-verify",
    "vllm",
    "jax",
    "optax",
    "flax",
    "numpy",
)


def new_run_path(name: str, root: Path = Path("runs")) -> Path:
    """`runs/NAME-DATE-TIME`, with a number behind it if that is taken."""
    base = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = root / base

    for number in count(2):
        if not path.exists():
            break
        path = root / f"{base}-{number}"

    return path


# What is there when a start is killed before config.json is.
STARTED = {"checkpoints", "env.json", ".env.json.writing", ".config.json.writing"}


def check_free(path: Path, flag: str = "--out", started: Collection[str] = STARTED) -> None:
    """Refuse a place that holds something, or where no folder can be made; `started` is what a
    killed start may have left there."""
    names: set[str] = set()
    if path.is_dir():
        names = {file.name for file in path.iterdir()}

    has_checkpoints = any((path / "checkpoints").glob("*"))
    if names.difference(started) or has_checkpoints or path.is_file():
        unfinished = {"config.json", "env.json"} <= names and "result.json" not in names
        resume = f", or continue it with --resume {path}" if unfinished else ""
        raise ValueError(f"{path} is not empty; give {flag} another name{resume}")

    place = nearest_existing(path)
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise ValueError(f"{path} cannot be made: {place} is no folder that can be written to")


def nearest_existing(path: Path) -> Path:
    """The path itself, or the closest of the folders above it that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def try_lock(path: Path) -> IO[str] | None:
    """Lock a file until it is closed or its last holder ends; None if another process has it."""
    file = open_own(path, "a")  # which leaves what is in it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None

    return file


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a run; a shared one is taken for the moment."""
    try:
        with open_own(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True

    return False


class RunFolder:
    """One run on disk. Writers hold its lock; readers need none.

    Args:
        path: an existing run folder; `runs/last` is the newest one.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     run = RunFolder.create(Path(root) / "a", config={"steps": 2}, environment={})
        ...     run.append("metrics", {"step": 1, "reward": 0.5})
        ...     run.rows("metrics")
        [{'step': 1, 'reward': 0.5}]
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._lock: IO[str] | None = None
        self._is_last = False
        self._owner = os.getpid()
        if not (path / "config.json").is_file():
            raise ValueError(f"{path} is not a run: it has no config.json; name a folder of runs/")

        refuse_links(path)

    @classmethod
    def create(cls, path: Path, config: object, environment: Row) -> Self:
        """Make a new run folder; `runs/last` points at it from its first step on."""
        check_free(path)
        refuse_links(path)
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        write_json(path / "env.json", environment)
        write_json(path / "config.json", to_plain(config))

        return cls(path)

    @property
    def config(self) -> Row:
        return read_json(self.path / "config.json")

    @property
    def environment(self) -> Row:
        return read_json(self.path / "env.json")

    @property
    def result(self) -> Row | None:
        return self.load("result")

    def append(self, stream: Stream, row: Row) -> None:
        self._end_copy()
        append_row(self.path / f"{stream}.jsonl", row)

        if stream == "metrics" and not self._is_last:  # a failed start leaves runs/last alone
            self._point_last_here()
            self._is_last = True

    def _point_last_here(self) -> None:
        path = self.path.resolve()
        if path.parent.name != "runs":
            return

        draft = path.with_name(f".last.{os.getpid()}")
        draft.unlink(missing_ok=True)
        draft.symlink_to(path.name, target_is_directory=True)
        draft.replace(path.with_name("last"))

    def rows(self, stream: Stream) -> list[Row]:
        return rows_of_steps(read_rows(self.path / f"{stream}.jsonl"))

    def cut_after(self, step: int) -> None:
        """Drop the rows after a step: a resumed run writes them again."""
        for stream in STREAMS:
            cut_rows_after(self.path / f"{stream}.jsonl", step)

    def amend(self, stream: Stream, step: int, values: Row) -> None:
        """Add values to the row of a step."""
        self._end_copy()
        amend_row(self.path / f"{stream}.jsonl", step, values)

    def save(self, name: str, value: Row) -> None:
        self._end_copy()
        write_json(self.path / f"{name}.json", value)

    def load(self, name: str) -> Row | None:
        path = self.path / f"{name}.json"
        return read_json(path) if os.path.lexists(path) else None

    def _end_copy(self) -> None:
        """Writers hold the lock: a forked copy of one, such as a reward can make, ends here."""
        if self._lock is not None:
            end_copy(self._owner)

    def extend(self, steps: int) -> None:
        """Make a run longer than it was planned, or than where it ended by itself; one that has
        finished has not any more."""
        config = {**self.config, "steps": steps}
        if "steps_auto" in config:
            config["steps_auto"] = False

        self.save("config", config)
        for name in ("result", "after"):
            (self.path / f"{name}.json").unlink(missing_ok=True)

    def finish(self, result: Row, report: Callable[[], str]) -> None:
        """Write how the run ended: numbers for tools first, then text for people."""
        self.save("result", result)
        with warn_of_failure("report.md", self.path):
            write_whole(self.path / "report.md", printable(report()))

    def __enter__(self) -> Self:
        """Take the lock; the system releases it when the process ends, however it ends."""
        self._lock = try_lock(self.path / "lock")
        if self._lock is None:
            raise ValueError(f"{self.path} is in use by another process; stop it first")

        self._owner = os.getpid()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._lock is not None
        self._lock.close()
        self._lock = None


@contextmanager
def warn_of_failure(name: str, path: Path) -> Iterator[None]:
    """Turn any failure to describe a finished run into one sentence: its result is saved."""
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        message = "%s was not written (%s); the run itself is complete in %s"
        log.warning(printable(message % (name, reason, path)))


def describe_environment(device: str, seed: int, **more: Any) -> dict[str, Any]:
    """What env.json holds: versions, source commit, machine, device, seed and `more`."""
    packages = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):  # an extra that is not installed
            packages[name] = version(name)

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "commit": source_commit(),
        "command": sys.argv[1:],
        "device": device,
        "seed": seed,
        **more,
    }


def source_commit() -> str | None:
    """The commit of a source checkout, "-dirty" if changed; None for an installed wheel."""
    source = Path(__file__).parents[3]
    if not (source / ".git").exists():
        return None

    git = ["git", "-C", str(source), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None

    return done.stdout.strip()


def run_name(config: TrainConfig | SftConfig) -> str:
    """What a new run is called: its recipe, or its data."""
    names = ["sft"] if isinstance(config, SftConfig) else []
    if config.task.has_own_data or config.task.is_gym or config.task.env:
        names.append(config.task.title[:60])
    elif isinstance(config, TrainConfig):
        names.append(config.recipe)

    return "-".join(names)
