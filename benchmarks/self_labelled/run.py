"""Label-free training, long enough to collapse: plain voting, M-GRPO, Co-rewarding-II and more.

    python -m benchmarks.self_labelled.run --seeds 120 --report 223 224 225 \
        --also vote mgrpo corewarding --workers 2
    python -m benchmarks.self_labelled.run --smollm2 smollm2 --device cuda --workers 8 --seeds 120 \
        --report 220 221 222 --minutes 25 --out /tmp/horizon --result OUT/horizon.json

The long horizon of PROTOCOL.md: the tiny model on a CPU, then SmolLM2 from a supervised start that
is made first. Each run is `mesotron train` in a process of its own, several at once, at a constant
rate and with its method's published KL weight; `grpo` has the gold answers and shows what the rate
itself does. A run that is over, in OUT or in the result that `--known` names, is not made again,
one that was stopped is continued, one that has collapsed is ended. The result holds the greedy
held-out accuracy and what was logged, every tenth step; with `--minutes 0` of the runs so far.
"""

import argparse
import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from benchmarks._lib.mps import mps
from benchmarks._lib.results import read_json, write_json
from benchmarks._lib.rows import Row, values
from benchmarks.tournament.__main__ import protocol_commit
from mesotron.runs.files import read_rows

HERE = Path(__file__).parent
CONTENDERS = {
    "vote": "--objective.name vote",
    "mgrpo": "--objective.name mgrpo",
    "mgrpo_slow": "--objective.name mgrpo --objective.momentum 0.999",
    "corewarding": "--objective.name corewarding",
    # Ours: a slower anchor, labels only where its votes are unanimous, and both.
    "slow": "--objective.name corewarding --objective.momentum 0.999",
    "sure": "--objective.name corewarding --objective.min-vote-share 0.9",
    "sure_slow": "--objective.name corewarding --objective.momentum 0.999 "
    "--objective.min-vote-share 0.9",
    # Unanimous while the policy keeps exploring: one that sharpens agrees with itself for nothing.
    "sure_open": "--objective.name corewarding --objective.min-vote-share 0.9 "
    "--objective.entropy-target 0.1 --objective.entropy-bonus 0.005",
    # No step in batches without a signal, where the KL term alone would move Muon at full size.
    "mgrpo_skip": "--objective.name mgrpo --objective.dynamic-sampling skip",
    # The same for the entropy bonus.
    "sure_open_skip": "--objective.name corewarding --objective.min-vote-share 0.9 "
    "--objective.entropy-target 0.1 --objective.entropy-bonus 0.005 "
    "--objective.dynamic-sampling skip",
    "grpo": "--objective.name grpo",
}
TINY = "arith_mgrpo --rollout.fast true"
# SmolLM2's setting, and the supervised start that it has: about 0.5.
SMOLLM2 = "arith_smollm2 --optim muon --optim.aux-lr 5e-6"
WARM = (
    "--task sums --task.format answer --task.few-shot 2 --task.num-eval 512 --batch 32 "
    "--steps 100 --optim adamw --lr 2e-5 --optim.schedule constant --seed 77"
)
SYSTEM = ("--task.system", "Reply with ANSWER: n.")
WINDOW = 4  # evaluations of a mean
SURVIVES = 0.95
COLLAPSED = 0.8  # of the best mean
Curve = list[tuple[int, float]]
LOGGED = (
    "reward",
    "facts/correct",
    "facts/formatted",
    "votes/share",
    "votes/abstained",
    "votes/label_accuracy",
    "answers/top_share",
    "answers/distinct_in_group",
    "entropy",
    "kl",
    "completions/mean_length",
)


class MethodCell(NamedTuple):
    contender: str
    lr: float
    seed: int


def main() -> None:
    given = read_arguments()
    given.protocol = given.protocol or protocol_commit()
    given.until = time.monotonic() + 60 * given.minutes
    given.known = read_known(given.known, given.steps)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.smollm2 is not None:
        given.warm = given.warm or warm_start(given)

    shares = given.device == "cuda" and given.workers > 1
    with mps(given.out, print, wanted=shares), ThreadPoolExecutor(given.workers) as pool:
        cells = cells_of(given.contenders, given.lr, given.seeds)
        found = run_all(cells, given, pool)
        left = []
        for cell in cells:
            if not is_done(cell, given):
                left.append(folder(cell, given).name)

        if left:
            print("not finished; start again to continue:", *left)
        elif given.report:
            names = two_best(found)
            print("the two best:", *names, flush=True)
            names += [name for name in given.also if name not in names]
            found += run_all(cells_of(names, given.lr, given.report), given, pool)

    write_json(found, given.result)


