"""Who trains a vision-language-action policy best? Rates, then seeds, then Pion's strength.

Behaviour cloning on our own simulated worlds (not LIBERO; no pretrained backbone; simulator and
experts are ours). Every contender gets the same rates, data order, weights at the start and scenes.
Rates are chosen on validation scenes; what is reported is played on others. Several trainings share
one GPU, each in a process of its own that also plays its episodes.

    python3 benchmarks/vla/study.py --state runs/vla_study --out results --seconds 500

What was finished is kept in STATE/cells.jsonl: the same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import queue
import time
import traceback
from pathlib import Path
from typing import Any

RATES = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2)
PARTS = ("vision", "language", "fusion", "action")
CONTENDERS = {
    "adamw": dict.fromkeys(PARTS, "adamw"),
    "muon": dict.fromkeys(PARTS, "muon"),
    "muon_pion": dict.fromkeys(PARTS, "muon") | {"action": "pion"},
    "pion": dict.fromkeys(PARTS, "pion"),
    # An exact SVD of every action matrix at every step: a single cell, at Muon's best rate.
    "muon_low_rank": dict.fromkeys(PARTS, "muon") | {"action": "low_rank"},
}
SLOW = "muon_low_rank"
WORLDS = {
    "blocks": {"name": "blocks", "pixels": 24},
    "object10": {"name": "object10", "pixels": 64},
    "mt10": {"name": "metaworld", "pixels": 64},
}
EPISODES = {"blocks": 300, "object10": 2000, "mt10": 500}
VALIDATION, TEST = 10, 20  # episodes of each task
SEEDS = 3
# In the calibration Pion's noise edge moved the action module a quarter as far as Muon did.
MATCHED = 4
ALONE = 30  # seconds in which the first process may compile
GRACE = 20  # seconds for what is being played when the time is up
Cell = dict[str, Any]


def main() -> None:
    args = read_arguments()
    args.state.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.time()
    deadline = began + args.seconds
    say(began, f"{args.world}: {args.size} policy, {args.small} and {args.full} steps")
    facts = make_data(args, began)
    cells = Cells(args.state / f"{args.world}.cells.jsonl", args.cells)
    say(began, f"{len(cells.done)} cells are there already")
    mps = start_mps(args, began)
    try:
        run(args, cells, began, deadline)
    finally:
        stop_mps(mps)
        result = {"settings": settings(args), "facts": facts, "cells": list(cells.done.values())}
        path = args.out / f"{args.world}.json"
        path.write_text(json.dumps(result, indent=1))
        say(began, f"{len(cells.done)} cells in {path}; {cells.left(args)} to go")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", choices=WORLDS, default="object10")
    parser.add_argument("--state", type=Path, default=Path("runs/vla_study"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", type=Path, help="cells of an earlier call, brought back")
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", default="small")
    parser.add_argument("--heads", nargs="+", default=["l1", "flow"])
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--small", type=int, default=400)
    parser.add_argument("--full", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--episodes", type=int)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--validation", type=int, default=VALIDATION)
    parser.add_argument("--test", type=int, default=TEST)
    parser.add_argument("--no-mps", action="store_true")
    return parser.parse_args()


def settings(args: argparse.Namespace) -> dict[str, Any]:
    return {key: str(v) if isinstance(v, Path) else v for key, v in vars(args).items()}


def say(began: float, sentence: str) -> None:
    print(f"[{time.time() - began:5.0f} s] {sentence}", flush=True)


# Data and controls.


def demos_config(args: argparse.Namespace) -> Any:
    from mesotron.config.vla import DemosConfig, WorldConfig

    episodes = args.episodes or EPISODES[args.world]
    world = WorldConfig(**WORLDS[args.world])
    return DemosConfig(world=world, out=args.state / f"{args.world}-demos", episodes=episodes)


def make_data(args: argparse.Namespace, began: float) -> dict[str, Any]:
    """Demonstrations on all cores, and how the expert does on the test scenes."""
    from mesotron.vla.demos.make import write_demos
    from mesotron.vla.interface import EVAL_SEED
    from mesotron.vla.rollout import evaluate_expert

    path = args.state / f"{args.world}.facts.json"
    if path.exists():
        return json.loads(path.read_text())
    config = demos_config(args)
    start = time.time()
    write_demos(config, say=lambda sentence: say(began, sentence))
    made = time.time() - start
    expert = evaluate_expert(config.world, range(EVAL_SEED, EVAL_SEED + args.test))
    facts = {"demos_seconds": made, "episodes": config.episodes, "expert": expert.to_json()}
    facts["expert"].pop("episodes")
    say(began, f"demonstrations in {made:.0f} s; expert {expert.success:.2f}")
    path.write_text(json.dumps(facts))
    return facts


# Which cells there are, and which come next.


def key_of(cell: Cell) -> str:
    names = ("head", "contender", "rate", "strength", "steps", "seed")
    scale = cell.get("action_scale", 1)
    return "/".join([*(str(cell[name]) for name in names), *([f"x{scale}"] if scale != 1 else [])])


class Cells:
    """What has been finished, on disk as it comes."""

    def __init__(self, path: Path, earlier: Path | None) -> None:
        self.path, self.done = path, {}
        self.failed: dict[str, str] = {}
        for source in (earlier, path):
            if source is not None and source.exists():
                for cell in read_cells(source):
                    self.done[key_of(cell)] = cell

    def add(self, cell: Cell) -> None:
        self.done[key_of(cell)] = cell
        with self.path.open("a") as file:
            file.write(json.dumps(cell) + "\n")

    def next(self, args: argparse.Namespace, busy: set[str]) -> Cell | None:
        """The next cell that can run and nobody has; sweeps first, then what follows from them."""
        for cell in plan(args, self.done):
            key = key_of(cell)
            if key not in self.done and key not in busy and key not in self.failed:
                return cell
        return None

    def left(self, args: argparse.Namespace) -> int:
        return sum(key_of(cell) not in self.done for cell in plan(args, self.done))


def read_cells(path: Path) -> list[Cell]:
    if path.suffix == ".json":
        return json.loads(path.read_text())["cells"]
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def plan(args: argparse.Namespace, done: dict[str, Cell]) -> list[Cell]:
    """All cells that are known by now, in order: the rates, the finalists, the strengths."""
    cells = []
    quick = [name for name in args.contenders if name != SLOW]
    for head in args.heads:
        for contender in quick:
            cells += [make_cell(args, head, contender, rate) for rate in args.rates]
    for head in args.heads:
        for contender in quick:
            best = best_rate(args, done, head, contender, args.small)
            if best is None:
                continue
            full = [make_cell(args, head, contender, r, steps=args.full) for r in (best, best / 2)]
            cells += full
            chosen = best_rate(args, done, head, contender, args.full, wanted=2)
            for seed in range(1, args.seeds):
                cells.append(make_cell(args, head, contender, best, seed=seed))
                if chosen is not None:
                    cells.append(
                        make_cell(args, head, contender, chosen, steps=args.full, seed=seed)
                    )
            if contender == "muon_pion" and chosen is not None and head == args.heads[0]:
                tried = [make_cell(args, head, contender, chosen, steps=args.full)]
                tried += [tried[0] | {"strength": f"k_p={k}"} for k in range(5)]
                # At the same rate, and with an action step that is about as large as Muon's.
                cells += tried + [cell | {"action_scale": MATCHED} for cell in tried]
    cells.sort(key=lambda cell: cell["steps"] > args.small)
    best = best_rate(args, done, args.heads[0], "muon", args.small)
    if SLOW in args.contenders and best is not None:
        cells.append(make_cell(args, args.heads[0], SLOW, best))
    return cells


def make_cell(
    args: argparse.Namespace,
    head: str,
    contender: str,
    rate: float,
    steps: int = 0,
    seed: int = 0,
    strength: str = "noise",
) -> Cell:
    cell: Cell = {"head": head, "contender": contender, "rate": rate, "strength": strength}
    return cell | {"steps": steps or args.small, "seed": seed}


def best_rate(
    args: argparse.Namespace,
    done: dict[str, Cell],
    head: str,
    contender: str,
    steps: int,
    wanted: int | None = None,
) -> float | None:
    """The rate of the best success on validation scenes, the smaller loss among equals; None while
    some are missing."""
    found = [
        cell
        for cell in done.values()
        if (cell["head"], cell["contender"], cell["steps"]) == (head, contender, steps)
        and cell["seed"] == 0
        and cell["strength"] == "noise"
        and cell.get("action_scale", 1) == 1
    ]
    if len(found) < (wanted or len(args.rates)):
        return None
    return max(found, key=lambda cell: (cell["validation"], -cell["loss"]))["rate"]


# Running them.


def run(args: argparse.Namespace, cells: Cells, began: float, deadline: float) -> None:
    """Keep every process busy until all is done or the time is up."""
    context = mp.get_context("spawn")
    answers: Any = context.Queue()
    crew: list[tuple[Any, Any]] = []
    busy: dict[int, str] = {}
    config = settings(args)
    if cells.next(args, set()) is None:
        return
    # The first process compiles the GPU's kernels; the others then find them in the cache.
    alone_until = 0.0 if args.device == "cpu" or cells.done else time.time() + ALONE
    while time.time() < deadline + GRACE:
        warm = time.time() > alone_until or len(cells.done) > 0 or len(cells.failed) > 0
        wanted = args.processes if warm else 1
        while len(crew) < wanted:
            orders: Any = context.Queue()
            process = context.Process(
                target=work, args=(config, len(crew), orders, answers, deadline), daemon=True
            )
            process.start()
            crew.append((process, orders))
        for number, (process, orders) in enumerate(crew):
            if number not in busy and process.is_alive() and time.time() < deadline:
                cell = cells.next(args, set(busy.values()))
                if cell is not None:
                    busy[number] = key_of(cell)
                    orders.put(cell)
        if not busy:
            break
        try:
            number, cell, error = answers.get(timeout=5)
        except queue.Empty:
            for number, (process, _) in enumerate(crew):
                if number in busy and not process.is_alive():
                    cells.failed[busy.pop(number)] = "the process died"
            continue
        key = busy.pop(number, "")
        if error:
            cells.failed[key] = error
            say(began, f"{key}: {error.splitlines()[-1]}")
        elif cell is not None:
            cells.add(cell)
            say(
                began,
                f"{key}: validation {cell['validation']:.2f} test {cell['test']:.2f} wrong "
                f"{cell['wrong']:.2f} loss {cell['loss']:.3f} in {cell['seconds']:.0f} s",
            )
    for _, orders in crew:
        orders.put(None)
    for process, _ in crew:
        process.join(timeout=3)
        if process.is_alive():
            process.terminate()


def work(config: dict[str, Any], number: int, orders: Any, answers: Any, deadline: float) -> None:
    """A process: loads the data once, then trains and plays the cells that it is given."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    args = argparse.Namespace(**config)
    args.state = Path(args.state)
    loaded = None
    while (cell := orders.get()) is not None:
        try:
            if loaded is None:
                from mesotron.vla.demos import load_demos

                loaded = Prepared(args, load_demos(demos_config(args).out))
            answers.put((number, train_cell(args, cell, loaded, deadline), ""))
        except Exception:
            # One cell must not end the others; what it said goes to the log.
            answers.put((number, None, traceback.format_exc()))


