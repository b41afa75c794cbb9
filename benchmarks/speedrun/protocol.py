"""The speedrun of PROTOCOL.md: ours and plain TRL, searched alike, then reported.

    python -m benchmarks.speedrun.protocol --out OUT --model FOLDER --minutes 23 --arms ours trl

First the pace of each shape of step, alone on the GPU; then the search on tuning seeds, then the
reporting seeds at its best, several at once under MPS, their steps counted at that pace. Each run
is a file in OUT/cells as soon as it is finished, so the same command resumes. `--alone` then runs
three reporting seeds of ours alone, to check the clock. On a CPU: --small.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._lib.crew import work_through
from benchmarks._lib.mps import mps
from benchmarks._lib.results import read_json, write_json
from benchmarks.speedrun.children import Children, Row
from benchmarks.speedrun.entries import ARMS, NAMES
from benchmarks.tournament.__main__ import protocol_commit

Done = dict[str, Row]
# Rounds of an arm's search: seeds that are added, and how many configurations stay.
SEARCH = {
    "ours": ((range(110, 115), 1),),
    "trl": (((110,), 5), ((111,), 2), ((112, 113, 114), 2)),
}
# The first of an arm that has reports is compared.
REPORTED = {"ours": (*ARMS["ours"], "ours_bonus_0.1"), "trl": ("stock_4e-05_650",)}
PACE_SEED = 110
REPORTING_SEEDS = {"ours": range(280, 290), "trl": range(230, 235)}
ALONE_SEEDS = REPORTING_SEEDS["ours"][:3]
TARGET = 0.90
CONSECUTIVE = 2
EVERY_STEPS = 10
EVERY_STEPS_OF_TWINS = 50
PACE_STEPS = 30
FREE = ("optim.lr", "steps", "objective.entropy_bonus", "average")
COMMON = ("reward.parts=two_part,near,overlong", "reward.overlong_buffer=1")
GRACE = 60.0
FEWEST = 3  # arrivals of a baseline whose median counts; below, the ends of its schedules


def key_of(cell: Row) -> str:
    return "-".join(str(cell[name]) for name in ("use", "name", "seed"))


def make(use: str, arm: str, name: str, seed: int) -> Row:
    return {"use": use, "arm": arm, "name": name, "seed": seed}


def shape_of(name: str) -> str:
    """What a step's time depends on: everything but the numbers in `FREE`."""
    own = {key: value for key, value in NAMES[name].items() if key not in FREE}
    return json.dumps([name.split("_")[0], sorted((key, str(value)) for key, value in own.items())])


def rank(name: str, seeds: Sequence[int], done: Done) -> tuple[float, float, float] | None:
    """The better, the smaller: seeds not arrived, median time, minus the final accuracy. None
    before all seeds are there."""
    cells = [done.get(key_of(make("tuning", "", name, seed))) for seed in seeds]
    found = [cell for cell in cells if cell is not None]
    if len(found) < len(seeds):
        return None

    times = [cell["seconds_to_target"] or math.inf for cell in found]
    last = median(cell["last"] for cell in found)

    return times.count(math.inf), median(times), -last


def best_of(names: Sequence[str], seeds: Sequence[int], done: Done, count: int) -> list[str]:
    """The best configurations; empty before all are there."""
    ranks = {name: rank(name, seeds, done) for name in names}
    known = {name: value for name, value in ranks.items() if value is not None}
    if len(known) < len(names):
        return []

    return sorted(known, key=known.__getitem__)[:count]


def plan(arms: Sequence[str], done: Done) -> Iterator[Row]:
    """Runs in their order, those that are done included. TRL waits for the search of ours, which
    reports only what arrived on all tuning seeds."""
    for arm in arms:
        names = list(ARMS[arm])
        seeds = tuple[int, ...]()
        for more, stay in SEARCH[arm]:
            yield from (make("tuning", arm, name, seed) for seed in more for name in names)
            seeds += tuple(more)
            names = best_of(names, seeds, done, stay)

        if arm == "ours":
            if not names:
                return
            names = [name for name in names if (rank(name, seeds, done) or (1,))[0] == 0]

        names = [name for name in names if name in REPORTED[arm]]
        yield from (make("reporting", arm, name, s) for name in names for s in REPORTING_SEEDS[arm])


