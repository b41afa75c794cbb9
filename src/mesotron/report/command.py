"""`mesotron report PATH...`: finds runs or a tournament, writes the page, and follows live runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mesotron.config import ReportConfig
from mesotron.report.data import COLORS, DASHES
from mesotron.report.read import read_runs
from mesotron.report.render import render_runs
from mesotron.report.tournament import RECORD, is_finished, render_tournament
from mesotron.runs.files import write_whole

NAME = "report.html"
MOST_RUNS = COLORS * DASHES  # more lines look alike


def run(config: ReportConfig) -> int:
    """Write the page, once or until the runs are over; returns the exit code."""
    # A run's own metrics.jsonl stands for the run, whose folder has more.
    given = [
        path.parent
        if path.name == "metrics.jsonl" and (path.parent / "config.json").is_file()
        else path
        for path in config.paths
    ]
    paths = find(given)
    out = config.out
    if out is None and len(given) > 1:
        out = Path(NAME)
    elif out is None:
        out = given[0] / NAME if given[0].is_dir() else given[0].with_name(NAME)
    if config.live:
        return follow(paths, out, config.every)
    write(paths, out)
    print(f"{out}: {out.stat().st_size / 1e6:,.1f} MB, open it in a browser")
    return 0


def write(paths: Sequence[Path], out: Path, live: float | None = None) -> None:
    """Write the page of some runs, or of one tournament."""
    if is_tournament(paths[0]):
        page = render_tournament(paths[0], live)
    else:
        page = render_runs(read_runs(paths), live)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, page)


def find(paths: Sequence[Path]) -> list[Path]:
    """The runs or the tournament at the paths; a folder of runs stands for all of them."""
    if not paths:
        raise ValueError("give at least one run folder, such as runs/last")
    found: list[Path] = []
    for path in paths:
        single = (path / "config.json").is_file() or is_tournament(path) or not path.is_dir()
        found += [path] if single else runs_in(path) or [path]
    tournaments = [path for path in found if is_tournament(path)]
    if tournaments and len(found) > 1:
        raise ValueError(f"{tournaments[0]} is a tournament with its own page: give it alone")
    if len(found) > MOST_RUNS:
        raise ValueError(f"{len(found)} runs do not fit one page: give at most {MOST_RUNS}")
    return found


def runs_in(path: Path) -> list[Path]:
    inside = sorted(child for child in path.iterdir() if (child / "config.json").is_file())
    return [child for child in inside if not child.is_symlink()]


def is_tournament(path: Path) -> bool:
    return (path / RECORD).is_file()


def follow(paths: Sequence[Path], out: Path, every: float) -> int:
    """Rewrite the page whenever something changes, until every run is over or Ctrl-C."""
    if not every > 0:
        raise ValueError(f"--every {every:g} must be above 0")
    print(f"{out}: updated every {every:g} s while the runs go on; Ctrl-C ends it")
    before = None
    try:
        while True:
            now = [stamp(path) for path in paths]
            over = all(is_over(path) for path in paths)
            if now != before or over:
                write(paths, out, None if over else every)
            if over:
                print("all runs are over")
                return 0
            before = now
            time.sleep(every)
    except KeyboardInterrupt:
        write(paths, out)
        return 0


def stamp(path: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of the files that a page is made of.

    Dotted names are files that are just being written; any file may vanish meanwhile.
    """
    inside = [*path.glob("*.json*"), *path.glob("cells/*/metrics.jsonl")]
    stamps = []
    for file in [path] if path.is_file() else sorted(inside):
        if not file.name.startswith("."):
            with suppress(FileNotFoundError):
                facts = file.stat()
                stamps.append((str(file), facts.st_size, facts.st_mtime_ns))
    return stamps


def is_over(path: Path) -> bool:
    """Whether nothing more will come: a run has its result, a tournament no open cell."""
    return is_finished(path) if is_tournament(path) else (path / "result.json").is_file()