def read_arguments() -> argparse.Namespace:
    usual = [name for name in CONTENDERS if not name.endswith("_skip")]  # another question
    parser = argparse.ArgumentParser(description="Training without gold labels")
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/self_labelled"))
    add("--result", type=Path, default=HERE / "result.json.gz")
    add("--known", type=Path, help="a result whose finished runs are taken over")
    add("--smollm2", metavar="MODEL", help="the long horizon: smollm2 or a folder")
    add("--contenders", nargs="+", choices=CONTENDERS, default=usual)
    add("--seeds", type=int, nargs="+", default=[120])
    report = "seeds for the two best label-free methods"
    add("--report", type=int, nargs="+", default=[], metavar="SEED", help=report)
    also = "further methods to report"
    add("--also", nargs="+", choices=CONTENDERS, default=[], help=also)
    add("--lr", type=float, nargs="+")
    add("--steps", type=int, default=1500)
    add("--warm", type=Path, help="a supervised start that is there already")
    add("--prompts", type=int)
    add("--protocol", default="", help="commit of PROTOCOL.md, without git")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--workers", type=int, default=os.cpu_count(), help="runs at once")
    add("--minutes", type=float, default=math.inf, help="stop, resumable, after")
    given = parser.parse_args()

    long = given.smollm2 is not None
    given.lr = given.lr or [1e-5 if long else 3e-4]
    given.prompts = given.prompts or (32 if long else 8)
    return given


def cells_of(names: list[str], rates: list[float], seeds: list[int]) -> list[MethodCell]:
    """Seed by seed, so that all methods have come equally far when the time is up."""
    return [MethodCell(name, lr, seed) for seed, lr, name in product(seeds, rates, names)]


def run_all(
    cells: list[MethodCell], given: argparse.Namespace, pool: ThreadPoolExecutor
) -> list[Row]:
    list(pool.map(lambda cell: train(cell, given), cells))

    found = []
    for cell in cells:
        run = summarise(cell, given)
        if run:
            found.append(run)
            shown = [run[key] for key in ("contender", "lr", "seed", "steps", "kept")]
            print(*shown, run["greedy"])
    return found


def two_best(found: list[Row]) -> list[str]:
    """The label-free methods that survive, then by the mean of the last four evaluations."""
    survived: dict[str, list[bool]] = defaultdict(list)
    lasts: dict[str, list[float]] = defaultdict(list)
    for run in found:
        if run["contender"] != "grpo":
            survived[run["contender"]].append(run["kept"] >= SURVIVES)
            lasts[run["contender"]].append(fmean(value for _, value in run["greedy"][-WINDOW:]))

    def place(name: str) -> tuple[float, float]:
        return fmean(survived[name]), fmean(lasts[name])

    return sorted(lasts, key=place, reverse=True)[:2]


def folder(cell: MethodCell, given: argparse.Namespace) -> Path:
    return given.out / f"{cell.contender}-{cell.lr:g}-{cell.seed}"


def warm_start(given: argparse.Namespace) -> Path:
    """The last checkpoint of supervised training on the same task."""
    path = given.out / "warm"
    if not (path / "result.json").exists():
        typed = [sys.executable, "-m", "mesotron", "sft", "--model", given.smollm2]
        flags = f"{WARM} --device {given.device} --out {path}"
        subprocess.run([*typed, *flags.split(), *SYSTEM], check=True)

    checkpoints = (path / "checkpoints").glob("checkpoint-*")
    return max(checkpoints, key=lambda folder: int(folder.name.removeprefix("checkpoint-")))


def train(cell: MethodCell, given: argparse.Namespace) -> None:
    """Train one run, unless it is finished or the time is up."""
    path = folder(cell, given)
    left = given.until - time.monotonic()
    if is_done(cell, given) or left < 5:
        return

    typed = command(cell, given)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with (given.out / f"{path.name}.log").open("a") as log:
        process = subprocess.Popen(typed, stdout=log, stderr=log, env=env)
        while process.poll() is None:
            if time.monotonic() > given.until or is_over(path):
                process.terminate()  # saves a checkpoint and exits
                process.wait()
                return

            time.sleep(2)

    if process.returncode:
        print(f"{path.name} failed; see {log.name}", flush=True)


