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
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from threading import Lock
from typing import Any, NamedTuple

from benchmarks._lib.mps import mps
from benchmarks._lib.results import read_json, write_json
from benchmarks._lib.rows import distinct, mean_of, values, where
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
LOWEST = {"adamw": 1.25e-4, "muon": 1.25e-4, "pion": 5e-4}  # of rates a factor 2 apart
MORE_RATES = ("muon", "pion")  # had not collapsed at the seventh
REWARDS = ("sparse", "two_part")
STEPS = {"guard": 100, "box": 80, "collapse": 60, "rates": 40}
FALLING = "--optim.clip all --optim.schedule linear --optim.warmup 0.05"
Run = dict[str, Any]


class ClaimCell(NamedTuple):
    name: str
    seed: int
    flags: list[str]


def main() -> None:
    given = read_arguments()
    given.protocol = given.protocol or protocol_commit()
    given.until = time.monotonic() + 60 * given.minutes

    runs: list[Run] = read_json(given.result) if given.result.exists() else []
    cells = []
    for cell in CELLS[given.study](given):
        if not where(runs, name=cell.name, seed=cell.seed):
            cells.append(cell)

    writing = Lock()

    def make(cell: ClaimCell) -> None:
        run = train(cell, given)
        if run is None:
            return

        with writing:
            runs.append(run)
            write_json(runs, given.result)
        print({key: value for key, value in run.items() if key != "curve"}, flush=True)

    with (
        mps(given.state, print, wanted=given.device == "cuda" and given.workers > 1),
        ThreadPoolExecutor(given.workers) as pool,
    ):
        list(pool.map(make, cells))

    show(given.study, runs)


def show(study: str, runs: list[Run]) -> None:
    """What the study compares."""
    if study == "rates":
        print_rates(runs)

    for name in sorted(distinct(runs, "name")):
        better = name.replace("sparse", "two_part").replace("off", "rollback")
        if better != name:
            compare(runs, better, name, "accuracy")
            compare(runs, better, name, "mean")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("study", choices=STEPS)
    add("--model", default="tiny", help="a folder with a .gguf file, or a model")
    add("--state", type=Path, required=True, help="of the tournament; for runs")
    add("--result", type=Path, required=True)
    add("--rate", type=float, help="of the guard's runs")
    add("--minutes", type=float, default=9)
    add("--workers", type=int, default=5, help="each keeps up to 6 GB on disk")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--steps", type=int, help="for trials only")
    add("--prompts", type=int, help="for trials only")
    add("--protocol", default="", help="commit of PROTOCOL.md, without git")

    given = parser.parse_args()
    if given.study == "guard" and given.rate is None:
        parser.error("the study guard needs --rate")
    return given


def guard_cells(given: argparse.Namespace) -> Iterator[ClaimCell]:
    write_tasks(given.state / "tasks")
    folder = given.state / "start_sums"
    if not (folder / "config.json").exists():
        place = "tiny"
        adapter = None
        if given.model != "tiny":
            place = str(model_folder(given))
            adapter = warm.make("sums", place, given.state)

        model, tokenizer = warm.start(place, adapter, "cpu")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    flags = f"{FALLING} --model {folder} --data {given.state / 'tasks' / 'sums' / 'reporting'}"
    flags += f" --task.format answer --task.num-eval {SIZES['test']} --max-tokens"
    flags += f" {TASKS['sums'].max_tokens} --optim muon --lr {given.rate}"
    flags += " --optim.aux-lr 1e-5 --eval-every 25 --save-every 10 --guard"

    for seed in GUARD_SEEDS:
        for guard in ("off", "rollback"):
            yield ClaimCell(guard, seed, [*flags.split(), guard, "--task.system", SYSTEM])


def box_cells(given: argparse.Namespace) -> Iterator[ClaimCell]:
    folder = "tiny" if given.model == "tiny" else str(model_folder(given))
    flags = f"{FALLING} --model {folder} --task sums --task.format boxed"
    flags += " --task.few-shot 1 --task.num-eval 512 --max-tokens 16 --eval-every 20"
    flags += " --save-every 0"

    for seed, optim, factor, reward in product(BOX_SEEDS, RATES, (1, 4), REWARDS):
        own = f"{flags} --guard off --reward {reward} --optim {optim}"
        own += f" --lr {factor * RATES[optim]}"
        if optim == "muon":
            own += " --optim.aux-lr 1e-5"
        yield ClaimCell(f"{optim} x{factor} {reward}", seed, own.split())


def collapse_cells(given: argparse.Namespace) -> Iterator[ClaimCell]:
    flags = f"--lr {COLLAPSE_RATE} --eval-every 10 --save-every 0 --batch 16"
    for seed, optim, reward in product(COLLAPSE_SEEDS, RATES, REWARDS):
        own = f"{flags} --guard off --reward {reward} --optim {optim}"
        yield ClaimCell(f"{optim} {reward}", seed, own.split())


