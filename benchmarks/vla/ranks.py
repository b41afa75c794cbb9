"""Effective ranks of the parts' gradients over seeds, by PROTOCOL.md. A CPU suffices.

    python -m benchmarks.vla.ranks --state runs/vla_ranks --result benchmarks/vla/ranks.json

Runs that are in the result are not made again.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from statistics import fmean

from benchmarks._lib.results import read_json, write_json
from benchmarks._lib.rows import Row, where
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
    parser.add_argument("--steps", type=int, default=STEPS, help="fewer for trials only")
    own = parser.parse_args()

    flags = "--world object10 --device cpu --episodes 200 --starts 3000 --test 1 --out ."
    given = fill_in(make_parser().parse_args([*flags.split(), "--state", str(own.state)]))
    own.state.mkdir(parents=True, exist_ok=True)
    make_data(given, print)
    bench = Bench(given, math.inf)

    runs: list[Row] = read_json(own.result) if own.result.exists() else []
    for seed in SEEDS:
        for head in HEADS:
            if not where(runs, head=head, seed=seed):
                runs.append(run(bench, head, seed, own.steps))
                write_json(runs, own.result, indent=1)

    for one in runs:
        means = {part: round(fmean(ranks), 1) for part, ranks in one["ranks"].items()}
        print(one["head"], one["seed"], means)


def run(bench: Bench, head: str, seed: int, steps: int) -> Row:
    """Train a policy and measure its gradients on the way."""
    trainer = bench.make_trainer(make_cell(head, "muon", RATE, steps, seed))
    ranks: dict[str, list[float]] = {part: [] for part in PARTS}
    while trainer.step < steps:
        if trainer.step in PROBES:
            found = trainer.probe()
            for part in PARTS:
                ranks[part].append(round(found[f"gradient/{part}/effective_rank"], 3))
        trainer.advance()

    return {
        "use": "reporting",
        "protocol": protocol_commit(),
        "seed": seed,
        "head": head,
        "steps": steps,
        "probed_before": PROBES,
        "ranks": ranks,
    }


if __name__ == "__main__":
    main()
