"""The tables of README.md from the result files, on standard output.

python3 benchmarks/speedrun/page.py results/phases.json results/grid.json results/final.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

Row = dict[str, Any]


def phases(cells: dict[str, Row]) -> list[str]:
    """Milliseconds of a step by phase, a column for each contender."""
    names = [name for name, row in cells.items() if "phases_ms" in row]
    found = dict.fromkeys(phase for name in names for phase in cells[name]["phases_ms"])
    lines = [
        line("ms of a step", *names),
        "|---" * (len(names) + 1) + "|",
        line("whole, not waited for", *(f"{cells[name]['step_ms']:.0f}" for name in names)),
        line("first step", *(f"{cells[name]['first_ms']:.0f}" for name in names)),
    ]
    for phase in found:
        each = (cells[name]["phases_ms"].get(phase, 0.0) for name in names)
        lines.append(line(phase, *(f"{ms:.1f}" for ms in each)))
    return lines


def races(cells: dict[str, Row]) -> list[str]:
    """A line for each run."""
    head = ("run", "seconds to the target", "steps", "best", "last", "s a step", "first step")
    lines = [line(*head), "|---" * len(head) + "|"]
    for cell, row in cells.items():
        if "curve" in row:
            reached = row["seconds_to_target"]
            lines.append(
                line(
                    cell,
                    "not reached" if reached is None else f"{reached:.1f}",
                    row["steps"],
                    f"{row['best']:.3f}",
                    f"{row['last']:.3f}",
                    f"{row['step_s']:.3f}",
                    f"{row['first_step_s']:.1f}",
                )
            )
    return lines


def verdict(cells: dict[str, Row]) -> list[str]:
    """Mean seconds of each contender whose every seed reached the target, and their ratio."""
    times: dict[str, list[float | None]] = {}
    for row in cells.values():
        if "curve" in row:
            times.setdefault(row["name"], []).append(row["seconds_to_target"])
    means = {
        name: mean(x for x in each if x is not None)
        for name, each in times.items()
        if None not in each and len(each) > 1
    }
    lines = [f"{name}: {value:.1f} s, {len(times[name])} seeds" for name, value in means.items()]
    stock = [value for name, value in means.items() if name.startswith("stock")]
    ours = [value for name, value in means.items() if not name.startswith("stock")]
    if stock and ours:
        lines.append(f"ours / stock: {min(ours) / min(stock):.2f}")
    return lines


def failures(cells: dict[str, Row]) -> list[str]:
    """What failed, by its last line."""
    found = {cell: row["failed"] for cell, row in cells.items() if "failed" in row}
    return [f"- {cell}: {words.strip().splitlines()[-1]}" for cell, words in found.items()]


def line(*items: object) -> str:
    """A row of a table."""
    return "| " + " | ".join(map(str, items)) + " |"


def main() -> None:
    for place in sys.argv[1:]:
        cells = json.loads(Path(place).read_text())["cells"]
        timed = any("phases_ms" in row for row in cells.values())
        parts = [phases(cells)] if timed else [races(cells), verdict(cells)]
        for part in (*parts, failures(cells)):
            if part:
                print("\n".join(part), end="\n\n")


if __name__ == "__main__":
    main()