def rates_cells(_: argparse.Namespace) -> Iterator[ClaimCell]:
    flags = "--eval-every 10 --save-every 0 --batch 16 --guard off"
    grid = [*product(RATES_SEEDS, range(7), LOWEST), *product(RATES_SEEDS, (7, 8), MORE_RATES)]

    for seed, k, optim in grid:
        rate = LOWEST[optim] * 2**k
        own = f"{flags} --optim {optim} --lr {rate}"
        if optim != "adamw":
            own += " --optim.aux-lr 2.5e-4"
        if optim == "pion":
            own += " --optim.cutoff aligned"
        yield ClaimCell(f"{optim} {rate:g}", seed, own.split())

    for seed in RATES_SEEDS:
        own = f"{flags} --optim muon --lr 1e-6 --optim.aux-lr 1e-6"
        yield ClaimCell("muon 1e-06", seed, own.split())


CELLS = {
    "guard": guard_cells,
    "box": box_cells,
    "collapse": collapse_cells,
    "rates": rates_cells,
}


def train(cell: ClaimCell, given: argparse.Namespace) -> Run | None:
    """One run; None if there was no time for it."""
    path = given.state / given.study / f"{cell.name.replace(' ', '-')}-{cell.seed}"
    left = given.until - time.monotonic()
    if left < 20:
        return None

    shutil.rmtree(path, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    typed = command(cell, given, path)
    began = time.monotonic()
    with (path.parent / f"{path.name}.log").open("w") as log:
        try:
            subprocess.run(typed, stdout=log, stderr=log, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            return None

    rows = read_rows(path / "metrics.jsonl")
    if not rows:  # it did not start, so it is no result
        print(f"{cell.name}, seed {cell.seed}: failed, see {path}.log", flush=True)
        return None

    run = {
        "use": "reporting",
        "protocol": given.protocol,
        "name": cell.name,
        "seed": cell.seed,
        "rate": given.rate,
        "seconds": time.monotonic() - began,
    }
    run |= course(path, rows) | end(path)
    shutil.rmtree(path / "checkpoints", ignore_errors=True)
    return run


def command(cell: ClaimCell, given: argparse.Namespace, path: Path) -> list[str]:
    flags = f"--group 8 --device {given.device} --threads 1 --seed {cell.seed}"
    flags += f" --steps {given.steps or STEPS[given.study]} --out {path} --batch 32"

    typed = [sys.executable, "-m", "mesotron", "train", "arith", *flags.split(), *cell.flags]
    if given.prompts:
        typed += ["--batch", str(given.prompts)]
    return typed


def course(path: Path, rows: list[Run]) -> Run:
    """How a run went: accuracy over the steps, and what the guard did."""
    curve = [(row["step"], row["eval/greedy"]) for row in rows if "eval/greedy" in row]
    accuracies = values(rows, "eval/greedy") or [0.0]
    events = read_rows(path / "events.jsonl")
    return {
        "accuracy": accuracies[-1],
        "finished": False,
        "mean": fmean(accuracies),
        "curve": curve,
        "steps": rows[-1]["step"],
        "actions": [[row["step"], row["kind"]] for row in events if row["kind"] != "watch"],
    }


def end(path: Path) -> Run:
    """The final evaluation of a run that came to its end."""
    after = path / "after.json"
    if not after.exists():
        return {}

    greedy = read_json(after)["greedy"]
    return {
        "finished": True,
        "accuracy": greedy["strict"]["value"],
        "lenient": greedy["lenient"]["value"],
        "formatted": greedy["rates"]["facts/formatted"],
    }


def print_rates(runs: list[Run]) -> None:
    """Final accuracies by rate, collapsed runs in brackets; best and safe rates of each rule."""
    for optim in LOWEST:
        names = [name for name in distinct(runs, "name") if optim in name]
        means: dict[float, float] = {}
        unsafe = []

        for rate in sorted(float(name.split()[1]) for name in names):
            seeds = where(runs, name=f"{optim} {rate:g}")
            seeds.sort(key=lambda run: run["seed"])
            means[rate] = mean_of(seeds, "accuracy")
            if any(map(collapsed, seeds)):
                unsafe.append(rate)

            ends = ", ".join(map(final, seeds))
            whole = mean_of(seeds, "mean")
            print(f"| {optim} | {rate:g} | {ends} | {means[rate]:.3f} | {whole:.3f} |")

        best = max(means, key=lambda rate: (means[rate], -rate))
        safe = max([rate for rate in means if rate < min(unsafe, default=math.inf)], default=0.0)
        print(f"{optim}: best {best:g}, highest safe {safe:g}, margin {safe / best:g}")


def final(run: Run) -> str:
    """The last accuracy, in brackets if the run collapsed."""
    text = f"{run['accuracy']:.3f}"
    return f"[{text}]" if collapsed(run) else text


def collapsed(run: Run) -> bool:
    """Whether a run ended below half of its best point, or below its start."""
    accuracies = [value for _, value in run["curve"]]
    return run["accuracy"] < max(max(accuracies) / 2, accuracies[0])


def compare(runs: list[Run], better: str, other: str, key: str) -> None:
    """The paired difference with its t interval, of the seeds that have both."""
    from scipy.stats import t as student

    ahead = {run["seed"]: run[key] for run in where(runs, name=better)}
    behind = {run["seed"]: run[key] for run in where(runs, name=other)}
    D = []
    for seed in behind:
        if seed in ahead:
            D.append(ahead[seed] - behind[seed])

    if len(D) > 1:
        half = float(student.ppf(0.975, len(D) - 1)) * stdev(D) / math.sqrt(len(D))
        print(f"{key}: {better} minus {other} {fmean(D):.3f} ± {half:.3f}, {len(D)} seeds")


if __name__ == "__main__":
    main()