def read_known(result: Path | None, steps: int) -> dict[MethodCell, Row]:
    """Runs of an earlier result that are over."""
    known = {}
    for run in read_json(result) if result else []:
        if run["steps"] >= steps or has_collapsed(run["greedy"]):
            known[MethodCell(run["contender"], run["lr"], run["seed"])] = run
    return known


def is_done(cell: MethodCell, given: argparse.Namespace) -> bool:
    return cell in given.known or is_over(folder(cell, given))


def is_over(path: Path) -> bool:
    return (path / "result.json").exists() or has_collapsed(curve(path))


def has_collapsed(points: Curve) -> bool:
    """Whether a curve has fallen, whatever came after that."""
    accuracies = [value for _, value in points]
    ends = range(WINDOW, len(accuracies) + 1)
    return any(kept(accuracies[:k]) < COLLAPSED for k in ends)


def curve(path: Path) -> Curve:
    """Steps and greedy accuracy so far; the first row has that of the start."""
    rows = [row for row in read_rows(path / "metrics.jsonl") if "eval/greedy" in row]
    points = [(row["step"], row["eval/greedy"]) for row in rows]
    if points:
        points[0] = (0, points[0][1])
    return points


def command(cell: MethodCell, given: argparse.Namespace) -> list[str]:
    """The run's command line; resumes a stopped one."""
    path = folder(cell, given)
    typed = [sys.executable, "-m", "mesotron", "train"]
    if (path / "config.json").exists():
        return [*typed, "--resume", str(path)]

    recipe = TINY
    dtype = "float32"
    every = 10
    if given.warm is not None:
        recipe = f"{SMOLLM2} --model {given.warm}"
        every = 25
        dtype = "mixed" if given.device == "cuda" else "float32"

    method = CONTENDERS[cell.contender]
    beta = published_beta(method.split()[1])
    flags = f"{recipe} {method} --out {path} --seed {cell.seed} --steps {given.steps}"
    flags += f" --lr {cell.lr} --optim.schedule constant --objective.beta {beta}"
    flags += f" --batch {given.prompts} --device {given.device} --model.dtype {dtype}"
    flags += f" --eval-every {every} --save-every 0 --guard off --threads 1"
    return [*typed, *flags.split()]


def published_beta(objective: str) -> float:
    """The KL weight of a self-labeled method's paper; none with gold labels, as in the recipe."""
    from mesotron.config import ObjectiveConfig
    from mesotron.rlvr.objectives import resolve

    if objective == "grpo":
        return 0.0
    return resolve(ObjectiveConfig(name=objective), 8).beta  # pyright: ignore


def summarise(cell: MethodCell, given: argparse.Namespace) -> Row | None:
    """One run's curves; None if it has not started."""
    rows = read_rows(folder(cell, given) / "metrics.jsonl")
    if cell in given.known or not rows:
        return given.known.get(cell)

    greedy = curve(folder(cell, given))
    return {
        "use": "reporting" if cell.seed >= 200 else "tuning",
        "protocol": given.protocol,
        "contender": cell.contender,
        "lr": cell.lr,
        "seed": cell.seed,
        "steps": rows[-1]["step"],
        "seconds": sum(row["time/step"] for row in rows),
        "greedy": greedy,
        "kept": kept([value for _, value in greedy]),
        "logged": {key: tens(rows, key) for key in LOGGED if any(key in row for row in rows)},
    }


def kept(accuracies: list[float]) -> float:
    """The last mean of four evaluations over the best one; a run survives with 0.95."""
    starts = range(len(accuracies) - WINDOW + 1)
    means = [fmean(accuracies[k : k + WINDOW]) for k in starts]
    return means[-1] / max(*means, 1e-9) if means else 1.0


def tens(rows: list[Row], key: str) -> list[float | None]:
    """Means of ten rows each, to five digits; None where no row has the value."""
    means: list[float | None] = []
    for first in range(0, len(rows), 10):
        logged = values(rows[first : first + 10], key)
        means.append(float(f"{fmean(logged):.5g}") if logged else None)
    return means


if __name__ == "__main__":
    main()
