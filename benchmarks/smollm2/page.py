"""The study's results as one page for each question, with its tables and plots.

    python -m benchmarks.smollm2.page results.json [more.json.gz ...]

Writes NAME.md and NAME.png beside this file for each part that has cells, and all cells packed. Of
a cell that is in two files the later one counts. What the numbers mean is written by hand in
findings/NAME.md and put under the page's title.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._lib.results import read_json, write_json
from benchmarks.smollm2.accounts import levers, spectrum, step_map
from benchmarks.smollm2.draw import draw_gsm8k, draw_levers, draw_map, draw_spectrum
from benchmarks.smollm2.plan import Cell, key_of
from benchmarks.smollm2.second_task import gsm8k

HERE = Path(__file__).parent
PATHS = ("model", "folder", "out", "state", "cells", "gsm8k")  # a machine's own


def main(places: list[str], folder: Path = HERE) -> None:
    """Pages of the results in these files, written to a folder."""
    files = [read_json(Path(place)) for place in places]
    cells = {key_of(cell): cell for found in files for cell in found["cells"]}
    found = files[-1] | {"cells": list(cells.values())}
    told = {name: value for name, value in found["settings"].items() if name not in PATHS}
    write_json(found | {"settings": told}, folder / "results.json.gz")
    for name, (title, part, write, draw) in PAGES.items():
        mine = [cell for cell in cells.values() if cell["part"] == part]
        if not mine:
            continue
        draw(mine, folder / f"{name}.png")
        findings = HERE / "findings" / f"{name}.md"
        said = [findings.read_text().strip("\n"), ""] if findings.exists() else []
        page = [f"# {title}", "", circumstances(found), "", *said, write(mine)]
        page += ["", f"![{title}]({name}.png)", ""]
        (folder / f"{name}.md").write_text("\n".join(page))
        print(folder / f"{name}.md")


def circumstances(found: dict[str, Any]) -> str:
    """Where the numbers come from, the same on every page."""
    machine = found["machine"]
    return (
        f"Appendix of [the SmolLM2 study](README.md), which has the setting. {machine['device']}, "
        f"torch {machine['torch']}, Transformers {machine['transformers']}; every number is in "
        "[results.json.gz](results.json.gz)."
    )


Page = tuple[str, str, Callable[[list[Cell]], str], Callable[[list[Cell], Path], None]]
PAGES: dict[str, Page] = {
    "map": ("Step size, batch size and updates per rollout", "map", step_map, draw_map),
    "spectrum": ("The spectrum of the gradients", "spectrum", spectrum, draw_spectrum),
    "levers": ("What makes it learn faster", "levers", levers, draw_levers),
    "gsm8k": ("GSM8K after a supervised start", "gsm8k", gsm8k, draw_gsm8k),
}


if __name__ == "__main__":
    main(sys.argv[1:])
