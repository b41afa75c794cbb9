"""The guard on SmolLM2: provoked collapses with `--guard rollback` and without, by PROTOCOL.md.

    python -m benchmarks.watch.guard_smollm2 --model FOLDER --state STATE --rate 8e-4 \
        --minutes 9 --result OUT/guard.json

The task is the tournament's sums with its warm start (STATE is the tournament's); RATE is eight
times Muon's chosen rate. Finished runs are in the result after each one and not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks._lib.mps import mps
from benchmarks.smollm2.place import model_folder
from benchmarks.tournament import warm
from benchmarks.tournament.__main__ import protocol_commit
from benchmarks.tournament.tasks import SIZES, SYSTEM, TASKS, write_tasks
from mesotron.runs.files import read_rows

SEEDS = tuple(range(240, 250))
GUARDS = ("off", "rollback")
Run = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder with a .gguf file, or a model")
    parser.add_argument("--state", type=Path, required=True, help="of the tournament")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--workers", type=int, default=5, help="each keeps 6 GB on disk")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=100, help="for trials only")
    parser.add_argument("--prompts", type=int, default=32, help="for trials only")
    parser.add_argument("--protocol", default="", help="commit of PROTOCOL.md, without git")
    given = parser.parse_args()
    given.protocol = given.protocol or protocol_commit()
    given.until = time.monotonic() + 60 * given.minutes
    write_tasks(given.state / "tasks")
    given.start = start_folder(given)
    runs: list[Run] = json.loads(given.result.read_text()) if given.result.exists() else []
    known = {(run["guard"], run["seed"]) for run in runs}
    cells = [(guard, seed) for seed in SEEDS for guard in GUARDS if (guard, seed) not in known]

    def one(cell: tuple[str, int]) -> None:
        if (run := train(*cell, given)) is not None:
            runs.append(run)
            draft = given.result.with_suffix(".draft")
            draft.write_text(json.dumps(runs))
            os.replace(draft, given.result)
            print({key: value for key, value in run.items() if key != "curve"}, flush=True)

    shares = given.device == "cuda" and given.workers > 1
    side_by_side = mps(given.state, print) if shares else nullcontext()
    with side_by_side, ThreadPoolExecutor(given.workers) as pool:
        list(pool.map(one, cells))
    summarise(runs)


def start_folder(given: argparse.Namespace) -> Path:
    """The merged start as a model folder."""
    folder, adapter = given.state / "start_sums", given.state / "warm" / "sums" / warm.FILE
    if not (folder / "config.json").exists():
        place = "tiny" if given.model == "tiny" else str(model_folder(given))
        model, tokenizer = warm.start(place, adapter if adapter.exists() else None, "cpu")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def train(guard: str, seed: int, given: argparse.Namespace) -> Run | None:
    """One run; None if there was no time for it."""
    path = given.state / "guard" / f"{guard}-{seed}"
    left = given.until - time.monotonic()
    if left < 20:
        return None
    shutil.rmtree(path, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = given.state / "tasks" / "sums" / "reporting"
    flags = f"arith_smollm2 --model.name {given.start} --data {data} --task.few-shot 0"
    flags += f" --task.num-eval {SIZES['test']} --rollout.max-tokens {TASKS['sums'].max_tokens}"
    flags += f" --rollout.prompts {given.prompts} --device {given.device} --threads 1 --seed {seed}"
    flags += f" --optim.name muon --optim.lr {given.rate} --optim.aux-lr 1e-5 --optim.clip all"
    flags += " --optim.schedule linear --optim.warmup 0.05 --eval-every 25 --save-every 10"
    flags += f" --guard {guard} --steps {given.steps} --out {path}"
    typed = [sys.executable, "-m", "mesotron", "train", *flags.split(), "--task.system", SYSTEM]
    with (path.parent / f"{path.name}.log").open("w") as log:
        try:
            began = time.monotonic()
            subprocess.run(typed, stdout=log, stderr=log, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            return None
    rows = read_rows(path / "metrics.jsonl")
    curve = [(row["step"], row["eval/greedy"]) for row in rows if "eval/greedy" in row]
    actions = [row for row in read_rows(path / "events.jsonl") if row["kind"] != "watch"]
    after = path / "after.json"
    final = curve[-1][1] if curve else 0.0
    if after.exists():
        final = json.loads(after.read_text())["greedy"]["strict"]["value"]
    run = {
        "use": "reporting", "protocol": given.protocol, "guard": guard, "seed": seed,
        "rate": given.rate, "accuracy": final, "finished": after.exists(), "curve": curve,
        "steps": rows[-1]["step"] if rows else 0, "seconds": time.monotonic() - began,
        "actions": [[row["step"], row["kind"]] for row in actions],
    }  # fmt: skip
    shutil.rmtree(path / "checkpoints", ignore_errors=True)
    return run


def summarise(runs: list[Run]) -> None:
    """The paired difference with its t interval, of the seeds that have both."""
    from scipy.stats import t as student

    by = {(run["guard"], run["seed"]): run["accuracy"] for run in runs}
    D = [
        by["rollback", s] - by["off", s] for s in SEEDS if {("off", s), ("rollback", s)} <= set(by)
    ]
    if len(D) > 1:
        half = float(student.ppf(0.975, len(D) - 1)) * stdev(D) / math.sqrt(len(D))
        print(f"rollback minus off: {fmean(D):.3f} ± {half:.3f}, {len(D)} seeds")


if __name__ == "__main__":
    main()
