"""What rollback saves: provoked collapses of the optimizer with `--guard rollback`, and without.

    python benchmarks/watch/rescues.py

A run is rescued if its final reward (mean of the last ten rollouts) comes to nine tenths of that of
the healthy setting with the same optimizer and reward, at the same seed. Held-out accuracy, which
is what one wants, stands beside it. Reads the two packed files alone.
"""

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from labels import mean
from runs import RESCUES

HERE = Path(__file__).parent
ENOUGH = 0.9
Packed = dict[str, Any]


def main() -> None:
    words = argparse.ArgumentParser(description="Compare runs with rollback and without")
    words.add_argument("--corpus", type=Path, default=HERE / "corpus.json.gz")
    words.add_argument("--rescues", type=Path, default=HERE / "rescues.json.gz")
    given = words.parse_args()
    corpus = {run["name"]: run for run in load(given.corpus)}
    found = [compare(run, corpus) for run in load(given.rescues)]
    for one in sorted(found, key=lambda one: one["run"]):
        print(one)
    print(f"rescued {sum(one['rescued'] for one in found)} of {len(found)}")
    (HERE / "rescues.json").write_text(json.dumps(found, indent=1))


def load(path: Path) -> list[Packed]:
    """The runs of a packed file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


def compare(run: Packed, corpus: dict[str, Packed]) -> dict[str, Any]:
    """A run with rollback beside itself without and beside a healthy one."""
    twin = corpus[f"{RESCUES[run['setting']]}-{run['seed']}"]
    alone = corpus[run["name"]]
    rewards = [final(one, "reward", 10) for one in (run, alone, twin)]
    accuracies = [final(one, "eval/greedy", 1) for one in (run, alone, twin)]
    return {
        "run": run["name"],
        "steps": run["columns"]["step"][-1],
        "reward": named(rewards),
        "greedy": named(accuracies),
        "rollbacks": [
            {key: act[key] for key in ("step", "action", "detector", "checkpoint", "changes")}
            for act in run["guarded"]
        ],
        "rescued": rewards[0] >= ENOUGH * rewards[2],
    }


def final(run: Packed, name: str, rows: int) -> float:
    """The mean of a column's last values."""
    return mean([value for value in run["columns"][name] if value is not None][-rows:])


def named(values: list[float]) -> dict[str, float]:
    """Three numbers with their names."""
    return {k: round(v, 3) for k, v in zip(("rollback", "alone", "healthy"), values, strict=True)}


if __name__ == "__main__":
    main()
