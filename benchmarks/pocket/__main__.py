"""`mesotron train --lr auto` against the recipe's rate, five times it and a fifth of it.

    python -m benchmarks.pocket --state FOLDER --result benchmarks/pocket/result.json.gz
    python -m benchmarks.pocket --state FOLDER --result gpu.json.gz --device cuda
    python -m benchmarks.pocket --state FOLDER --result benchmarks/pocket/kills.json --kills 10

The settings, arms and seeds are those of README.md, fixed before the reported runs. Runs share one
process, one after another; finished ones are in the result and not made again. --kills ends runs
with SIGKILL at random instants inside the search, resumes them, and compares all bits.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from benchmarks._lib.results import read_json, write_json
from benchmarks._lib.rows import where
from mesotron import cli
from mesotron.runs.files import read_rows
from mesotron.watch.diagnosis import diagnose_run
from mesotron.watch.engine import Monitor

SEEDS = (310, 311, 312)
ARMS = {"auto": None, "recipe": 1.0, "times 5": 5.0, "a fifth": 0.2}
SMALL = "--rollout.fast --batch 8 --group 8 --task.num-eval 200 --save-every 0 --device cpu"


class Setting(NamedTuple):
    rate: float  # the recipe's
    flags: str


# The tiny model: its default run, adapters, and a rate that leads the heats and dies after them.
TINY = {
    "arith": Setting(1e-3, f"arith {SMALL}"),
    "lora": Setting(1e-3, f"arith --lora 8 {SMALL}"),
    "late collapse": Setting(5e-3, f"arith_sparse_collapse --steps 40 {SMALL}"),
}
# A random model of one layer with a reward that has a spread, for the kills.
KILLED = (
    "train arith --lr auto --steps 40 --save-every 7 --keep 3 --reward earned:even --lr 1e-3 "
    "--device cpu --batch 4 --group 4 --max-tokens 4 --task.num-eval 3 --task.num-train 14 "
    "--eval-every 4 --model model --threads 1"
)
EVEN = """
def even(completion_ids, **_):
    return [sum(int(token) % 2 == 0 for token in ids) / 4 for ids in completion_ids]
