"""Seconds per GRPO step with TRL and with Mesotron, with and without vLLM, on one GPU.

    python -m benchmarks.stack --out results/stack.json --seconds 1500
    python -m benchmarks.stack --part accuracy --out results/stack_accuracy.json
    python -m benchmarks.stack --show results/stack.json

Every contender is a process of its own; the file is written after each, and cells that are in it
are not run again. Parts: steps, accuracy (200 steps with and without vLLM), mismatch (fresh and
stale weights), qlora (bfloat16 and 4-bit). On a CPU: add --small --model tiny.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._lib.results import read_json
from benchmarks._lib.rows import table as markdown
from benchmarks._lib.rows import where
from benchmarks.speedrun.children import Children, Results
from benchmarks.stack.cells import make_folder
from benchmarks.stack.plan import CONTENDERS, ROWS, RUNS, SEEDS, SMALL

T_INTERVAL = 4.303  # of three seeds, 95%


PAIRS = {"accuracy": ("fast", "vllm"), "qlora": ("bf16", "4bit")}
TINY_RUN = ("--no-rollout.fast", "--batch", "4", "--task.num-eval", "8")
Cells = dict[str, dict[str, Any]]


class Work(NamedTuple):
    """A cell that is to be measured."""

    name: str
    target: str  # the function of `cells`
    arguments: dict[str, Any]


def main() -> None:
    given = read_arguments()
    if given.show:
        known: Cells = {}
        for path in given.show:
            known |= read_json(path)["cells"]
        print(table(known))
        return

    deadline = time.perf_counter() + given.seconds
    results = Results(given.out)
    todo = [work for work in plan(given) if is_open(results.cells, work.name)]
    target = todo[0].target if todo else "step"  # a part has one

    with (
        tempfile.TemporaryDirectory() as scratch,
        Children(f"benchmarks.stack.cells:{target}", compile_anew=False) as children,
    ):
        for work in todo:
            left = deadline - time.perf_counter()
            if left < 30:
                print(f"{work.name}: no time left; run the same command again")
                continue
            folder = Path(scratch) / re.sub(r"\W+", "_", work.name)
            results.put(work.name, children.run(folder, left, **work.arguments))

    print(table(results.cells))


def is_open(cells: Cells, name: str) -> bool:
    return name not in cells or "failed" in cells[name]


def read_arguments() -> argparse.Namespace:
    runs = [name for named in RUNS.values() for name in named]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--part", choices=["steps", "accuracy", "mismatch", "qlora"], default="steps")
    add("--model", default="smollm2", help="SmolLM2's folder, or its name")
    add("--out", type=Path, default=Path("results/stack.json"))
    add("--seconds", type=float, default=1500, help="stop before this")
    add("--rows", nargs="+", default=None, choices=[*ROWS, *SMALL])
    add("--names", nargs="+", default=None, choices=[*CONTENDERS, *runs])
    add("--steps", type=int, default=200, help="of the other parts")
    add("--warm", type=int, default=3)
    add("--count", type=int, default=3)
    add("--small", action="store_true", help="a tiny model on a CPU, without vLLM")
    add("--seeds", type=int, nargs="+", default=SEEDS, help="of whole runs")
    add("--show", type=Path, nargs="+", help="print the table of these files")
    return parser.parse_args()


def plan(given: argparse.Namespace) -> Iterator[Work]:
    """Every cell of a part."""
    if given.part == "steps":
        yield from plan_steps(given)
    elif given.part == "mismatch":
        yield from plan_mismatch(given)
    else:
        yield from plan_runs(given)


def plan_steps(given: argparse.Namespace) -> Iterator[Work]:
    """A step of each contender in each row."""
    rows = given.rows or list(SMALL if given.small else ROWS)
    for row in rows:
        size = (ROWS | SMALL)[row]
        folder = make_folder(size.model, given.out.parent / "models" / size.model, given.model)
        more = {"model": str(folder), "warm": given.warm, "count": given.count}

        for name in given.names or CONTENDERS:
            if given.small and CONTENDERS[name].uses_vllm:
                continue
            yield Work(f"{row}/{name}", "step", {"row": row, "contender": name, "given": more})


def plan_mismatch(given: argparse.Namespace) -> Iterator[Work]:
    """A run with fresh weights and one with stale ones."""
    more = {"model": given.model, "steps": min(60, given.steps)}
    for name in ("fresh", "stale"):
        arguments = {"stale": name == "stale", "given": more}
        yield Work(f"mismatch/{name}", "mismatch", arguments)


def plan_runs(given: argparse.Namespace) -> Iterator[Work]:
    """Whole runs of a part, seed by seed."""
    more = {"model": given.model, "steps": given.steps}
    for seed in given.seeds[:1] if given.small else given.seeds:
        for name, flags in RUNS[given.part].items():
            if given.names is not None and name not in given.names:
                continue
            if given.small and ("colocate" in flags or "4bit" in flags):
                continue

            own = [*flags, *TINY_RUN] if given.small else [*flags]
            arguments = {"flags": own, "seed": seed, "given": more}
            yield Work(f"{given.part}/{name}/{seed}", "whole_run", arguments)


def table(cells: Cells) -> str:
    """Markdown of what is known so far."""
    done = {name: cell for name, cell in cells.items() if "failed" not in cell}
    lines = [step_table(done), *pair_lines(done), *watch_lines(done)]
    for name, cell in cells.items():
        if "failed" in cell:
            lines.append(f"{name}: {cell['failed'][-300:]}")
    return "\n".join(line for line in lines if line)


def step_table(done: Cells) -> str:
    """Milliseconds of a step, by row and contender."""
    steps = [cell for cell in done.values() if "step_ms" in cell]
    rows = []
    for cell in steps:
        best = min(one["step_ms"] for one in where(steps, row=cell["row"]))
        base = done.get(f"{cell['row']}/TRL + vLLM", {}).get("step_ms")
        row = [
            cell["row"],
            cell["contender"],
            f"{cell['step_ms']:.0f}",
            f"{cell.get('tokens_per_s', 0):,.0f}",
            f"{cell['step_ms'] / best:.2f}",
            f"{cell['bookkeeping_ms'] / base:.1%}" if base else "?",
        ]
        rows.append(row)

    head = ["row", "contender", "ms per step", "tokens/s", "against the fastest"]
    return markdown([*head, "bookkeeping, of TRL + vLLM's step"], rows).rstrip("\n")


def pair_lines(done: Cells) -> Iterator[str]:
    """How far two kinds of runs are apart in the end, with the interval of three seeds."""
    for part, (one, other) in PAIRS.items():
        gaps = []
        for seed in SEEDS:
            first = done.get(f"{part}/{one}/{seed}")
            second = done.get(f"{part}/{other}/{seed}")
            if first and second:
                gaps.append(second["after"] - first["after"])

        if gaps:
            width = 0.0
            if len(gaps) == 3:
                width = T_INTERVAL * statistics.stdev(gaps) / len(gaps) ** 0.5
            yield f"{part}: {other} minus {one} {statistics.mean(gaps):+.3f} +- {width:.3f}"


def watch_lines(done: Cells) -> Iterator[str]:
    """What the watch said of the runs with vLLM."""
    for name, cell in done.items():
        if "events" in cell:
            warned = [f"{one.get('detector')} at step {one.get('step')}" for one in cell["events"]]
            last = json.dumps(cell["rows"][-1])
            yield f"{name}: {last}; watch: {', '.join(warned) or 'nothing'}"


if __name__ == "__main__":
    main()
