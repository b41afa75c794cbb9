"""The tables of README.md from the result files, on standard output; the verdict is over all files.

python -m benchmarks.speedrun.page phases.json grid.json final.json stock.json
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
    whole = (f"{cells[name]['step_ms']:.0f}" for name in names)
    head = [line("ms of a step", *names), "|---" * (len(names) + 1) + "|"]
    return [*head, line("whole, not waited for", *whole), *each_phase(cells, names, "phases_ms")]


def first_phases(cells: dict[str, Row]) -> list[str]:
    """Milliseconds of the first step by phase, and of the second, which records."""
    names = [name for name, row in cells.items() if row.get("first_phases_ms")]
    if not names:
        return []
    head = [line("ms of the first step", *names), "|---" * (len(names) + 1) + "|"]
    first = line("whole", *(f"{cells[name]['first_ms']:.0f}" for name in names))
    second = line("the second step", *(f"{cells[name]['second_ms'] or 0:.0f}" for name in names))
    return [*head, first, *each_phase(cells, names, "first_phases_ms"), second]


def each_phase(cells: dict[str, Row], names: list[str], key: str) -> list[str]:
    """A line for each phase."""
    found = dict.fromkeys(phase for name in names for phase in cells[name][key])
    rows = {phase: [cells[name][key].get(phase, 0.0) for name in names] for phase in found}
    return [line(phase, *(f"{ms:.1f}" for ms in each)) for phase, each in rows.items()]


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
    """Mean seconds of each contender with several fresh seeds, and their ratio.

    A seed that ended before the target took at least as long as it ran, so its contender's mean is
    a lower bound. Ours must have arrived with every seed. The seed 0 has chosen options, or told a
    pace in a few seconds.
    """
    rows: dict[str, list[Row]] = {}
    for cell, row in cells.items():
        name, seed, *rules = cell.split("/")
        if "curve" in row and seed != "0":
            rows.setdefault("/".join([name, *rules]), []).append(row)
    rows = {name: each for name, each in rows.items() if len(each) > 1}
    means = {name: mean(row["curve"][-1]["seconds"] for row in each) for name, each in rows.items()}
    early = {name for name, each in rows.items() if any(not arrived(row) for row in each)}
    lines = [
        f"{name}: {'over ' * (name in early)}{value:.1f} s, {len(rows[name])} seeds, "
        f"{sum(map(arrived, rows[name]))} arrived"
        for name, value in means.items()
    ]
    stock = [name for name in means if name.startswith("stock")]
    ours = [name for name in means if not name.startswith("stock") and name not in early]
    if stock and ours:
        best, rival = min(ours, key=means.__getitem__), min(stock, key=means.__getitem__)
        bound = "at most " * (rival in early)
        lines.append(f"{best} / {rival}: {bound}{means[best] / means[rival]:.2f}")
    return lines


def arrived(row: Row) -> bool:
    """Whether a run has reached the target."""
    return row["seconds_to_target"] is not None


def failures(cells: dict[str, Row]) -> list[str]:
    """What failed, by its last line."""
    found = {cell: row["failed"] for cell, row in cells.items() if "failed" in row}
    return [f"- {cell}: {words.strip().splitlines()[-1]}" for cell, words in found.items()]


def line(*items: object) -> str:
    """A row of a table."""
    return "| " + " | ".join(map(str, items)) + " |"


def main() -> None:
    raced: dict[str, Row] = {}
    for place in sys.argv[1:]:
        cells = json.loads(Path(place).read_text())["cells"]
        timed = any("phases_ms" in row for row in cells.values())
        raced |= {} if timed else cells
        shown = (phases, first_phases) if timed else (races,)
        for part in [show(cells) for show in (*shown, failures)]:
            if part:
                print("\n".join(part), end="\n\n")
    print("\n".join(verdict(raced)))


if __name__ == "__main__":
    main()
