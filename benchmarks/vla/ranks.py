"""Effective ranks of the parts' gradients over seeds, by PROTOCOL.md. A CPU suffices.

    python -m benchmarks.vla.ranks --state runs/vla_ranks --result benchmarks/vla/ranks.json

Runs that are in the result are not made again.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.tournament.__main__ import protocol_commit
from benchmarks.vla.cell import Bench
from benchmarks.vla.plan import PARTS, make_cell
from benchmarks.vla.study import fill_in, make_data, make_parser

SEEDS = range(265, 268)
HEADS = ("l1", "flow")
STEPS = 60
PROBES = (0, 15, 30, 59)
RATE = 5e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)

    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        help="fewer for trials only",
    )

    own = parser.parse_args()
    flags = "--world object10 --device cpu --episodes 200 --starts 3000 --test 1 --state"
    given = fill_in(make_parser().parse_args([*flags.split(), str(own.state), "--out", "."]))
    own.state.mkdir(parents=True, exist_ok=True)
    make_data(given, print)
    bench = Bench(given, math.inf)
    runs: list[dict[str, Any]] = json.loads(own.result.read_text()) if own.result.exists() else []

    known = {(run["head"], run["seed"]) for run in runs}
    for seed in SEEDS:
        for head in HEADS:
            if (head, seed) in known:
                continue

            trainer = bench.make_trainer(
                make_cell(
                    head,
                    "muon",
                    RATE,
                    own.steps,
                    seed,
                )
            )

            ranks: dict[str, list[float]] = {part: [] for part in PARTS}
            while trainer.step < own.steps:
                if trainer.step in PROBES:
                    found = trainer.probe()
                    for part, values in ranks.items():
                        values.append(round(found[f"gradient/{part}/effective_rank"], 3))

                trainer.advance()

            run = {
                "use": "reporting",
                "protocol": protocol_commit(),
                "seed": seed,
                "head": head,
            }

            runs.append(
                run
                | {
                    "steps": own.steps,
                    "probed_before": PROBES,
                    "ranks": ranks,
                }
            )

            own.result.write_text(json.dumps(runs, indent=1))

    for run in runs:
        means = {part: round(fmean(values), 1) for part, values in run["ranks"].items()}
        print(run["head"], run["seed"], means)


if __name__ == "__main__":
    main()
