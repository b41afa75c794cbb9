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
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks._lib.crew import work_through
from benchmarks._lib.mps import mps
from benchmarks._lib.results import read_json, write_json
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


def main() -> None:
    given = fill_in(make_parser().parse_args())
    began = time.time()

    def say(sentence: str) -> None:
        print(f"[{time.time() - began:5.0f} s] {sentence}", flush=True)

    for folder in (given.state, given.out):
        folder.mkdir(parents=True, exist_ok=True)

    budgets = f"{given.small}, {given.full} and {given.long} steps"
    say(f"{given.world}: {given.size} policy, {budgets} of {given.batch}")
    facts = make_data(given, say)
    deadline = began + given.seconds
    cells = Cells(given, say, Pace(deadline, given.alone))
    say(f"{len(cells.done)} cells are there already")

    try:
        with mps(given.state, say) if given.mps else nullcontext():
            work_through(
                "benchmarks.vla.worker:run_cell",
                vars(given),
                cells.following,
                cells.take,
                key_of,
                num_workers=given.processes,
                deadline=deadline,
                grace=GRACE,
            )
    finally:
        path = given.out / f"{given.world}.json.gz"
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(given).items()}
        result = {
            "settings": settings,
            "facts": facts,
            "cells": list(cells.done.values()),
        }

        write_json(result | {"failed": cells.failed}, path)
        say(f"{len(cells.done)} cells in {path}; {len(cells.left(set()))} to go")


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", choices=WORLDS, default="object10")
    parser.add_argument("--state", type=Path, default=Path("runs/vla_study"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--earlier", type=Path, help="cells of an earlier call, brought back")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", default="small")

    parser.add_argument(
        "--contenders",
        nargs="+",
        default=list(CONTENDERS),
        choices=CONTENDERS,
    )

    parser.add_argument(
        "--rates",
        nargs="+",
        type=float,
        help="for all, instead of their own",
    )

    parser.add_argument("--aux", type=float, help="rate of all that is no hidden matrix")
    parser.add_argument("--aux-adamw", type=float, help="the same where AdamW has the matrices")
    parser.add_argument("--heads", nargs="+")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)

    parser.add_argument(
        "--where",
        type=float,
        default=0.0,
        help="weight of the auxiliary loss",
    )

    parser.add_argument("--wrist", action="store_true", help="a second camera, on the hand")
    counts = ("small", "full", "long", "episodes", "starts", "every", "validation", "test")
    for name in counts:
        parser.add_argument(f"--{name}", type=int)

    parser.add_argument("--mps", action="store_true", help="try NVIDIA's MPS")
    parser.add_argument("--no-graph", dest="graph", action="store_false")

    return parser


def fill_in(given: argparse.Namespace) -> argparse.Namespace:
    """Fill in missing arguments from a pilot and the world's defaults."""
    path = given.state / f"{given.world}.pilot.json"
    pilot = json.loads(path.read_text()) if path.exists() else {}
    given.graph = given.graph and pilot.get("graph", True)
    given.alone = not pilot and given.device == "cuda"  # a pilot has compiled already

    found = pilot.get("rates", {}) | pilot.get("budgets", {})
    for name, value in ({**AUXILIARY, **DEFAULTS[given.world]} | found).items():
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
        return json.loads(path.read_text())

    config = demos_config(given)
    start = time.time()
    write_demos(config, log=say)
    made = time.time() - start
    expert = evaluate_expert(config.world, range(EVAL_SEED, EVAL_SEED + given.test))

    facts = {
        "demos_seconds": made,
        "episodes": config.episodes,
        "expert": expert.to_json(),
    }

    facts["expert"].pop("episodes")
    say(f"demonstrations in {made:.0f} s; expert {expert.success:.2f}")
    path.write_text(json.dumps(facts))

    return facts


class Cells:
    """Finished cells, on disk as they come, and the next ones.

    Args:
        given: the study's settings.
        say: prints a sentence.
        pace: knows what there is still time for.
    """

    def __init__(self, given: argparse.Namespace, say: Any, pace: Pace) -> None:
        self.given = given
        self.say = say
        self.pace = pace
        self.path = given.state / f"{given.world}.cells.jsonl"
        self.done: dict[str, Cell] = {}
        self.failed: dict[str, str] = {}

        for source in (given.earlier, self.path):
            if source is not None and source.exists():
                self.done |= {key_of(cell): cell for cell in read_cells(source)}

    def following(self, busy: set[str]) -> Cell | None:
        """The next cell that is neither done nor running, and that there is time for."""
        return self.pace.choose(self.left(busy), busy)

    def left(self, busy: set[str]) -> list[Cell]:
        """Cells that are neither done, failed nor running, in order."""
        taken = busy | set(self.done) | set(self.failed)
        return [cell for cell in plan(self.given, self.done) if key_of(cell) not in taken]

    def take(self, key: str, cell: Cell | None, error: str) -> None:
        """Record a finished or failed cell; one that was given back stays open."""
        if error:
            self.failed[key] = error
            self.say(f"{key}: {error}")

        if cell is None:
            return

        self.pace.note(cell)
        self.done[key] = cell

        with self.path.open("a") as file:
            file.write(json.dumps(cell) + "\n")

        wrong = "" if cell["wrong"] is None else f" wrong {cell['wrong']:.2f}"
        self.say(
            f"{key}: validation {cell['validation']:.2f} test {cell['test']:.2f}{wrong} loss "
            f"{cell['loss']:.3f} in {cell['train_seconds']:.0f} + "
            f"{cell['seconds'] - cell['train_seconds']:.0f} s"
        )


def read_cells(path: Path) -> list[Cell]:
    """Cells of a result, or of a state's lines."""
    if path.suffix != ".jsonl":
        return read_json(path)["cells"]
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


if __name__ == "__main__":
    main()
