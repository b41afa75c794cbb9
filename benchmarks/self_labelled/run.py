"""Label-free training on the tiny model, long enough to collapse: plain voting against M-GRPO.

    python -m benchmarks.self_labelled.run --steps 300 --lr 3e-4 6e-4 --seeds 0 1 2

Each run is `mesotron train arith_mgrpo` in a process of its own, several at once, at a constant
rate and one KL weight for all; `grpo` has the gold answers and shows what the rate itself does. A
run that is there already is not made again, one that was stopped is continued. The result holds
the greedy held-out accuracy and what was logged, every tenth step.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mesotron.runs.files import read_rows

HERE = Path(__file__).parent
CONTENDERS = {
    "vote": "--objective.name vote",
    "mgrpo_momentum": "--objective.name mgrpo --objective.entropy-filter off",
    "mgrpo": "--objective.name mgrpo",
    # A tiny policy moves as far in 100 steps as a large one in thousands, an anchor of 0.99 with
    # it: one that remembers 1,000 steps, and one of these with as many votes as the policy.
    "mgrpo_slow": "--objective.name mgrpo --objective.momentum 0.999",
    "mgrpo_half": "--objective.name mgrpo --objective.momentum 0.999 "
    "--objective.momentum-generations 4",
    "corewarding": "--objective.name corewarding",
    "grpo": "--objective.name grpo",
}
LOGGED = ("reward", "facts/correct", "facts/formatted", "votes/share", "votes/label_accuracy",
          "answers/top_share", "answers/distinct_in_group", "entropy", "kl",
          "completions/mean_length")  # fmt: skip
Cell = tuple[str, float, int]


def main() -> None:
    parser = argparse.ArgumentParser(description="Plain voting against M-GRPO")
    parser.add_argument("--out", type=Path, default=Path("runs/self_labelled"))
    parser.add_argument("--result", type=Path, default=HERE / "result.json")
    parser.add_argument("--contenders", nargs="+", default=["vote", "mgrpo", "grpo"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-4, 6e-4])
    parser.add_argument("--beta", type=float, default=0.005, help="weight of the KL term, for all")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at once")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop, resumable, after")
    given = parser.parse_args()
    given.until = time.monotonic() + given.seconds
    given.out.mkdir(parents=True, exist_ok=True)
    cells = [
        (name, lr, seed) for seed in given.seeds for lr in given.lr for name in given.contenders
    ]
    with ThreadPoolExecutor(given.workers) as pool:
        list(pool.map(lambda cell: train(cell, given), cells))
    found = [one for cell in cells if (one := summarise(cell, given))]
    given.result.write_text(json.dumps(found))
    for one in found:
        print(*(one[key] for key in ("contender", "lr", "seed", "steps")), one["greedy"])


def folder(cell: Cell, given: argparse.Namespace) -> Path:
    name, lr, seed = cell
    return given.out / f"{name}-{lr:g}-{seed}"


def train(cell: Cell, given: argparse.Namespace) -> None:
    """Train one run, unless it is finished or the time is up."""
    path, left = folder(cell, given), given.until - time.monotonic()
    if (path / "result.json").exists() or left < 5:
        return
    with (given.out / f"{path.name}.log").open("a") as log:
        process = subprocess.Popen(
            command(cell, given), stdout=log, stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            process.wait(None if math.isinf(left) else left)
        except subprocess.TimeoutExpired:
            process.terminate()  # saves a checkpoint and exits
            process.wait()


def command(cell: Cell, given: argparse.Namespace) -> list[str]:
    """The run's command line; resumes a stopped one."""
    (name, lr, seed), path = cell, folder(cell, given)
    typed = [sys.executable, "-m", "mesotron", "train"]
    if (path / "config.json").exists():
        return [*typed, "--resume", str(path)]
    flags = f"arith_mgrpo {CONTENDERS[name]} --out {path} --seed {seed} --steps {given.steps}"
    flags += f" --optim.lr {lr} --optim.schedule constant --objective.beta {given.beta}"
    flags += f" --rollout.prompts {given.prompts} --device {given.device} --model.dtype float32"
    flags += " --eval-every 10 --save-every 0 --guard off --threads 1"
    return [*typed, *flags.split()]


def summarise(cell: Cell, given: argparse.Namespace) -> dict | None:
    """One run's curves; None if it has not started."""
    (name, lr, seed), path = cell, folder(cell, given)
    rows = read_rows(path / "metrics.jsonl")
    if not rows:
        return None
    seen = [(row["step"], row["eval/greedy"]) for row in rows if "eval/greedy" in row]
    start = json.loads((path / "before.json").read_text())["greedy"]["strict"]["value"]
    return {
        "contender": name,
        "lr": lr,
        "seed": seed,
        "steps": rows[-1]["step"],
        "seconds": sum(row["time/step"] for row in rows),
        "greedy": [(0, start), *seen],
        "logged": {key: tens(rows, key) for key in LOGGED if key in rows[0]},
    }


def tens(rows: list[dict], key: str) -> list[float]:
    """Means of ten rows each, to five digits."""
    blocks = [rows[k : k + 10] for k in range(0, len(rows), 10)]
    return [float(f"{sum(row[key] for row in block) / len(block):.5g}") for block in blocks]


if __name__ == "__main__":
    main()
