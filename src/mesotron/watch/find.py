"""Finds the logs at a path: their format, their files, and the runs of a folder or a database."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path

from mesotron.config.registry import FORMATS
from mesotron.watch.formats.jsonl import is_dump
from mesotron.watch.metrics import STEP_NAMES
from mesotron.watch.reader import PRINTED, Reader, first_bytes, first_line, inner_suffix

AUTO = "auto"
MAX_ENTRIES = 10_000  # searched in each folder
MAX_RUNS = 1000
MAX_FOLDERS = 5000
MAX_NAME = 200
DEPTH = 4
JSONL = "jsonl"
NUMBERED = re.compile(r"(?P<before>.*?)(?P<number>\d+)(?P<after>\D*\.jsonl)")
MAX_PARTS = 100  # files of one run that was resumed

Formats = Sequence[type[Reader]]


@dataclass(frozen=True)
class LogSource:
    """One run: the files of its log in the order they were written."""

    kind: str
    files: list[Path]
    part: str | None = None  # the run, in a file with several

    @property
    def is_file(self) -> bool:
        return len(self.files) == 1 and self.files[0].is_file()

    def parts(self) -> list[str]:
        return FORMATS[self.kind].parts(self.files[0])


# The runs at a path


def find_runs(path: Path, kind: str = AUTO, notes: list[str] | None = None) -> list[Path]:
    """The runs at a path, each a path for `read_log`; one in a file with several is FILE#NAME.

    `notes` gets what was left out.
    """
    if not path.is_dir():
        return _runs_of_file(path, kind)

    if notes is None:
        notes = []

    runs = list(islice(_runs_below(path, formats_of(kind), notes), MAX_RUNS + 1))
    if not runs and kind == AUTO:  # a console beside a log is the same run
        runs = list(islice(_runs_below(path, printed_formats(), notes), MAX_RUNS + 1))

    if not runs:
        looked_for = ", ".join(FORMATS) if kind == AUTO else kind
        raise ValueError(f"{path} has no log: looked for {looked_for}")
    if len(runs) > MAX_RUNS:
        notes.append(f"only {MAX_RUNS} runs of {path} are read: give a folder inside it")

    return runs[:MAX_RUNS]


def _runs_of_file(path: Path, kind: str) -> list[Path]:
    source = locate_file(path, kind)
    if source.part is not None:
        return [path]

    runs = []
    for name in source.parts():
        if name.isprintable() and 0 < len(name) < MAX_NAME:
            runs.append(Path(f"{path}#{name}"))

    return runs or [path]


def _runs_below(root: Path, formats: Formats, notes: list[str]) -> Iterator[Path]:
    folders = [(root, 0)]
    for _ in range(MAX_FOLDERS):
        if not folders:
            return

        folder, depth = folders.pop()
        source = _run_of_folder(folder, formats)
        if source is not None:
            yield from _runs_of(source, folder)
            continue

        for source in _logs_in_folder(folder, formats, notes):
            yield from find_runs(source.files[0], source.kind)

        if depth < DEPTH:
            folders += [(child, depth + 1) for child in _folders_in(folder)]


def _runs_of(source: LogSource, folder: Path) -> list[Path]:
    """The runs in the one log of a folder; a single one is named by its folder."""
    runs = find_runs(source.files[0], source.kind) if source.is_file else []
    return runs if len(runs) > 1 else [folder]


def _folders_in(folder: Path) -> list[Path]:
    """Folders to search, the last first."""
    folders = []
    for child in islice(folder.iterdir(), MAX_ENTRIES):
        # runs/last and wandb/latest-run are links to one of the others.
        is_link = child.is_symlink() or child.name.startswith(".")
        if child.is_dir() and not is_link:
            folders.append(child)

    return sorted(folders, reverse=True)


# The log of one run


def locate(path: Path, kind: str = AUTO) -> LogSource:
    """The log of one run."""
    if not path.is_dir():
        return _select_part(locate_file(path, kind), path)

    source = _run_of_folder(path, formats_of(kind))
    if source is not None:
        if source.is_file:
            return locate(source.files[0], source.kind)

        return source

    runs = find_runs(path, kind)
    if len(runs) > 1:
        raise ValueError(f"{path} has {len(runs)} runs: give one, such as {runs[0]}")

    return locate(runs[0], kind)


def _select_part(source: LogSource, path: Path) -> LogSource:
    """The run that FILE#NAME names, or the only one of the file."""
    parts = source.parts()
    if source.part is None:
        if len(parts) > 1:
            raise ValueError(f"{path} has {len(parts)} runs: give one, as in {path}#{parts[0]}")
        return replace(source, part=parts[0] if parts else None)

    named = {str(Path(f"#{part}"))[1:]: part for part in parts}  # a path drops some slashes
    if source.part not in named:
        raise ValueError(f"{path} names no run of the file: it has {', '.join(parts) or 'one'}")

    return replace(source, part=named[source.part])


