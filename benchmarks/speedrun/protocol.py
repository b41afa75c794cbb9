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
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._lib.crew import Cells, Crew, work_through
from benchmarks._lib.mps import mps
from benchmarks._lib.results import read_json, write_json
from benchmarks._lib.rows import by_key, table, values, where
from benchmarks.speedrun.children import Children, Row
from benchmarks.speedrun.entries import ARMS, NAMES
from benchmarks.tournament.__main__ import protocol_commit

Done = dict[str, Row]
Pace = Sequence[float]  # seconds of the first step and of a later one
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
RESAMPLES = 10_000
FEWEST = 3  # arrivals of a baseline whose median counts; below, the ends of its schedules


def key_of(cell: Row) -> str:
    return "-".join(str(cell[name]) for name in ("use", "name", "seed"))


def make(use: str, arm: str, name: str, seed: int) -> Row:
    return {"use": use, "arm": arm, "name": name, "seed": seed}


def shape_of(name: str) -> str:
    """What a step's time depends on: everything but the numbers in `FREE`."""
    own = {}
    for key, value in NAMES[name].items():
        if key not in FREE:
            own[key] = str(value)

    return json.dumps([name.split("_")[0], sorted(own.items())])


def rank(name: str, seeds: Sequence[int], done: Done) -> tuple[float, float, float] | None:
    """The better, the smaller: seeds not arrived, median time, minus the final accuracy. None
    before all seeds are there."""
    keys = [key_of(make("tuning", "", name, seed)) for seed in seeds]
    cells = [done[key] for key in keys if key in done]
    if len(cells) < len(seeds):
        return None

    times = [cell["seconds_to_target"] or math.inf for cell in cells]
    return times.count(math.inf), median(times), -median(values(cells, "last"))


def best_of(names: Sequence[str], seeds: Sequence[int], done: Done, count: int) -> list[str]:
    """The best configurations; empty before all are there."""
    ranks = {}
    for name in names:
        place = rank(name, seeds, done)
        if place is None:
            return []
        ranks[name] = place
    return sorted(ranks, key=ranks.__getitem__)[:count]


def plan(arms: Sequence[str], done: Done) -> Iterator[Row]:
    """Runs in their order, those that are done included. TRL waits for the search of ours, which
    reports only what arrived on all tuning seeds."""
    for arm in arms:
        names = list(ARMS[arm])
        seeds: list[int] = []
        for more, stay in SEARCH[arm]:
            for seed in more:
                for name in names:
                    yield make("tuning", arm, name, seed)
            seeds += more
            names = best_of(names, seeds, done, stay)

        if arm == "ours":
            if not names:
                return
            names = [name for name in names if has_arrived(name, seeds, done)]

        for name in names:
            if name in REPORTED[arm]:
                for seed in REPORTING_SEEDS[arm]:
                    yield make("reporting", arm, name, seed)


def has_arrived(name: str, seeds: Sequence[int], done: Done) -> bool:
    """Whether a configuration reached the target on all of these seeds."""
    place = rank(name, seeds, done)
    return place is not None and place[0] == 0


def run_cell(cell: Row, settings: Row, deadline: float) -> Row | None:
    """In a worker: one run whose steps are counted at the pace it has alone. Plain TRL's runs are
    those of its twin except where it reports."""
    from benchmarks.speedrun.racing import race

    first, later = settings["paces"][shape_of(cell["name"])]
    is_twin = cell["arm"] == "trl" and cell["use"] != "reporting"
    name = cell["name"].replace("stock", "twin") if is_twin else cell["name"]
    every = EVERY_STEPS_OF_TWINS if is_twin else EVERY_STEPS

    given = rules(settings) | {"pace": (first, later), "every": every * later}
    if cell["arm"] == "trl" and not settings["small"]:  # so that several fit into memory
        given["common"] += ["rollout.micro_batch=128"]

    with tempfile.TemporaryDirectory() as folder:
        left = deadline + GRACE / 2 - time.time()
        row = race(name, cell["seed"], Path(folder), left, given)

    row |= cell | {"twin": is_twin}
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


