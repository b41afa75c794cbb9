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
from typing import Any

from benchmarks._lib.results import read_json
from benchmarks.speedrun.children import Children, Results
from benchmarks.stack.cells import make_folder
from benchmarks.stack.plan import CONTENDERS, ROWS, RUNS, SEEDS, SMALL

T_INTERVAL = 4.303  # of three seeds, 95%


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--part", choices=["steps", "accuracy", "mismatch", "qlora"], default="steps"
    )
    parser.add_argument("--model", default="smollm2", help="SmolLM2's folder, or its name")
    parser.add_argument("--out", type=Path, default=Path("results/stack.json"))

    parser.add_argument(
        "--seconds",
        type=float,
        default=1500,
        help="stop before this",
    )

    parser.add_argument(
        "--rows",
        nargs="+",
        default=None,
        choices=[*ROWS, *SMALL],
    )

    runs = [name for named in RUNS.values() for name in named]
    parser.add_argument(
        "--names",
        nargs="+",
        default=None,
        choices=[*CONTENDERS, *runs],
    )

    parser.add_argument(
        "--steps",
        type=int,
        default=200,
        help="of the other parts",
    )

    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a tiny model on a CPU, without vLLM")

    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=SEEDS,
        help="of whole runs",
    )

    parser.add_argument(
        "--show",
        type=Path,
        nargs="+",
        help="print the table of these files",
    )

    given = parser.parse_args()
    if given.show:
        files = [read_json(path)["cells"] for path in given.show]
        print(table({name: cell for cells in files for name, cell in cells.items()}))
        return

    deadline = time.perf_counter() + given.seconds
    results = Results(given.out)
    cells = [one for one in plan(given) if "failed" in results.cells.get(one[0], {"failed": ""})]

    target = cells[0][1] if cells else "step"  # a part has one
    with (
        tempfile.TemporaryDirectory() as scratch,
        Children(f"benchmarks.stack.cells:{target}", compile_anew=False) as children,
    ):
        for name, _, cell in cells:
            left = deadline - time.perf_counter()
            if left < 30:
                print(f"{name}: no time left; run the same command again")
                continue

            folder = Path(scratch) / re.sub(r"\W+", "_", name)
            results.put(name, children.run(folder, left, **cell))

    print(table(results.cells))


def plan(given: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, function and arguments of every cell."""
    common = {"model": given.model, "steps": given.steps}
    if given.part == "steps":
        rows = given.rows or list(SMALL if given.small else ROWS)
        names = given.names or list(CONTENDERS)
        for row in rows:
            size = (ROWS | SMALL)[row]
            folder = make_folder(size.model, given.out.parent / "models" / size.model, given.model)

            more = {
                "model": str(folder),
                "warm": given.warm,
                "count": given.count,
            }
            for name in names:
                if not (given.small and CONTENDERS[name].uses_vllm):
                    cell = {
                        "row": row,
                        "contender": name,
                        "given": more,
                    }
                    yield f"{row}/{name}", "step", cell
    elif given.part == "mismatch":
        for name in ("fresh", "stale"):
            cell = {"stale": name == "stale", "given": {**common, "steps": min(60, given.steps)}}
            yield f"mismatch/{name}", "mismatch", cell
    else:
        for seed in given.seeds[: 1 if given.small else None]:
            for name, flags in RUNS[given.part].items():
                left_out = given.names is not None and name not in given.names
                if left_out or (given.small and ("colocate" in flags or "4bit" in flags)):
                    continue

                tiny = ["--no-rollout.fast", "--rollout.prompts", "4", "--task.num-eval", "8"]
                cell = {"flags": [*flags, *(tiny if given.small else [])], "seed": seed}
                yield f"{given.part}/{name}/{seed}", "whole_run", {**cell, "given": common}


def table(cells: dict[str, Any]) -> str:
    """Markdown of what is known so far."""
    done = {name: cell for name, cell in cells.items() if "failed" not in cell}
    lines = []

    steps = {name: cell for name, cell in done.items() if "step_ms" in cell}
    if steps:
        lines = [
            "| row | contender | ms per step | tokens/s | against the fastest | "
            "bookkeeping, of TRL + vLLM's step |",
            "|---|---|---|---|---|---|",
        ]

    for cell in steps.values():
        others = [one for one in steps.values() if one["row"] == cell["row"]]
        best = min(one["step_ms"] for one in others)
        base = steps.get(f"{cell['row']}/TRL + vLLM", {}).get("step_ms")
        share = f"{cell['bookkeeping_ms'] / base:.1%}" if base else "?"

        lines.append(
            f"| {cell['row']} | {cell['contender']} | {cell['step_ms']:.0f} | "
            f"{cell.get('tokens_per_s', 0):,.0f} | {cell['step_ms'] / best:.2f} | {share} |"
        )

    for part, (one, other) in {"accuracy": ("fast", "vllm"), "qlora": ("bf16", "4bit")}.items():
        pairs = [(done.get(f"{part}/{one}/{s}"), done.get(f"{part}/{other}/{s}")) for s in SEEDS]
        gaps = [b["after"] - a["after"] for a, b in pairs if a and b]
        if gaps:
            width = T_INTERVAL * statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) == 3 else 0
            lines.append(f"{part}: {other} minus {one} {statistics.mean(gaps):+.3f} +- {width:.3f}")

    for name, cell in done.items():
        if "events" in cell:
            last = cell["rows"][-1]
            warned = [f"{one.get('detector')} at step {one.get('step')}" for one in cell["events"]]
            lines.append(f"{name}: {json.dumps(last)}; watch: {', '.join(warned) or 'nothing'}")

    failed = [
        f"{name}: {cell['failed'][-300:]}" for name, cell in cells.items() if "failed" in cell
    ]
    return "\n".join([*lines, *failed])


if __name__ == "__main__":
    main()
