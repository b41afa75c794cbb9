"""`mesotron report PATH...`: find what the paths hold, write the page, and again while it grows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mesotron.config import ReportConfig
from mesotron.report.read import read_runs
from mesotron.report.runs_page import render_runs
from mesotron.report.tournament import RECORD, is_finished, render_tournament
from mesotron.runs.files import write_whole

NAME = "report.html"
# More lines than these have no colour and dash of their own.
MOST_RUNS = 28


def run(config: ReportConfig) -> int:
    """Write the page, once or until the runs are over; returns the exit code."""
    named = [whole(path) for path in config.paths]
    paths = find(named)
    out = config.out or default_out(named)
    if config.live:
        return follow(paths, out, config.every)
    write(paths, out)
    print(f"{out}: {out.stat().st_size / 1000:,.0f} kB, open it in a browser")
    return 0


def write(paths: Sequence[Path], out: Path, live: float | None = None) -> None:
    """Write the page of some runs, or of one tournament.

    Args:
        paths: run folders, or one tournament's folder.
        out: the file, replaced at once.
        live: seconds after which the page loads itself again; None never.
    """
    if is_tournament(paths[0]):
        page = render_tournament(paths[0], live)
    else:
        page = render_runs(read_runs(paths), live)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, page)


def find(paths: Sequence[Path]) -> list[Path]:
    """The runs or the tournament that paths name; a folder of runs stands for all of them."""
    if not paths:
        raise ValueError("give at least one run folder, such as runs/last")
    found: list[Path] = []
    for path in paths:
        found += [path] if is_single(path) else runs_in(path)
    tournaments = [path for path in found if is_tournament(path)]
    if tournaments and len(found) > 1:
        raise ValueError(
            f"{tournaments[0]} is a tournament and has a page of its own: name it alone"
        )
    if len(found) > MOST_RUNS:
        raise ValueError(
            f"{len(found)} runs are too many to be told apart in one page: name at most {MOST_RUNS}"
        )
    return found


def whole(path: Path) -> Path:
    """The run of a log that lies in a run's folder, which knows more; else the path itself."""
    inside = path.name == "metrics.jsonl" and (path.parent / "config.json").is_file()
    return path.parent if inside else path


def is_single(path: Path) -> bool:
    """Whether a path is a run, a tournament or a log, and not a folder of runs."""
    holds = (path / "config.json").is_file() or is_tournament(path)
    return holds or not path.is_dir() or not runs_in(path)


def is_tournament(path: Path) -> bool:
    """Whether a folder is a tournament's."""
    return (path / RECORD).is_file()


def runs_in(path: Path) -> list[Path]:
    """The run folders right below a folder, without the link to the last one."""
    inside = sorted(child for child in path.iterdir() if (child / "config.json").is_file())
    return [child for child in inside if not child.is_symlink()]


def default_out(named: Sequence[Path]) -> Path:
    """In or beside what it tells of, if one path was named; else here."""
    if len(named) > 1:
        return Path(NAME)
    return named[0] / NAME if named[0].is_dir() else named[0].with_name(NAME)


def follow(paths: Sequence[Path], out: Path, every: float) -> int:
    """Write whenever something has changed, until every run is over or Ctrl-C."""
    if not every > 0:
        raise ValueError(f"--every {every:g} must be above 0")
    print(f"{out}: written again each {every:g} s while it changes; Ctrl-C ends it")
    before = None
    try:
        while True:
            now = [stamp(path) for path in paths]
            over = all(is_over(path) for path in paths)
            if now != before or over:
                write(paths, out, None if over else every)
            if over:
                print("every run is over")
                return 0
            before = now
            time.sleep(every)
    except KeyboardInterrupt:
        write(paths, out)
        return 0


def stamp(path: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of the files that a page is made of, a tournament's cells included.

    Names with a dot are files that are just being written; any file may be gone at a second look.
    """
    inside = [*path.glob("*.json*"), *path.glob("cells/*/metrics.jsonl")]
    found = []
    for file in [path] if path.is_file() else sorted(inside):
        if not file.name.startswith("."):
            with suppress(FileNotFoundError):
                facts = file.stat()
                found.append((str(file), facts.st_size, facts.st_mtime_ns))
    return found


def is_over(path: Path) -> bool:
    """Whether nothing more will come: a run has its result, a tournament no open cell."""
    if is_tournament(path):
        return is_finished(path)
    return (path / "result.json").is_file()
