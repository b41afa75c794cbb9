"""The study's results as tables and plots.

    python -m benchmarks.smollm2.page results.json [more.json.gz ...]

Writes tables.md, a picture of each part and all cells packed beside this file. Of a cell that is in
two files the later one counts. What the numbers mean is written by hand in README.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._lib.results import read_json, write_json
from benchmarks._lib.rows import by_key, where
from benchmarks.smollm2.accounts import levers, spectrum, step_map
from benchmarks.smollm2.draw import draw_gsm8k, draw_levers, draw_map, draw_spectrum
from benchmarks.smollm2.plan import Cell, key_of
from benchmarks.smollm2.second_task import gsm8k

HERE = Path(__file__).parent
PATHS = ("model", "folder", "out", "state", "cells", "gsm8k")  # a machine's own


def main(places: list[str], folder: Path = HERE) -> None:
    """Write the tables, the pictures and the cells of the results in these files to a folder."""
    files = [read_json(Path(place)) for place in places]
    cells: dict[str, Cell] = {}
    for file in files:
        cells |= by_key(file["cells"], key_of)

    found = files[-1] | {"cells": list(cells.values())}
    settings = {name: value for name, value in found["settings"].items() if name not in PATHS}
    write_json(found | {"settings": settings}, folder / "results.json.gz")

    page = [f"# Tables of the SmolLM2 study\n\n{circumstances(found)}\n"]
    for name, section in SECTIONS.items():
        own = where(cells.values(), part=name)
        if own:
            section.draw(own, folder / f"{name}.png")
            picture = f"![{section.title}]({name}.png)"
            page.append(f"## {section.title}\n\n{section.write(own)}\n{picture}\n")

    path = folder / "tables.md"
    path.write_text("\n".join(page))
    print(path)


def circumstances(found: dict[str, Any]) -> str:
    """Where the numbers come from."""
    machine = found["machine"]
    return (
        f"What they show is in [the study](README.md). {machine['device']}, torch "
        f"{machine['torch']}, Transformers {machine['transformers']}; every number is in "
        "[results.json.gz](results.json.gz)."
    )


@dataclass(frozen=True)
class Section:
    """The tables and the picture of a part of the study."""

    title: str
    write: Callable[[list[Cell]], str]
    draw: Callable[[list[Cell], Path], None]


SECTIONS = {
    "levers": Section("What makes it learn faster", levers, draw_levers),
    "map": Section("Step size, batch size and updates per rollout", step_map, draw_map),
    "spectrum": Section("The spectrum of the gradients", spectrum, draw_spectrum),
    "gsm8k": Section("GSM8K after a supervised start", gsm8k, draw_gsm8k),
}


if __name__ == "__main__":
    main(sys.argv[1:])
