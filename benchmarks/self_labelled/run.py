"""Label-free training on the tiny model until plain voting collapses: vote against M-GRPO.

    python benchmarks/self_labelled/run.py --out runs/self_labelled --steps 120 --seeds 0 1 2

Each run is `mesotron train arith_mgrpo` in a process of its own, several at once. A run that is
there already is not made again, one that was stopped is continued. The summary holds the greedy
held-out accuracy at the start, at the best and at the last evaluation, as the paper's table does.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CONTENDERS = {
    "vote": ["--objective.name", "vote"],
    "mgrpo_momentum": ["--objective.name", "mgrpo", "--objective.entropy-filter", "off"],
    "mgrpo": ["--objective.name", "mgrpo"],
    "corewarding": ["--objective.name", "corewarding"],
}


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--out", type=Path, default=Path("runs/self_labelled"))
    words.add_argument("--contenders", nargs="+", default=list(CONTENDERS))
    words.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    words.add_argument("--steps", type=int, default=120)
    words.add_argument("--eval-every", type=int, default=20)
    words.add_argument("--prompts", type=int, default=8)
    words.add_argument("--lr", type=float, nargs="+", default=[1e-3])
    words.add_argument("--workers", type=int, default=os.cpu_count())
    words.add_argument("--minutes", type=float, default=600, help="stop, resumable, after these")
    given = words.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    cells = [
        (name, lr, seed) for seed in given.seeds for lr in given.lr for name in given.contenders
    ]
    with ThreadPoolExecutor(given.workers) as pool:
        list(pool.map(lambda cell: train(*cell, given), cells))
    summary = [found for cell in cells if (found := summarise(*cell, given))]
    (given.out / "summary.json").write_text(json.dumps(summary, indent=1))
    for row in summary:
        print({key: value for key, value in row.items() if key != "curve"})


def folder(name: str, lr: float, seed: int, given: argparse.Namespace) -> Path:
    return given.out / f"{name}-{lr:g}-{seed}"


def train(name: str, lr: float, seed: int, given: argparse.Namespace) -> None:
    path = folder(name, lr, seed, given)
    command = [sys.executable, "-m", "mesotron", "train"]
    if (path / "result.json").exists():
        return
    if (path / "config.json").exists():
        command += ["--resume", str(path)]
    else:
        command += ["arith_mgrpo", *CONTENDERS[name], "--out", str(path), "--seed", str(seed)]
        command += ["--optim.lr", str(lr), "--optim.schedule", "constant"]
        command += ["--steps", str(given.steps), "--threads", "1"]
        command += ["--eval-every", str(given.eval_every), "--device", "cpu", "--guard", "off"]
        command += ["--rollout.prompts", str(given.prompts), "--save-every", "0"]
    with (given.out / f"{path.name}.log").open("a") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            process.wait(60 * given.minutes)
        except subprocess.TimeoutExpired:
            process.terminate()  # saves a checkpoint and exits
            process.wait()


def summarise(name: str, lr: float, seed: int, given: argparse.Namespace) -> dict | None:
    path = folder(name, lr, seed, given)
    if not (path / "metrics.jsonl").exists():
        return None
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    seen = [(row["step"], row["eval/greedy"]) for row in rows if "eval/greedy" in row]
    start = json.loads((path / "before.json").read_text())["greedy"]["strict"]["value"]
    curve = [(0, start), *seen]
    last = rows[-1]
    return {
        "contender": name,
        "lr": lr,
        "seed": seed,
        "steps": last["step"],
        "start": start,
        "best": max(curve, key=lambda point: point[1]),
        "last": curve[-1],
        "vote_share": last.get("votes/share"),
        "label_accuracy": last.get("votes/label_accuracy"),
        "top_answer_share": last.get("answers/top_share"),
        "entropy": last.get("entropy"),
        "curve": curve,
    }


if __name__ == "__main__":
    main()
