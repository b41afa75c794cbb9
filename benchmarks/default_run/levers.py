"""What made SmolLM2 learn faster, tried on the default run: one change at a time, then all.

    python benchmarks/default_run/levers.py --seeds 1 2 3

Finished runs are not made again, stopped ones are continued.
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

from run import HERE, collect, train

NEAR = ("--reward.parts", "two_part", "near")
CURIOUS = ("--objective.entropy-bonus", "0.02", "--objective.entropy-target", "0.3")
CHOSEN = ("--objective.dynamic-sampling", "resample", "--objective.dynamic-max-rounds", "1",
          "--objective.dynamic-oversample", "3")  # fmt: skip
LEVERS: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "near": NEAR,
    "entropy at 0.3": CURIOUS,
    "chosen from three times as many": CHOSEN,
    "all three": NEAR + CURIOUS + CHOSEN,
}


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    words.add_argument("--runs", type=Path, default=Path("runs/default_levers"))
    words.add_argument("--workers", type=int, default=2, help="runs at once, one thread each")
    given = words.parse_args()
    cells = [(name, seed) for seed in given.seeds for name in LEVERS]
    with ThreadPoolExecutor(given.workers) as pool:
        list(pool.map(lambda cell: train(cell[1], given.runs / cell[0], LEVERS[cell[0]]), cells))
    result = {name: [collect(seed, given.runs / name) for seed in given.seeds] for name in LEVERS}
    (HERE / "levers.json").write_text(json.dumps(result, indent=1))
    for name, rows in result.items():
        ends = [row["after"]["value"] for row in rows]
        seconds = fmean(row["seconds"] for row in rows)
        print(f"| {name} | {', '.join(f'{end:.3f}' for end in ends)} | {fmean(ends):.3f} | "
              f"{seconds:.0f} |")  # fmt: skip


if __name__ == "__main__":
    main()