def run_cell(cell: Row, settings: Row, deadline: float) -> Row | None:
    """In a worker: one run whose steps are counted at the pace it has alone. Plain TRL's runs are
    those of its twin except where it reports."""
    from benchmarks.speedrun.racing import race

    first, later = settings["paces"][shape_of(cell["name"])]
    twin = cell["arm"] == "trl" and cell["use"] != "reporting"
    name = cell["name"].replace("stock", "twin") if twin else cell["name"]
    every = EVERY_STEPS_OF_TWINS if twin else EVERY_STEPS

    given = rules(settings) | {"pace": (first, later), "every": every * later}
    if cell["arm"] == "trl" and not settings["small"]:  # so that several fit into memory
        given["common"] += ["rollout.micro_batch=128"]

    with tempfile.TemporaryDirectory() as folder:
        left = deadline + GRACE / 2 - time.time()
        row = race(
            name,
            cell["seed"],
            Path(folder),
            left,
            given,
        )

    row |= cell | {"twin": twin}
    if row["cut_short"]:  # by the end of the window: to be looked at, not counted
        write_json(row, Path(settings["out"]) / "cut" / f"{key_of(cell)}.json")
        return None

    return row | {"protocol": settings["protocol"], "pace": [first, later]}


def rules(settings: Row) -> Row:
    """What `race` is given."""
    return {
        "model": settings["model"],
        "small": settings["small"],
        "target": TARGET,
        "common": list(COMMON),
        "consecutive": CONSECUTIVE,
        "every": math.inf,
        "limit": math.inf,
    }


def measure_paces(given: argparse.Namespace, names: Sequence[str], paces: dict[str, Any]) -> None:
    """Seconds of the first and of a later step of each shape, alone on the GPU."""
    with Children("benchmarks.speedrun.protocol:pace") as children:
        for name in names:
            if shape_of(name) not in paces and time.time() < given.deadline:
                settings = rules(vars(given))
                with tempfile.TemporaryDirectory() as folder:
                    row = children.run(Path(folder), 240, name=name, settings=settings)

                if "failed" in row:
                    print(f"no pace of {name}: {row['failed'][-600:]}", flush=True)
                    continue

                paces[shape_of(name)] = [row["first_step_s"], row["settled_step_s"]]
                write_json(paces, given.out / "paces.json")
                print(name, paces[shape_of(name)], flush=True)


