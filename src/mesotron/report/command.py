"""`mesotron report PATH...`: finds runs or a tournament and writes the page."""

from collections.abc import Sequence
from pathlib import Path

from mesotron.config import ReportConfig
from mesotron.report.data import COLORS, DASHES
from mesotron.report.live import follow, serve
from mesotron.report.read import read_runs
from mesotron.report.render import render_runs
from mesotron.report.tournament import is_tournament, render_tournament
from mesotron.runs.checkpoints import outside
from mesotron.runs.files import write_whole
from mesotron.watch.find import find_runs

NAME = "report.html"
MOST_RUNS = COLORS * DASHES  # more lines look alike


def run(config: ReportConfig) -> int:
    given = [run_behind(path) for path in config.paths]
    paths = find(given)

    if config.port is not None:
        if config.out is not None:
            raise ValueError("--port serves the page instead of writing it: leave out --out")
        return serve(paths, lambda live: render(paths, live, config.rename), config.port)

    out = config.out or Path(NAME)
    if config.out is None and len(given) == 1:
        place = outside(given[0])
        out = place / NAME if place.is_dir() else place.with_name(NAME)

    if config.live:
        return follow(paths, lambda live: write(paths, out, live, config.rename), out)

    write(paths, out, rename=config.rename)
    print(f"{out}: {out.stat().st_size / 1e6:,.1f} MB, open it in a browser")

    return 0


def run_behind(path: Path) -> Path:
    """The run's folder for its own metrics.jsonl: the folder has more."""
    if path.name == "metrics.jsonl" and is_run(path.parent):
        return path.parent

    return path


def write(
    paths: Sequence[Path], out: Path, live: float | None = None, rename: Sequence[str] = ()
) -> None:
    page = render(paths, live, rename)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, page)


def render(paths: Sequence[Path], live: float | None = None, rename: Sequence[str] = ()) -> str:
    try:
        if is_tournament(paths[0]):
            return render_tournament(paths[0], live)

        return render_runs(read_runs(paths, rename), live)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError) as error:
        # A file of some other program, or one that was edited.
        names = ", ".join(map(str, paths))
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{names} has values that mesotron does not write ({reason})") from error


def find(paths: Sequence[Path]) -> list[Path]:
    """The runs or the tournament at the paths; a folder of runs stands for all of them."""
    if not paths:
        raise ValueError("give at least one run folder, such as runs/last")

    found: list[Path] = []
    for path in paths:
        if is_run(path) or is_tournament(path):
            found.append(path)
        else:  # runs/last is a link to one of the others
            runs = sorted(one for one in path.glob("*") if is_run(one) and not one.is_symlink())
            found += runs or find_runs(path)

    tournaments = [path for path in found if is_tournament(path)]
    if tournaments and len(found) > 1:
        raise ValueError(f"{tournaments[0]} is a tournament with its own page: give it alone")
    if len(found) > MOST_RUNS:
        raise ValueError(f"{len(found)} runs do not fit one page: give at most {MOST_RUNS}")

    return found


def is_run(path: Path) -> bool:
    # A checkpoint or a model has a config.json too.
    return (path / "config.json").is_file() and (path / "env.json").is_file()
