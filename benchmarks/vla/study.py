"""Which optimizer trains a vision-language-action policy best? Rates, seeds, Pion's strength.

Behaviour cloning on our own simulated world and on Meta-World (not LIBERO; no pretrained backbone).
Every contender gets its own grid of rates and the same data order, initial weights and scenes.
Rates are chosen on validation scenes, or by the training loss if no policy succeeds yet; results
are from other scenes. `plan` has the order, `cell` one training run, `worker` a process, `pace`
what there is still time for.

    python -m benchmarks.vla.study --world object10 --state runs/vla_study --out results

Finished cells are kept in STATE/WORLD.cells.jsonl; the same command resumes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._lib.crew import Cells, Crew, Done, say_with_seconds, work_through
from benchmarks._lib.mps import mps
from benchmarks._lib.results import read_json, write_json
from benchmarks._lib.rows import by_key
from benchmarks.vla.cell import WORLDS, demos_config
from benchmarks.vla.pace import GRACE, Pace
from benchmarks.vla.plan import CONTENDERS, Cell, key_of, plan

# Of each world: heads, demonstrations, single frames, actions from one look to the next, episodes
# of each task to choose by and to report (a failed one of Meta-World takes a second of a core), and
# steps where no pilot says.
DEFAULTS: dict[str, dict[str, Any]] = {
    "blocks": {
        "heads": ["l1"],
        "episodes": 200,
        "starts": 2000,
        "every": 1,
        "validation": 10,
        "test": 25,
        "small": 300,
        "full": 500,
        "long": 0,
    },
    "object10": {
        "heads": ["l1", "flow"],
        "episodes": 2000,
        "starts": 30_000,
        "every": 1,
        "validation": 10,
        "test": 20,
        "small": 500,
        "full": 1500,
        "long": 4000,
    },
    "mt10": {
        "heads": ["l1"],
        "episodes": 1500,
        "starts": None,
        "every": 3,
        "validation": 3,
        "test": 10,
        "small": 500,
        "full": 2000,
        "long": 5000,
    },
}

# Of embeddings, norms and the output layer; 1e-3 learned more slowly in a trial (README.md).
AUXILIARY = {"aux": 3e-3, "aux_adamw": 3e-3}
COUNTS = ("small", "full", "long", "episodes", "starts", "every", "validation", "test")


def main() -> None:
    given = fill_in(make_parser().parse_args())
    deadline = time.time() + given.seconds
    say = say_with_seconds()
    for folder in (given.state, given.out):
        folder.mkdir(parents=True, exist_ok=True)

    budgets = f"{given.small}, {given.full} and {given.long} steps"
    say(f"{given.world}: {given.size} policy, {budgets} of {given.batch}")
    facts = make_data(given, say)

    kept = given.state / f"{given.world}.cells.jsonl"
    pace = Pace(deadline, given.alone)

    def keep(key: str, cell: Cell) -> None:
        pace.note(cell)
        with kept.open("a") as file:
            file.write(json.dumps(cell) + "\n")

    cells = Cells(
        lambda done: plan(given, done),
        key_of,
        done=read_cells([given.earlier, kept]),
        keep=keep,
        describe=describe,
        say=say,
        pick=pace.choose,
    )
    crew = Crew(
        target="benchmarks.vla.worker:run_cell",
        settings=vars(given),
        num_workers=given.processes,
        deadline=deadline,
        grace=GRACE,
        log=given.state / "workers.log",
    )

    say(f"{len(cells.done)} cells are there already")
    try:
        with mps(given.state, say, wanted=given.mps):
            work_through(cells, crew)
    finally:
        path = given.out / f"{given.world}.json.gz"
        write(cells, given, facts, path)
        say(f"{len(cells.done)} cells in {path}; {cells.num_left()} to go")


def write(cells: Cells, given: argparse.Namespace, facts: dict[str, Any], path: Path) -> None:
    settings = {}
    for name, value in vars(given).items():
        settings[name] = str(value) if isinstance(value, Path) else value

    result = {
        "settings": settings,
        "facts": facts,
        "cells": list(cells.done.values()),
        "failed": cells.failed,
    }
    write_json(result, path)


def read_cells(files: Sequence[Path | None]) -> Done:
    """The finished cells of earlier calls, in results or in a state's lines."""
    done: Done = {}
    for file in files:
        if file is None or not file.exists():
            continue

        if file.suffix == ".jsonl":
            lines = file.read_text().splitlines()
            cells = []
            for line in lines:
                if line.strip():
                    cells.append(json.loads(line))
        else:
            cells = read_json(file)["cells"]
        done |= by_key(cells, key_of)
    return done


def describe(cell: Cell) -> str:
    """A finished cell in a line."""
    wrong = "" if cell["wrong"] is None else f" wrong {cell['wrong']:.2f}"
    play = cell["seconds"] - cell["train_seconds"]
    return (
        f"validation {cell['validation']:.2f} test {cell['test']:.2f}{wrong} "
        f"loss {cell['loss']:.3f} in {cell['train_seconds']:.0f} + {play:.0f} s"
    )


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--world", choices=WORLDS, default="object10")
    add("--state", type=Path, default=Path("runs/vla_study"))
    add("--out", type=Path, required=True)
    add("--earlier", type=Path, help="cells of an earlier call, brought back")
    add("--seconds", type=float, default=480)
    add("--processes", type=int, default=14)
    add("--device", default="cuda")
    add("--size", default="small")
    add("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    add("--rates", nargs="+", type=float, help="for all, instead of their own")
    add("--aux", type=float, help="rate of all that is no hidden matrix")
    add("--aux-adamw", type=float, help="the same where AdamW has the matrices")
    add("--heads", nargs="+")
    add("--batch", type=int, default=128)
    add("--seeds", type=int, default=3)
    add("--where", type=float, default=0.0, help="weight of the auxiliary loss")
    add("--wrist", action="store_true", help="a second camera, on the hand")
    for name in COUNTS:
        add(f"--{name}", type=int)
    add("--mps", action="store_true", help="try NVIDIA's MPS")
    add("--no-graph", dest="graph", action="store_false")
    return parser


def fill_in(given: argparse.Namespace) -> argparse.Namespace:
    """Fill in missing arguments from a pilot and the world's defaults."""
    path = given.state / f"{given.world}.pilot.json"
    pilot = read_json(path) if path.exists() else {}
    given.graph = given.graph and pilot.get("graph", True)
    given.alone = not pilot and given.device == "cuda"  # a pilot has compiled already

    found = pilot.get("rates", {}) | pilot.get("budgets", {})
    defaults = AUXILIARY | DEFAULTS[given.world] | found
    for name, value in defaults.items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    return given


def make_data(given: argparse.Namespace, say: Any) -> dict[str, Any]:
    """Make demonstrations on all cores and evaluate the expert on the test scenes."""
    from mesotron.vla.demos import write_demos
    from mesotron.vla.interface import EVAL_SEED
    from mesotron.vla.rollout import evaluate_expert

    path = given.state / f"{given.world}.facts.json"
    if path.exists():
        return read_json(path)

    config = demos_config(given)
    start = time.time()
    write_demos(config, log=say)
    made = time.time() - start
    expert = evaluate_expert(config.world, range(EVAL_SEED, EVAL_SEED + given.test))

    say(f"demonstrations in {made:.0f} s; expert {expert.success:.2f}")

    shown = expert.to_json()
    shown.pop("episodes")
    facts = {"demos_seconds": made, "episodes": config.episodes, "expert": shown}
    write_json(facts, path)
    return facts


if __name__ == "__main__":
    main()