class Prepared:
    """Demonstrations, and their tensors on the device, shared by the cells of a process."""

    def __init__(self, args: argparse.Namespace, demos: Any) -> None:
        self.demos, self.frames = demos, None


def train_cell(
    args: argparse.Namespace, cell: Cell, loaded: Prepared, deadline: float
) -> Cell | None:
    """Train one policy and play it; None if the time was up before."""
    import torch

    from mesotron.vla.acting import make_act
    from mesotron.vla.interface import EVAL_SEED, VALIDATION_SEED
    from mesotron.vla.rollout import evaluate
    from mesotron.vla.training import Trainer

    start = time.time()
    trainer = Trainer(train_config(args, cell), loaded.demos, torch.device(args.device),
                      frames=loaded.frames)  # fmt: skip
    loaded.frames = trainer.frames
    world, execute = loaded.demos.world, 5
    act = make_act(trainer.policy, args.device, bfloat16=args.device == "cuda")

    def play(first: int, count: int, wrong: bool = False) -> float:
        seeds = range(first, first + count)
        found = evaluate(act, world, seeds, execute=execute, workers=1, wrong=wrong, batch=200)
        return found.success

    # Before training all contenders are alike: once is enough.
    begins = (args.contenders[0], args.rates[0], args.small, 0)
    first = (cell["contender"], cell["rate"], cell["steps"], cell["seed"]) == begins
    untrained = play(EVAL_SEED, 2) if first else None
    losses, probes = [], []
    probe_at = {round(share * cell["steps"]) for share in (0, 0.02, 0.1, 0.25, 0.5, 0.75, 0.95)}
    probing = cell["seed"] == 0 and cell["steps"] == args.full
    trained = 0.0
    while trainer.step < cell["steps"]:
        if time.time() > deadline:
            return None
        if trainer.step in probe_at and probing:
            probes.append({"step": trainer.step, **trainer.probe(), **trainer.statistics()})
        found = trainer.advance()
        if trainer.step % 20 == 0 or trainer.step == cell["steps"]:
            losses.append([trainer.step, float(found["loss"])])
    trained = time.time() - start
    stats = trainer.statistics()
    tail = [loss for _, loss in losses[-5:]]
    return cell | {
        "loss": sum(tail) / len(tail),
        "validation": play(VALIDATION_SEED, args.validation),
        "test": play(EVAL_SEED, args.test),
        "wrong": play(EVAL_SEED, max(args.test // 2, 1), wrong=True),
        "untrained": untrained,
        "losses": losses,
        "probes": probes,
        "statistics": stats,
        "train_seconds": trained,
        "seconds": time.time() - start,
    }


def train_config(args: argparse.Namespace, cell: Cell) -> Any:
    from mesotron.config.vla_training import PartsOptimConfig, PolicyConfig, VlaTrainConfig

    strength = cell["strength"]
    promote = int(strength.removeprefix("k_p=")) if strength.startswith("k_p=") else None
    rules = CONTENDERS[cell["contender"]]
    scale = cell.get("action_scale", 1)
    optim = PartsOptimConfig(**rules, lr=cell["rate"], promote=promote, action_scale=scale)
    policy = PolicyConfig(size=args.size, head=cell["head"])
    return VlaTrainConfig(
        policy=policy,
        optim=optim,
        steps=cell["steps"],
        batch=args.batch,
        seed=cell["seed"],
        device=args.device,
    )


# Processes that share a GPU take turns; under NVIDIA's MPS they run side by side.


def start_mps(args: argparse.Namespace, began: float) -> dict[str, str] | None:
    """Start MPS if it is there and works; returns its environment."""
    import shutil
    import subprocess
    import sys

    if args.no_mps or args.device != "cuda" or shutil.which("nvidia-cuda-mps-control") is None:
        say(began, "without MPS")
        return None
    folders = {
        "CUDA_MPS_PIPE_DIRECTORY": str(args.state / "mps"),
        "CUDA_MPS_LOG_DIRECTORY": str(args.state / "mps-log"),
    }
    for folder in folders.values():
        Path(folder).mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **folders}
    check = "import torch; x = torch.ones(256, 256, device='cuda'); print((x @ x).sum().item())"
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True, timeout=20)
        done = subprocess.run([sys.executable, "-c", check], env=environment, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        say(began, f"without MPS: {error}")
        stop_mps(folders)
        return None
    if done.returncode:
        say(began, "without MPS: a product under it failed")
        stop_mps(folders)
        return None
    os.environ.update(folders)
    say(began, "with MPS")
    return folders


def stop_mps(folders: dict[str, str] | None) -> None:
    import subprocess

    if folders is None:
        return
    for name in folders:
        os.environ.pop(name, None)
    try:
        subprocess.run(
            ["nvidia-cuda-mps-control"],
            input="quit\n",
            text=True,
            env={**os.environ, **folders},
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError) as error:
        print(f"MPS was not stopped: {error}", flush=True)


if __name__ == "__main__":
    main()
