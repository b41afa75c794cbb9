"""The speedrun: seconds from the untouched SmolLM2-135M-Instruct to 0.90 greedy accuracy.

    python -m benchmarks.speedrun.run grid --out results/grid.json --seconds 200
    python -m benchmarks.speedrun.run final --stock stock_1e-5 --ours muon_2e-4_p128 --out results/final.json
    python -m benchmarks.speedrun.run beside --names stock_1e-5 stock_2e-5 --limit 600 --out results/stock.json

The clock starts with the first step and counts whatever is compiled or captured; greedy evaluations
on the 512 held-out problems stop it. Cells follow each other, alone on the GPU, in fresh processes;
what is in the results already is not run again. Finals run ours first: plain TRL may then take
`--patience` times their mean, and what has not arrived by then took at least that. `beside` runs all
seeds at once and counts their steps, at the seconds that a step takes alone: what is learned in a
step does not depend on its time, and slow contenders need no GPU of their own. On a CPU: add --small.
"""  # noqa: E501

from __future__ import annotations

import argparse
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks._lib.mps import mps
from benchmarks.speedrun.children import Children, Results, Row
from benchmarks.speedrun.entries import GRID, STOCK_GRID

TARGET = 0.90
PACE_SECONDS = 16.0  # of a contender alone, until its steps have settled


def fresh_seeds(args: argparse.Namespace) -> range:
    """Of finals and of runs side by side; the grid and the measured pace have used 0."""
    return range(1, 1 + args.seeds)


def cells_of(args: argparse.Namespace) -> list[tuple[str, int]]:
    """Contenders and seeds in the order of what matters most."""
    if args.what == "grid":
        names = args.names or [*GRID, *STOCK_GRID]
        return [(name, 0) for name in names]
    return [(name, seed) for name in (args.ours, args.stock) for seed in fresh_seeds(args)]


def cell_of(args: argparse.Namespace, name: str, seed: int) -> str:
    """A cell's name; other rules are other cells: a file that is gone on with never mixes them."""
    return "/".join([name, str(seed), *args.set, f"target={args.target:g}"])


def limit_of(args: argparse.Namespace, name: str, cells: dict[str, Row]) -> float:
    """Training seconds that a cell may take."""
    ours = [cells.get(cell_of(args, args.ours, seed), {}) for seed in fresh_seeds(args)]
    times = [row.get("seconds_to_target") for row in ours]
    if args.what == "final" and name == args.stock and None not in times:
        return args.patience * mean(times)
    return args.limit


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("grid", "final", "beside"))
    parser.add_argument("--names", nargs="+", help="contenders of the grid; all if not given")
    parser.add_argument("--stock", default="stock_1e-5")
    parser.add_argument("--ours", default="muon_2e-4_p128")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=30, help="training seconds of a cell")
    parser.add_argument("--patience", type=float, default=3.5, help="of the finals with plain TRL")
    parser.add_argument("--set", nargs="*", default=[], help="NAME=VALUE settings of everybody")
    parser.add_argument("--every", type=float, default=4, help="seconds between evaluations")
    parser.add_argument("--target", type=float, default=TARGET)
    parser.add_argument("--pace", type=float, nargs=2, metavar=("FIRST", "LATER"),
                        help="seconds of a step alone, not to be measured first")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=200, help="for all cells together")
    parser.add_argument("--out", type=Path, default=Path("results/speedrun.json"))
    parser.add_argument("--model", help="a model folder or .gguf file instead of smollm2")
    parser.add_argument(
        "--small", action="store_true", help="a random model and few rows, on a CPU"
    )
    return parser.parse_args()


class Race:
    """Cells of one call, alone or side by side, and the file that they go to."""

    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        self.args, self.scratch = args, scratch
        self.deadline = time.perf_counter() + args.seconds
        self.results = Results(args.out)
        self.given = {"model": args.model, "small": args.small, "common": args.set}
        self.given |= {"every": args.every, "target": args.target}

    def run(self, children: Children, name: str, seed: int, **given: Any) -> Row:
        """One cell, unless it is there already; empty if there is no time for it."""
        cell, left = cell_of(self.args, name, seed), self.deadline - time.perf_counter()
        known = self.results.cells.get(cell, {})
        whole = "steps" in known and not known.get("cut_short")  # its own limit ended it
        if whole or left < 3:
            return known
        folder = self.scratch / f"{name}-{seed}"
        row = children.run(folder, left, name=name, seed=seed, given=self.given | given)
        self.results.put(cell, row)
        return row

    def alone(self) -> None:
        """Cells one after the other."""
        with Children("benchmarks.speedrun.racing:race") as children:
            for name, seed in cells_of(self.args):
                limit = limit_of(self.args, name, self.results.cells)
                self.run(children, name, seed, limit=limit)

    def beside(self) -> None:
        """All seeds of each contender at once, their steps counted at the pace it has alone."""
        args = self.args
        paces = {name: args.pace for name in args.names} if args.pace else self.paces()
        cells = [(name, seed, pace) for name, pace in paces.items() for seed in fresh_seeds(args)]
        with mps(self.scratch, print), ThreadPoolExecutor(max(len(cells), 1)) as threads:
            list(threads.map(self.one_beside, cells))

    def paces(self) -> dict[str, tuple[float, float]]:
        """Seconds of the first and of a later step, each contender alone on the GPU."""
        with Children("benchmarks.speedrun.racing:race") as children:
            names = self.args.names
            alone = {name: self.run(children, name, 0, limit=PACE_SECONDS) for name in names}
        return {
            name: (row["first_step_s"], row["settled_step_s"])
            for name, row in alone.items()
            if "settled_step_s" in row
        }

    def one_beside(self, cell: tuple[str, int, tuple[float, float]]) -> None:
        name, seed, pace = cell
        with Children("benchmarks.speedrun.racing:race") as children:
            self.run(children, name, seed, limit=self.args.limit, pace=pace)


def main() -> None:
    args = read_arguments()
    if args.what == "beside" and not args.names:
        raise SystemExit("beside needs --names: the contenders to run side by side")
    with tempfile.TemporaryDirectory() as scratch:
        race = Race(args, Path(scratch))
        race.beside() if args.what == "beside" else race.alone()


if __name__ == "__main__":
    main()
