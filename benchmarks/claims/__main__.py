"""Claims that `mesotron train` decides, by PROTOCOL.md: guard, box, collapse and rates.

    python -m benchmarks.claims guard --model FOLDER --state STATE --rate RATE --result OUT.json.gz
    python -m benchmarks.claims box --model FOLDER --state STATE --result box.json.gz
    python -m benchmarks.claims collapse --state STATE --result collapse.json.gz --device cpu
    python -m benchmarks.claims rates --state STATE --result rates.json.gz --device cpu

guard: provoked collapses with `--guard rollback` and without, on the tournament's sums with its
warm start (STATE is the tournament's); RATE is eight times Muon's chosen rate. box: the sparse and
the two-part reward with boxed answers, Muon and AdamW, at a good rate and at four times it.
collapse: the same rewards and optimizers with the tiny model at a rate that collapses. rates: the
tiny model over a grid of rates. Finished runs are in the result after each one and not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean, stdev
from threading import Lock
from typing import Any

from benchmarks._lib.mps import mps
from benchmarks._lib.results import read_json, write_json
from benchmarks.smollm2.place import model_folder
from benchmarks.tournament import warm
from benchmarks.tournament.__main__ import protocol_commit
from benchmarks.tournament.tasks import SIZES, SYSTEM, TASKS, write_tasks
from mesotron.runs.files import read_rows

GUARD_SEEDS = range(240, 250)
BOX_SEEDS = range(230, 233)
COLLAPSE_SEEDS = range(255, 260)
RATES_SEEDS = range(260, 263)
RATES = {"muon": 4e-5, "adamw": 1e-5}  # best in RL on sums: benchmarks/ARCHIVE.md
COLLAPSE_RATE = 1.2e-2  # of the recipe arith_collapse
LOWEST = {
    "adamw": 1.25e-4,
    "muon": 1.25e-4,
    "pion": 5e-4,
}  # of rates a factor 2 apart
STEPS = {"guard": 100, "box": 80, "collapse": 60, "rates": 40}
FALLING = "--optim.clip all --optim.schedule linear --optim.warmup 0.05"
Run = dict[str, Any]
Cell = tuple[str, int, list[str]]  # name, seed, flags


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=STEPS)
    parser.add_argument("--model", default="tiny", help="a folder with a .gguf file, or a model")

    parser.add_argument(
        "--state",
        type=Path,
        required=True,
        help="of the tournament; for runs",
    )

    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--rate", type=float, help="of the guard's runs")
    parser.add_argument("--minutes", type=float, default=9)

    parser.add_argument(
        "--workers",
        type=int,
        default=5,
        help="each keeps up to 6 GB on disk",
    )

    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, help="for trials only")
    parser.add_argument("--prompts", type=int, help="for trials only")
    parser.add_argument("--protocol", default="", help="commit of PROTOCOL.md, without git")

    given = parser.parse_args()
    if given.study == "guard" and given.rate is None:
        parser.error("the study guard needs --rate")

    given.protocol = given.protocol or protocol_commit()
    given.until = time.monotonic() + 60 * given.minutes
    runs: list[Run] = read_json(given.result) if given.result.exists() else []
    known = {(run["name"], run["seed"]) for run in runs}
    cells = CELLS[given.study](given)
    writing = Lock()

    def one(cell: Cell) -> None:
        if (run := train(*cell, given)) is not None:
            with writing:
                runs.append(run)
                write_json(runs, given.result)
            print({key: value for key, value in run.items() if key != "curve"}, flush=True)

    shares = given.device == "cuda" and given.workers > 1
    side_by_side = mps(given.state, print) if shares else nullcontext()
    with side_by_side, ThreadPoolExecutor(given.workers) as pool:
        list(pool.map(one, [cell for cell in cells if cell[:2] not in known]))

    if given.study == "rates":
        print_rates(runs)

    for name in sorted({run["name"] for run in runs}):
        better = name.replace("sparse", "two_part").replace("off", "rollback")
        for key in ("accuracy", "mean"):
            compare(runs, better, name, key)


def guard_cells(given: argparse.Namespace) -> Iterator[Cell]:
    write_tasks(given.state / "tasks")
    folder = given.state / "start_sums"
    if not (folder / "config.json").exists():
        place = "tiny"
        adapter = None
        if given.model != "tiny":
            place = str(model_folder(given))
            adapter = None
            adapter = warm.make("sums", place, given.state)

        model, tokenizer = warm.start(place, adapter, "cpu")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    flags = f"{FALLING} --model.name {folder} --data {given.state / 'tasks' / 'sums' / 'reporting'}"
    flags += f" --task.format answer --task.num-eval {SIZES['test']} --rollout.max-tokens"
    flags += f" {TASKS['sums'].max_tokens} --optim.name muon --optim.lr {given.rate}"
    flags += " --optim.aux-lr 1e-5 --eval-every 25 --save-every 10 --guard"

    for seed in GUARD_SEEDS:
        for guard in ("off", "rollback"):
            yield guard, seed, [*flags.split(), guard, "--task.system", SYSTEM]


def box_cells(given: argparse.Namespace) -> Iterator[Cell]:
    folder = "tiny" if given.model == "tiny" else str(model_folder(given))
    flags = f"{FALLING} --model.name {folder} --task.name sums --task.format boxed"
    flags += " --task.few-shot 1 --task.num-eval 512 --rollout.max-tokens 16 --eval-every 20"
    flags += " --save-every 0"

    for seed in BOX_SEEDS:
        for optim, rate in RATES.items():
            for factor in (1, 4):
                for reward in ("sparse", "two_part"):
                    own = f"--guard off --reward {reward} --optim.name {optim}"
                    own += f" --optim.lr {factor * rate}"
                    own += " --optim.aux-lr 1e-5" * (optim == "muon")
                    yield f"{optim} x{factor} {reward}", seed, [*flags.split(), *own.split()]


def collapse_cells(given: argparse.Namespace) -> Iterator[Cell]:
    flags = f"--optim.lr {COLLAPSE_RATE} --eval-every 10 --save-every 0 --rollout.prompts 16"
    for seed in COLLAPSE_SEEDS:
        for optim in RATES:
            for reward in ("sparse", "two_part"):
                own = f"{flags} --guard off --reward {reward} --optim.name {optim}"
                yield f"{optim} {reward}", seed, own.split()


def rates_cells(_: argparse.Namespace) -> Iterator[Cell]:
    flags = "--eval-every 10 --save-every 0 --rollout.prompts 16 --guard off"
    grid = [(seed, k, optim) for seed in RATES_SEEDS for k in range(7) for optim in LOWEST]
    grid += [(seed, k, optim) for k in (7, 8) for optim in ("muon", "pion") for seed in RATES_SEEDS]

    for seed, k, optim in grid:
        rate = LOWEST[optim] * 2**k
        own = f"{flags} --optim.name {optim} --optim.lr {rate}"
        own += " --optim.aux-lr 2.5e-4" * (optim != "adamw")
        own += " --optim.cutoff aligned" * (optim == "pion")
        yield f"{optim} {rate:g}", seed, own.split()

    for seed in RATES_SEEDS:
        own = f"{flags} --optim.name muon --optim.lr 1e-6 --optim.aux-lr 1e-6"
        yield "muon 1e-06", seed, own.split()


CELLS = {
    "guard": guard_cells,
    "box": box_cells,
    "collapse": collapse_cells,
    "rates": rates_cells,
}


def train(name: str, seed: int, flags: list[str], given: argparse.Namespace) -> Run | None:
    """One run; None if there was no time for it."""
    path = given.state / given.study / f"{name.replace(' ', '-')}-{seed}"
    left = given.until - time.monotonic()
    if left < 20:
        return None

    shutil.rmtree(path, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    common = f"--rollout.generations 8 --device {given.device} --threads 1 --seed {seed}"
    common += f" --steps {given.steps or STEPS[given.study]} --out {path}"
    flags = [*common.split(), "--rollout.prompts", "32", *flags]
    flags += ["--rollout.prompts", str(given.prompts)] if given.prompts else []

    typed = [sys.executable, "-m", "mesotron", "train", "arith", *flags]
    with (path.parent / f"{path.name}.log").open("w") as log:
        try:
            began = time.monotonic()
            subprocess.run(
                typed,
                stdout=log,
                stderr=log,
                timeout=left,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None

    rows = read_rows(path / "metrics.jsonl")
    if not rows:  # it did not start, so it is no result
        print(f"{name}, seed {seed}: failed, see {path}.log", flush=True)
        return None

    curve = [(row["step"], row["eval/greedy"]) for row in rows if "eval/greedy" in row]
    actions = [row for row in read_rows(path / "events.jsonl") if row["kind"] != "watch"]
    run = {
        "use": "reporting",
        "protocol": given.protocol,
        "name": name,
        "seed": seed,
        "rate": given.rate,
        "accuracy": curve[-1][1] if curve else 0.0,
        "finished": False,
        "mean": fmean([value for _, value in curve] or [0.0]),
        "curve": curve,
        "steps": rows[-1]["step"],
        "seconds": time.monotonic() - began,
        "actions": [[row["step"], row["kind"]] for row in actions],
    }

    after = path / "after.json"
    if after.exists():
        greedy = json.loads(after.read_text())["greedy"]
        run |= {
            "finished": True,
            "accuracy": greedy["strict"]["value"],
            "lenient": greedy["lenient"]["value"],
            "formatted": greedy["rates"]["facts/formatted"],
        }

    shutil.rmtree(path / "checkpoints", ignore_errors=True)
    return run


def print_rates(runs: list[Run]) -> None:
    """Final accuracies by rate, collapsed runs in brackets; best and safe rates of each rule."""
    for optim in LOWEST:
        rates = sorted({float(run["name"].split()[1]) for run in runs if optim in run["name"]})
        means = {}
        safe = 0.0

        all_safe = True
        for rate in rates:
            mine = [run for run in runs if run["name"] == f"{optim} {rate:g}"]
            mine.sort(key=lambda run: run["seed"])
            bad = [collapsed(run) for run in mine]
            means[rate] = fmean(run["accuracy"] for run in mine)
            all_safe &= not any(bad)
            safe = rate if all_safe else safe
            ends = [f"{run['accuracy']:.3f}" for run in mine]
            shown = [f"[{end}]" if one else end for end, one in zip(ends, bad, strict=True)]

            print(
                f"| {optim} | {rate:g} | {', '.join(shown)} | {means[rate]:.3f} | "
                f"{fmean(run['mean'] for run in mine):.3f} |"
            )

        best = max(means, key=lambda rate: (means[rate], -rate))
        print(f"{optim}: best {best:g}, highest safe {safe:g}, margin {safe / best:g}")


def collapsed(run: Run) -> bool:
    """Whether a run ended below half of its best point, or below its start."""
    values = [value for _, value in run["curve"]]
    return run["accuracy"] < max(max(values) / 2, values[0])


def compare(runs: list[Run], better: str, other: str, key: str) -> None:
    """The paired difference with its t interval, of the seeds that have both."""
    from scipy.stats import t as student

    by = {(run["name"], run["seed"]): run[key] for run in runs}
    seeds = [seed for name, seed in by if name == other and (better, seed) in by]

    D = [by[better, seed] - by[other, seed] for seed in seeds]
    if better != other and len(D) > 1:
        half = float(student.ppf(0.975, len(D) - 1)) * stdev(D) / math.sqrt(len(D))
        print(f"{key}: {better} minus {other} {fmean(D):.3f} ± {half:.3f}, {len(D)} seeds")


if __name__ == "__main__":
    main()
