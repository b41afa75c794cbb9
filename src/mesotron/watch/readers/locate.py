"""Which file of a path to read, and as what: by name first, by its first bytes where that fails."""

import struct
from pathlib import Path

from mesotron.config import LogKind
from mesotron.watch.readers.console import PRINTED, VERL, Console
from mesotron.watch.readers.parser import Parser
from mesotron.watch.readers.tables import Csv, Document, JsonLines
from mesotron.watch.readers.tensorboard import EventFile, masked_crc

PARSERS: dict[LogKind, type[Parser]] = {
    "run": JsonLines,
    "jsonl": JsonLines,
    "trainer_state": Document,
    "csv": Csv,
    "tensorboard": EventFile,
    "console": Console,
}
SUFFIXES: dict[str, LogKind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
}
# A folder of event files is walked; one with more entries is not a log folder.
MAX_ENTRIES = 10_000
PEEK = 2**16


def locate(path: Path, kind: LogKind = "auto") -> tuple[LogKind, list[Path]]:
    """Find what to read.

    Args:
        path: a file or a folder.
        kind: what it is, or auto.

    Returns:
        The kind and the files, in the order they were written; several for TensorBoard alone.
    """
    if path.is_dir():
        return _in_folder(path, kind)
    if not path.exists():
        raise ValueError(f"{path} does not exist: give a run folder or a log file")
    if not path.is_file():
        raise ValueError(f"{path} is no plain file: give a run folder or a log file")
    return (sniff(path) if kind == "auto" else kind), [path]


def _in_folder(path: Path, kind: LogKind) -> tuple[LogKind, list[Path]]:
    for found_kind, files in _candidates(path):
        if files and kind in ("auto", found_kind):
            return found_kind, files
    wanted = "a log" if kind == "auto" else f"anything to read as {kind}"
    raise ValueError(
        f"{path} does not hold {wanted}: looked for metrics.jsonl, trainer_state.json (also in "
        "checkpoint-*), TensorBoard events, one .jsonl and one .csv"
    )


def _candidates(path: Path) -> list[tuple[LogKind, list[Path]]]:
    """What a folder may hold, the best source first."""
    run, state = path / "metrics.jsonl", path / "trainer_state.json"
    states = [state] if state.is_file() else _newest_checkpoint(path)
    lines, tables = sorted(path.glob("*.jsonl")), sorted(path.glob("*.csv"))
    return [
        ("run", [run] if run.is_file() else []),
        ("trainer_state", states),
        ("tensorboard", _event_files(path)),
        ("jsonl", lines if len(lines) == 1 else []),
        ("csv", tables if len(tables) == 1 else []),
    ]


def _newest_checkpoint(path: Path) -> list[Path]:
    found = {
        int(number): state
        for state in path.glob("checkpoint-*/trainer_state.json")
        if (number := state.parent.name.removeprefix("checkpoint-")).isdecimal()
    }
    return [found[max(found)]] if found else []


def _event_files(path: Path) -> list[Path]:
    """Event files in a folder and two levels below, by the time in their names."""
    found: list[Path] = []
    for depth, pattern in enumerate(("*", "*/*", "*/*/*")):
        for count, file in enumerate(path.glob(pattern)):
            if count >= MAX_ENTRIES:
                break
            if "tfevents" in file.name and file.is_file():
                found.append(file)
        if found and depth == 0:
            break
    return sorted(found, key=lambda file: (file.name, str(file)))


def sniff(path: Path) -> LogKind:
    """Tell the kind of a file from its name, then from its first bytes."""
    if "tfevents" in path.name:
        return "tensorboard"
    if path.suffix in SUFFIXES:
        return SUFFIXES[path.suffix]
    with path.open("rb") as file:
        head = file.read(PEEK)
    if len(head) >= 12 and struct.unpack_from("<I", head, 8)[0] == masked_crc(head[:8]):
        return "tensorboard"
    text = head.decode("utf-8", errors="replace")
    first = text.lstrip().split("\n", 1)[0].strip()
    if path.suffix == ".json" or first in ("{", "["):
        return "trainer_state"
    if first.startswith('{"'):
        return "jsonl"
    if VERL.search(text) or PRINTED.search(text):
        return "console"
    if any(mark in first for mark in ",\t;"):
        return "csv"
    raise ValueError(
        f"{path} is not a log that can be told apart: name its kind with --kind, one of "
        f"{', '.join(PARSERS)}"
    )