"""
# Real models; not run yet.
GPU = {
    "sums": Setting(1e-4, "arith_smollm2 --save-every 0"),
    "countdown": Setting(1e-5, "own --model smollm2 --task rg:countdown --steps 150"),
    "gsm8k": Setting(1e-4, "gsm8k_smollm2 --steps 150"),
    "qwen": Setting(1e-6, "qwen05_boxed_muon_sgd --optim muon --steps 150"),
}
Run = dict[str, Any]


class PocketCell(NamedTuple):
    setting: str
    arm: str
    seed: int


def main() -> None:
    given = read_arguments()
    if given.kills:
        write_json(kill(given), given.result, indent=1)
        return

    settings = TINY if given.device == "cpu" else GPU
    runs: list[Run] = read_json(given.result) if given.result.exists() else []
    for cell in cells(settings, given.seeds, given.arms):
        if where(runs, setting=cell.setting, arm=cell.arm, seed=cell.seed):
            continue
        if given.settings and cell.setting not in given.settings:
            continue

        runs.append(train(cell, settings[cell.setting], given.state))
        write_json(runs, given.result)
        print(runs[-1], file=sys.stderr, flush=True)

    print_table(runs)
    if given.draw:
        draw(runs, given.draw)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--state", type=Path, required=True, help="for runs")
    add("--result", type=Path, required=True)
    add("--seeds", type=int, nargs="+", default=SEEDS)
    add("--settings", nargs="+", help="unset: all")
    add("--arms", nargs="+", default=[*ARMS])
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--draw", type=Path, help="a picture of the first searches")
    add("--kills", type=int, default=0, help="kill the search so often, and compare the ends")
    return parser.parse_args()


def cells(settings: dict[str, Setting], seeds: list[int], arms: list[str]) -> Iterator[PocketCell]:
    for seed in seeds:
        for name in settings:
            for arm in arms:
                yield PocketCell(name, arm, seed)


def train(cell: PocketCell, setting: Setting, state: Path) -> Run:
    path = state / f"{cell.setting}-{cell.arm}-{cell.seed}".replace(" ", "-")
    shutil.rmtree(path, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)

    factor = ARMS[cell.arm]
    lr = "auto" if factor is None else f"{setting.rate * factor:g}"
    words = f"train {setting.flags} --lr {lr} --seed {cell.seed} --threads 1 --out {path}"
    began = time.process_time()
    with (path.parent / f"{path.name}.log").open("w") as log, redirect_stdout(log):
        code = cli.main(words.split())

    run = {**cell._asdict(), "rate": setting.rate * (factor or 1.0), "code": code}
    run |= {"seconds": round(time.process_time() - began, 1)} | read_run(path)
    shutil.rmtree(path / "checkpoints", ignore_errors=True)
    return run


def read_run(path: Path) -> Run:
    rows = read_rows(path / "metrics.jsonl")
    monitor = Monitor()
    monitor.replay(rows, ())

    run: Run = {
        "rewards": [round(row["reward"], 4) for row in rows if "reward" in row],
        "condition": diagnose_run(monitor).condition if rows else "dead",
        "steps": len(rows),
        "extra": 0,
        "accuracy": 0.0,
    }
    for name in ("before", "after"):
        file = path / f"{name}.json"
        if file.exists():
            accuracy = read_json(file)["greedy"]["strict"]["value"]
            run["start" if name == "before" else "accuracy"] = accuracy

    record = path / "pocket.json"
    if record.exists():
        found = read_json(record)
        run["extra"] = found["spent"]
        run["searches"] = [shorten(search) for search in found["searches"]]

    return run


def shorten(search: Run) -> Run:
    """A search without the rewards of each prompt."""
    forks = []
    for fork in search["forks"]:
        steps = [
            [step["step"], round(step["travelled"], 5), round(mean(step["rewards"].values()), 4)]
            for step in fork["steps"]
        ]
        kept = {key: fork[key] for key in ("factor", "rate", "planned", "conditions")}
        forks.append({**kept, "steps": steps})

    return {"step": search["step"], "choice": search["choice"], "forks": forks}


def print_table(runs: list[Run]) -> None:
    print("| setting | arm | final accuracy by seed | mean | dead | steps trained |")
    print("|---|---|---|---|---|---|")
    for setting in dict.fromkeys(run["setting"] for run in runs):
        for arm in ARMS:
            rows = sorted(where(runs, setting=setting, arm=arm), key=lambda run: run["seed"])
            if not rows:
                continue

            ends = ", ".join(f"{run['accuracy']:.3f}" for run in rows)
            average = mean(run["accuracy"] for run in rows)
            dead = sum(is_dead(run) for run in rows)
            cost = mean((run["steps"] + run["extra"]) / run["steps"] for run in rows)
            print(f"| {setting} | {arm} | {ends} | {average:.3f} | {dead} | {cost:.2f} |")


def is_dead(run: Run) -> bool:
    """Below the start, or below half of the best rolling reward."""
    return run["accuracy"] < run.get("start", 0.0) or run["condition"] == "dead"


def draw(runs: list[Run], path: Path) -> None:
    """Reward of each fork over the distance it went, one panel for each search at the start."""
    import matplotlib.pyplot as plt

    searched = [run for run in runs if run.get("searches")]
    columns = sorted({run["seed"] for run in searched})
    lines = list(dict.fromkeys(run["setting"] for run in searched))
    size = (3.2 * len(columns), 2.6 * len(lines))
    figure, axes = plt.subplots(len(lines), len(columns), figsize=size, squeeze=False, sharey=True)

    for run in searched:
        place = axes[lines.index(run["setting"])][columns.index(run["seed"])]
        first = run["searches"][0]
        for fork in sorted(first["forks"], key=lambda fork: fork["factor"]):
            is_chosen = fork["factor"] == first["choice"]["factor"]
            went = [step[1] for step in fork["steps"]]
            rewards = [step[2] for step in fork["steps"]]
            label = f"{fork['rate']:.3g}{', chosen' if is_chosen else ''}"
            place.plot(went, rewards, marker=".", linewidth=3 if is_chosen else 1, label=label)

        place.set_xscale("symlog", linthresh=1e-4)
        place.set_title(f"{run['setting']}, seed {run['seed']}", fontsize=9)
        place.legend(fontsize=6)

    figure.supxlabel("distance: sum of the rates", fontsize=9)
    figure.supylabel("reward of the batch", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


# Kills


def kill(given: argparse.Namespace) -> Run:
    """Run searches in forked copies of this process, end each with SIGKILL at a random row of its
    forks, resume it, and compare."""
    # Everything is imported before the first copy is made.
    import mesotron.rlvr.session  # noqa: F401
    from support.rlvr_tiny import save_arith_model

    given.state.mkdir(parents=True, exist_ok=True)
    os.chdir(given.state)
    sys.path.insert(0, str(given.state))
    Path("earned.py").write_text(EVEN)
    save_arith_model(Path("model"))

    shutil.rmtree("whole", ignore_errors=True)
    wait(start(f"{KILLED} --out whole"))
    most = fork_rows(Path("whole"))
    draw = random.Random(310)
    kills: list[Run] = []

    for number in range(given.kills):
        path = Path(f"killed-{number}")
        shutil.rmtree(path, ignore_errors=True)
        child = start(f"{KILLED} --out {path}")

        target = draw.randint(0, most)
        while fork_rows(path) < target or not any(path.glob("pocket/*")):
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.3))

        os.kill(child, signal.SIGKILL)
        wait(child)
        at = {"fork_rows": fork_rows(path), "forks": len([*path.glob("pocket/*")])}

        wait(start(f"train --resume {path} --trust --threads 1"))
        same = digest(path) == digest(Path("whole"))
        kills.append({**at, "same": same})
        print(kills[-1], file=sys.stderr, flush=True)

    return {"words": KILLED, "fork_rows": most, "kills": kills}


def fork_rows(path: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in path.glob("pocket/*/metrics.jsonl"))


def start(words: str) -> int:
    child = os.fork()
    if child:
        return child

    with open(os.devnull, "w") as null, redirect_stdout(null):
        code = cli.main(words.split())
    os._exit(code)


def wait(child: int) -> None:
    os.waitpid(child, 0)


def digest(path: Path) -> Any:
    """Weights and optimizer as hashes, rows without times, and the record of the search."""
    manifest = json.loads((path / "checkpoints/checkpoint-40/manifest.json").read_text())["files"]
    rows = []
    for row in read_rows(path / "metrics.jsonl"):
        rows.append({key: row[key] for key in row if "time" not in key})

    weights = {name: manifest[name] for name in manifest if name.endswith(".safetensors")}
    return weights, rows, read_json(path / "pocket.json")["searches"]


if __name__ == "__main__":
    main()