def locate_file(path: Path, kind: str) -> LogSource:
    """A file, or FILE#NAME, and its format."""
    file, part = _split_part(path)
    if not file.exists():
        raise ValueError(f"{file} does not exist: give a run folder or a log file")
    if not file.is_file():
        raise ValueError(f"{file} is not a regular file: give a run folder or a log file")

    log_format = recognize(file) if kind == AUTO else FORMATS[kind]
    return LogSource(log_format.kind, [file], part)


def _split_part(path: Path) -> tuple[Path, str | None]:
    """FILE#NAME as the two; both may have a #."""
    if path.exists():
        return path, None

    name = str(path)
    for place, letter in enumerate(name):
        file = Path(name[:place])
        if letter == "#" and file.is_file():
            return file, name[place + 1 :]

    return path, None


def _run_of_folder(folder: Path, formats: Formats) -> LogSource | None:
    """The log of a folder that is the folder of one run."""
    for log_format in formats:
        files = log_format.run_files(folder)
        if files:
            return LogSource(log_format.kind, files)

    return _continued_log(folder, formats)


def _continued_log(folder: Path, formats: Formats) -> LogSource | None:
    """The files of one run that wrote another one each time it was resumed: their names differ in
    a number, and each but the first begins at a later step."""
    jsonl = FORMATS[JSONL]
    if jsonl not in formats:
        return None

    files = _numbered_files(folder)
    if not 2 <= len(files) <= MAX_PARTS:
        return None

    first_steps = [_first_step(file) for file in files]
    for earlier, later in pairwise(first_steps):
        if earlier is None or later is None or later <= earlier:
            return None

    return LogSource(JSONL, files)


def _numbered_files(folder: Path) -> list[Path]:
    """The JSONL files of a folder in the order of their numbers; none if names differ in more."""
    numbered: list[tuple[int, Path]] = []
    stems: set[tuple[str, str]] = set()
    for entry in islice(folder.iterdir(), MAX_ENTRIES):
        if entry.suffix != ".jsonl" or is_dump(entry):
            continue

        named = NUMBERED.fullmatch(entry.name)
        if named is None or not entry.is_file() or entry.is_symlink():
            return []

        numbered.append((int(named["number"]), entry))
        stems.add((named["before"], named["after"]))

    if len(stems) != 1:
        return []

    return [file for _, file in sorted(numbered)]


def _first_step(file: Path) -> float | None:
    """The step of the first row of a JSONL file; None if it is unknown."""
    try:
        row = json.loads(first_line(first_bytes(file)))
    except (ValueError, RecursionError):
        return None

    for name in STEP_NAMES if isinstance(row, dict) else ():
        step = row.get(name)
        if isinstance(step, int | float):
            return step

    return None


def _logs_in_folder(folder: Path, formats: Formats, notes: list[str]) -> list[LogSource]:
    """The log files in a folder, of the best format that it has."""
    entries = sorted(islice(folder.iterdir(), MAX_ENTRIES))
    files = []
    for entry in entries:
        if entry.is_file() and not is_dump(entry):
            files.append(entry)

    found: dict[str, list[LogSource]] = {}
    for log_format in formats:
        if not log_format.in_folders:
            continue

        for file in files:
            if log_format.has_name(file) or _is_printed(file, log_format):
                sources = found.setdefault(log_format.kind, [])
                sources.append(LogSource(log_format.kind, [file]))

    if not found:
        return []

    best, *others = found
    if others:
        how = " or ".join(f"--kind {other}" for other in others)
        notes.append(f"of {folder} only the {best} logs are read: for others give {how}")

    return found[best]


def _is_printed(file: Path, log_format: type[Reader]) -> bool:
    """Whether a file holds what a program printed, with numbers in this format."""
    if not log_format.printed or file.is_symlink():
        return False
    return inner_suffix(file) in PRINTED and log_format.recognizes(first_bytes(file))


# Formats


def by_rank() -> list[type[Reader]]:
    formats = [FORMATS[name] for name in FORMATS]
    return sorted(formats, key=lambda log_format: log_format.rank)


def formats_of(kind: str) -> list[type[Reader]]:
    """The format of this name; for auto all but those that are sought last."""
    if kind == AUTO:
        return [log_format for log_format in by_rank() if not log_format.printed]

    return [FORMATS[kind]]


def printed_formats() -> list[type[Reader]]:
    return [log_format for log_format in by_rank() if log_format.printed]


def recognize(path: Path) -> type[Reader]:
    """The format of a file, by its name or its first bytes."""
    for log_format in by_rank():
        if log_format.has_name(path):
            return log_format

    head = first_bytes(path)
    for log_format in by_rank():
        if log_format.recognizes(head):
            return log_format

    if inner_suffix(path) in PRINTED:
        return printed_formats()[-1]  # the most general

    raise ValueError(f"{path} is not a known kind of log: give --kind, one of {', '.join(FORMATS)}")