def measure_paces(given: argparse.Namespace) -> None:
    """Seconds of the first and of a later step of each shape, alone on the GPU."""
    settings = rules(vars(given))
    with Children("benchmarks.speedrun.protocol:pace") as children:
        for arm in given.arms:
            for name in ARMS[arm]:
                shape = shape_of(name)
                if shape in given.paces or time.time() >= given.deadline:
                    continue

                with tempfile.TemporaryDirectory() as folder:
                    row = children.run(Path(folder), 240, name=name, settings=settings)
                if "failed" in row:
                    print(f"no pace of {name}: {row['failed'][-600:]}", flush=True)
                    continue

                given.paces[shape] = [row["first_step_s"], row["settled_step_s"]]
                write_json(given.paces, given.out / "paces.json")
                print(name, given.paces[shape], flush=True)


def pace(name: str, folder: Path, seconds: float, settings: Row) -> Row:
    """In a process: PACE_STEPS steps of a configuration, evaluated before and after only."""
    from transformers import TrainerCallback

    from benchmarks.speedrun.contenders import Contestant, make_config
    from benchmarks.speedrun.racing import Clock

    class End(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step >= PACE_STEPS

    common = [*settings["common"], "task.num_eval=8"]
    config = make_config(name, PACE_SEED, settings["model"], settings["small"], common)
    contestant = Contestant(name, config, folder / "run")
    deadline = time.perf_counter() + seconds
    clock = Clock(contestant, every=math.inf, target=2.0, seconds=math.inf, deadline=deadline)

    contestant.trainer.add_callback(clock)
    contestant.trainer.add_callback(End())
    contestant.trainer.train()
    return clock.row()


def run_alone(given: argparse.Namespace, done: Done) -> None:
    """Three reporting seeds of ours with a real clock."""
    with Children("benchmarks.speedrun.racing:race") as children:
        for cell in plan(["ours"], done):
            path = given.out / "cells" / f"alone-{key_of(cell)}.json"
            left = given.deadline - time.time()
            if cell["seed"] not in ALONE_SEEDS or path.exists() or left < 0:
                continue

            pace = given.paces[shape_of(cell["name"])]
            settings = rules(vars(given)) | {"every": EVERY_STEPS * pace[1]}
            race = {"name": cell["name"], "seed": cell["seed"], "given": settings}
            with tempfile.TemporaryDirectory() as folder:
                row = children.run(Path(folder), left, **race)

            if "failed" not in row and not row["cut_short"]:
                more = {"alone": True, "protocol": given.protocol, "pace": list(pace)}
                row |= cell | more
                write_json(row, path)
            print(path.stem, row.get("seconds_to_target"), row.get("failed", "")[-300:], flush=True)


def seconds_of(cell: Row, pace: Pace) -> float:
    """A run's time to the target at another pace."""
    seconds = cell["seconds_to_target"]
    if seconds is None:
        return math.inf

    first, later = cell["pace"]
    return seconds_at(1 + round((seconds - first) / later), pace)


def seconds_at(steps: int, pace: Pace) -> float:
    first, later = pace
    return first + (steps - 1) * later


def report(done: Done, paces: dict[str, Any]) -> str:
    """The reported runs, and the ratio of medians with its bootstrap interval."""
    rows = []
    times: dict[str, list[float]] = {}
    for arm in ARMS:
        cells = reports_of(arm, done)
        if not cells:
            continue

        pace = paces[shape_of(cells[0]["name"])]
        each = [seconds_of(cell, pace) for cell in cells]
        arrived = []
        for seconds in each:
            if math.isfinite(seconds):
                arrived.append(seconds)

        shown = ", ".join(f"{t:.0f}" if math.isfinite(t) else "-" for t in each)
        counted = f"{len(arrived)} of {len(cells)}"
        rows.append([arm, cells[0]["name"], counted, f"{median(each):.1f}", shown])

        times[arm] = each
        if arm == "trl":  # one that rarely arrives counts to the end of its schedule
            ends = [seconds_at(cell["steps"], pace) for cell in cells]
            times[arm] = ends if len(arrived) < FEWEST else arrived

    shown = table(["arm", "configuration", "arrived", "median s", "each"], rows)
    if len(times) == len(ARMS):
        return f"{shown}\n{ratio(**times)}"

    return shown


def reports_of(arm: str, done: Done) -> list[Row]:
    """The reported runs of the first configuration of an arm that has some."""
    reports = where(done.values(), use="reporting")
    for name in REPORTED[arm]:
        cells = where(reports, name=name)
        if cells:
            return cells
    return []


def ratio(ours: list[float], trl: list[float]) -> str:
    """The ratio of medians, with a 95% interval by resampling both."""
    rng = random.Random(0)
    drawn = []
    for _ in range(RESAMPLES):
        one = median(rng.choices(ours, k=len(ours)))
        drawn.append(one / median(rng.choices(trl, k=len(trl))))

    drawn.sort()
    low = drawn[RESAMPLES // 40]
    high = drawn[RESAMPLES - RESAMPLES // 40 - 1]
    return f"ours / trl: {median(ours) / median(trl):.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    given = read_arguments()
    given.deadline = time.time() + 60 * given.minutes
    given.protocol = given.protocol or ("" if given.show else protocol_commit())
    for folder in ("cells", "cut"):
        (given.out / folder).mkdir(parents=True, exist_ok=True)

    done = read_cells([*given.cells, *sorted((given.out / "cells").glob("*.json"))])
    file = given.out / "paces.json"
    given.paces = read_json(file) if file.exists() else {}

    if given.show:
        print(report(done, given.paces))
    elif given.alone:
        run_alone(given, done)
    else:
        measure_paces(given)
        run_together(given, done)


def read_cells(files: Sequence[Path]) -> Done:
    """Runs that count: neither cut short by the end of a window nor repeated alone."""
    done: Done = {}
    for path in files:
        found = read_json(path)
        cells = found if isinstance(found, list) else [found]
        counted = []
        for cell in cells:
            if not cell.get("alone") and not cell.get("cut_short"):
                counted.append(cell)

        done |= by_key(counted, key_of)
    return done


def run_together(given: argparse.Namespace, done: Done) -> None:
    """Search and report, several runs at once, their steps counted at the measured pace."""
    folder = given.out / "cells"
    ahead = []
    for key in given.ahead:
        name, _, seed = key.rpartition("-")
        ahead.append(make("tuning", "trl", name, int(seed)))

    def say(text: str) -> None:
        print(text, flush=True)

    def pick(waiting: Iterator[Row], busy: set[str]) -> Row | None:
        """The next run whose pace is known."""
        with_pace = (cell for cell in waiting if shape_of(cell["name"]) in given.paces)
        return next(with_pace, None)

    cells = Cells(
        lambda done: [*plan(given.arms, done), *ahead],
        key_of,
        done=done,
        keep=lambda key, cell: write_json(cell, folder / f"{key}.json"),
        describe=describe,
        say=say,
        tries=2,
        pick=pick,
    )
    crew = Crew(
        target="benchmarks.speedrun.protocol:run_cell",
        settings=vars(given) | {"out": str(given.out)},
        num_workers=given.workers,
        deadline=given.deadline,
        grace=GRACE,
        log=given.out / "log",
    )

    with mps(given.out, say, wanted=not given.small):
        work_through(cells, crew)
    say(f"{len(done)} runs, {cells.num_left()} of those known so far to go")


def describe(cell: Row) -> str:
    """A finished run in a line."""
    reached = cell["seconds_to_target"]
    arrived = "not reached" if reached is None else f"{reached:.1f} s"
    return f"{arrived}, best {cell['best']:.3f}, {cell['steps']} steps"


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    ahead = "NAME-SEED: TRL's tuning runs that free workers make before their round"
    add("--out", type=Path, required=True)
    add("--cells", type=Path, nargs="*", default=[], help="files of earlier runs")
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    add("--minutes", type=float, default=9)
    add("--workers", type=int, default=10)
    add("--ahead", nargs="*", default=[], help=ahead)
    add("--model", help="a model folder or .gguf file instead of smollm2")
    add("--protocol", default="", help="commit of PROTOCOL.md, without git")
    add("--alone", action="store_true", help="only: ours with a real clock")
    add("--show", action="store_true", help="only: print the table")
    add("--small", action="store_true", help="a random model, on a CPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