def pace(name: str, folder: Path, seconds: float, settings: Row) -> Row:
    """In a process: PACE_STEPS steps of a configuration, evaluated before and after only."""
    from transformers import TrainerCallback

    from benchmarks.speedrun.contenders import Contestant, make_config
    from benchmarks.speedrun.racing import Clock

    config = make_config(
        name,
        PACE_SEED,
        settings["model"],
        settings["small"],
        [*settings["common"], "task.num_eval=8"],
    )

    contestant = Contestant(name, config, folder / "run")
    clock = Clock(
        contestant,
        math.inf,
        2.0,
        math.inf,
        time.perf_counter() + seconds,
    )

    class End(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step >= PACE_STEPS

    contestant.trainer.add_callback(clock)
    contestant.trainer.add_callback(End())
    contestant.trainer.train()

    return clock.row()


def run_alone(given: argparse.Namespace, done: Done) -> None:
    """Three reporting seeds of ours with a real clock."""
    cells = [cell for cell in plan(["ours"], done) if cell["seed"] in ALONE_SEEDS]
    with Children("benchmarks.speedrun.racing:race") as children:
        for cell in cells:
            path = given.out / "cells" / f"alone-{key_of(cell)}.json"
            left = given.deadline
            if path.exists() or time.time() > left:
                continue

            first, later = given.paces[shape_of(cell["name"])]
            settings = rules(vars(given)) | {"every": EVERY_STEPS * later}
            with tempfile.TemporaryDirectory() as folder:
                row = children.run(
                    Path(folder),
                    left - time.time(),
                    name=cell["name"],
                    seed=cell["seed"],
                    given=settings,
                )

            if "failed" not in row and not row["cut_short"]:
                row |= cell | {
                    "alone": True,
                    "protocol": given.protocol,
                    "pace": [first, later],
                }
                write_json(row, path)

            print(path.stem, row.get("seconds_to_target"), row.get("failed", "")[-300:], flush=True)


def seconds_of(cell: Row, pace: Sequence[float], reached: bool = True) -> float:
    """A run's time to the target at another pace; to its end if it is not `reached`."""
    seconds = cell["seconds_to_target"]
    if seconds is None and reached:
        return math.inf

    first, later = cell["pace"]
    steps = cell["steps"] if seconds is None else 1 + round((seconds - first) / later)

    return pace[0] + (steps - 1) * pace[1]


def table(done: Done, paces: dict[str, Any]) -> str:
    """The reported runs, and the ratio of medians with its bootstrap interval."""
    lines = ["| arm | configuration | arrived | median s | each |", "|---" * 5 + "|"]
    times: dict[str, list[float]] = {}
    for arm in ARMS:
        reports = [cell for cell in done.values() if cell["use"] == "reporting"]
        each_name = ([c for c in reports if c["name"] == name] for name in REPORTED[arm])
        cells = next(filter(None, each_name), [])
        if not cells:
            return "\n".join(lines)

        pace = paces[shape_of(cells[0]["name"])]
        each = [seconds_of(cell, pace) for cell in cells]
        arrived = [t for t in each if math.isfinite(t)]
        shown = ", ".join("-" if math.isinf(t) else f"{t:.0f}" for t in each)

        lines.append(
            f"| {arm} | {cells[0]['name']} | {len(arrived)} of {len(cells)} | "
            f"{median(each):.1f} | {shown} |"
        )
        if arm == "trl" and len(arrived) < FEWEST:
            arrived = [seconds_of(cell, pace, reached=False) for cell in cells]

        times[arm] = each if arm == "ours" else arrived

    rng, (ours, trl) = random.Random(0), times.values()
    drawn = sorted(
        median(rng.choices(ours, k=len(ours))) / median(rng.choices(trl, k=len(trl)))
        for _ in range(10_000)
    )

    ratio = median(ours) / median(trl)
    return "\n".join([*lines, f"\nours / trl: {ratio:.3f} [{drawn[250]:.3f}, {drawn[9749]:.3f}]"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--cells",
        type=Path,
        nargs="*",
        default=[],
        help="files of earlier runs",
    )

    parser.add_argument(
        "--arms",
        nargs="+",
        choices=ARMS,
        default=list(ARMS),
    )

    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument(
        "--ahead",
        nargs="*",
        default=[],
        help="NAME-SEED: TRL's tuning runs that free workers make before their round",
    )

    parser.add_argument("--model", help="a model folder or .gguf file instead of smollm2")
    parser.add_argument("--protocol", default="", help="commit of PROTOCOL.md, without git")
    parser.add_argument("--alone", action="store_true", help="only: ours with a real clock")
    parser.add_argument("--show", action="store_true", help="only: print the table")
    parser.add_argument("--small", action="store_true", help="a random model, on a CPU")
    given = parser.parse_args()
    given.deadline = time.time() + 60 * given.minutes
    given.protocol = given.protocol or ("" if given.show else protocol_commit())

    for folder in ("cells", "cut"):
        (given.out / folder).mkdir(parents=True, exist_ok=True)

    done: Done = {}
    for path in (*given.cells, *sorted((given.out / "cells").glob("*.json"))):
        read = read_json(path)
        cells = read if isinstance(read, list) else [read]
        done |= {
            key_of(cell): cell
            for cell in cells
            if not cell.get("alone") and not cell.get("cut_short")
        }

    file = given.out / "paces.json"
    given.paces = read_json(file) if file.exists() else {}
    if given.show:
        return print(table(done, given.paces))
    if given.alone:
        return run_alone(given, done)

    names = [name for arm in given.arms for name in ARMS[arm]]
    measure_paces(given, names, given.paces)
    failed: dict[str, int] = {}

    def following(busy: set[str]) -> Row | None:
        taken = {*done, *busy, *(key for key, times in failed.items() if times > 1)}
        names = (key.rpartition("-") for key in given.ahead)
        ahead = (make("tuning", "trl", name, int(seed)) for name, _, seed in names)
        cells = (cell for cell in chain(plan(given.arms, done), ahead) if key_of(cell) not in taken)

        return next((cell for cell in cells if shape_of(cell["name"]) in given.paces), None)

    def take(key: str, cell: Row | None, error: str) -> None:
        if error:
            failed[key] = failed.get(key, 0) + 1
            print(f"FAILED {key}: {error.strip().splitlines()[-1]}", flush=True)
        elif cell is not None:
            done[key] = cell
            write_json(cell, given.out / "cells" / f"{key}.json")
            reached = cell["seconds_to_target"]
            arrived = "not reached" if reached is None else f"{reached:.1f} s"
            print(f"{key}: {arrived}, best {cell['best']:.3f}, {cell['steps']} steps", flush=True)

    settings = vars(given) | {"out": str(given.out)}
    with (
        nullcontext() if given.small else mps(given.out, print),
        (given.out / "log").open("ab") as log,
    ):
        work_through(
            "benchmarks.speedrun.protocol:run_cell",
            settings,
            following,
            take,
            key_of,
            num_workers=given.workers,
            deadline=given.deadline,
            grace=GRACE,
            log=log,
        )

    left = sum(key_of(cell) not in done for cell in plan(given.arms, done))
    print(f"{len(done)} runs, {left} of those known so far to go", flush=True)

    return None


if __name__ == "__main__":
    main()
