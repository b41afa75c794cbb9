"""The speedrun: seconds from the untouched SmolLM2-135M-Instruct to 0.90 greedy accuracy.

    python3 benchmarks/speedrun/run.py grid --out results/grid.json --seconds 200
    python3 benchmarks/speedrun/run.py final --stock stock_1e-5 --ours muon_2e-4_p128 --out results/final.json

The clock starts with the first step and counts whatever is compiled or captured; greedy evaluations
on the 512 held-out problems stop it. Cells follow each other, alone on the GPU, in fresh processes;
what is in the results already is not run again. Finals run ours first: plain TRL may then take
`--patience` times their mean, and what has not arrived by then took at least that. On a CPU: add
--small.
"""  # noqa: E501

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import mean

from children import Children, Results, Row
from entries import GRID, STOCK_GRID

TARGET = 0.90


def cells_of(args: argparse.Namespace) -> list[tuple[str, int]]:
    """Contenders and seeds in the order of what matters most."""
    if args.what == "grid":
        names = args.names or [*GRID, *STOCK_GRID]
        return [(name, 0) for name in names]
    seeds = range(1, 1 + args.seeds)  # the grid has used 0
    return [(name, seed) for name in (args.ours, args.stock) for seed in seeds]


def limit_of(args: argparse.Namespace, name: str, cells: dict[str, Row]) -> float:
    """Training seconds that a cell may take."""
    ours = [row["seconds_to_target"] for row in cells.values() if row.get("name") == args.ours]
    if args.what == "final" and name == args.stock and ours and None not in ours:
        return args.patience * mean(ours)
    return args.limit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("grid", "final"))
    parser.add_argument("--names", nargs="+", help="contenders of the grid; all if not given")
    parser.add_argument("--stock", default="stock_1e-5")
    parser.add_argument("--ours", default="muon_2e-4_p128")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=30, help="training seconds of a cell")
    parser.add_argument("--patience", type=float, default=3.5, help="of the finals with plain TRL")
    parser.add_argument("--set", nargs="*", default=[], help="NAME=VALUE settings of everybody")
    parser.add_argument("--every", type=float, default=4, help="seconds between evaluations")
    parser.add_argument("--target", type=float, default=TARGET)
    parser.add_argument("--seconds", type=float, default=200, help="for all cells together")
    parser.add_argument("--out", type=Path, default=Path("results/speedrun.json"))
    parser.add_argument("--model", help="a model folder or .gguf file instead of smollm2")
    parser.add_argument(
        "--small", action="store_true", help="a random model and few rows, on a CPU"
    )
    args = parser.parse_args()
    deadline = time.perf_counter() + args.seconds
    with tempfile.TemporaryDirectory() as scratch, Children("racing", "race") as children:
        given = {"model": args.model, "small": args.small, "common": args.set}
        given |= {"every": args.every, "target": args.target}
        results = Results(args.out)
        for name, seed in cells_of(args):
            # Other rules are other cells: a file that is gone on with never mixes them.
            rules = [*args.set, f"target={args.target:g}"]
            cell, left = "/".join([name, str(seed), *rules]), deadline - time.perf_counter()
            if left < 3 or "steps" in results.cells.get(cell, {}):
                continue
            folder = Path(scratch) / f"{name}-{seed}"
            given["limit"] = limit_of(args, name, results.cells)
            results.put(cell, children.run(folder, left, name=name, seed=seed, given=given))


if __name__ == "__main__":
    main()
