"""The study's JSON as tables for a page and as pictures beside it.

python benchmarks/vla/page.py benchmarks/vla/object10.json
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

Cell = dict[str, Any]
NAMES = {
    "adamw": "AdamW",
    "muon": "Muon",
    "muon_pion": "Muon, Pion on action",
    "pion": "Pion everywhere",
    "muon_low_rank": "Muon, low rank on action",
}
COLOURS = {
    "adamw": "#888888",
    "muon": "#1f77b4",
    "muon_pion": "#d62728",
    "pion": "#9467bd",
    "muon_low_rank": "#2ca02c",
}
PARTS = ("vision", "language", "fusion", "action")


def main() -> None:
    path = Path(sys.argv[1])
    found = json.loads(path.read_text())
    cells, settings = found["cells"], found["settings"]
    budgets = sorted({cell["steps"] for cell in cells})
    print(rates_table(cells, budgets[0]))
    print(finalists_table(cells, budgets, settings))
    print(strength_table(cells))
    print(gradient_table(cells))
    if len({cell["rate"] for cell in of(cells, steps=budgets[0])}) > 1:
        draw_rates(cells, budgets[0], path.with_name(f"{path.stem}_rates.png"))
    draw_gradients(cells, path.with_name(f"{path.stem}_gradients.png"))


def of(cells: list[Cell], action_scale: float = 1, **wanted: Any) -> list[Cell]:
    """Cells with these values."""
    same = [cell for cell in cells if cell.get("action_scale", 1) == action_scale]
    return [cell for cell in same if all(cell[key] == value for key, value in wanted.items())]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def contenders(cells: list[Cell]) -> list[str]:
    return [name for name in NAMES if of(cells, contender=name)]


def heads(cells: list[Cell]) -> list[str]:
    return list(dict.fromkeys(cell["head"] for cell in cells))


def rates_table(cells: list[Cell], steps: int) -> str:
    """Success on validation scenes over rates, one seed."""
    tried = of(cells, steps=steps, seed=0, strength="noise")
    rates = sorted({cell["rate"] for cell in tried})
    rows = []
    for head in heads(cells):
        for name in contenders(tried):
            mine = {cell["rate"]: cell for cell in of(tried, head=head, contender=name)}
            if mine:
                shown = [f"{mine[r]['validation']:.2f}" if r in mine else "" for r in rates]
                rows.append([head, NAMES[name], *shown])
    return table(["head", f"{steps} steps", *(f"{rate:g}" for rate in rates)], rows)


def finalists_table(cells: list[Cell], budgets: list[int], settings: dict[str, Any]) -> str:
    """Success on test scenes at each budget, seed by seed, at the rate that validation chose."""
    rows = []
    for head in heads(cells):
        for name in contenders(cells):
            row = [head, NAMES[name]]
            for steps in budgets:
                mine = of(cells, head=head, contender=name, steps=steps, strength="noise")
                seeds = defaultdict(list)
                for cell in mine:
                    seeds[cell["rate"]].append(cell)
                if not seeds:
                    row += ["", "", ""]
                    continue
                # The rate that went on to more seeds; before that, the best on validation.
                rate = max(
                    seeds, key=lambda r: (len(seeds[r]), max(c["validation"] for c in seeds[r]))
                )
                final = sorted(seeds[rate], key=lambda cell: cell["seed"])
                tests = [cell["test"] for cell in final]
                row += [
                    f"{rate:g}",
                    f"{mean(tests):.3f} ({', '.join(f'{t:.2f}' for t in tests)})",
                    f"{mean(cell['wrong'] for cell in final):.2f}",
                ]
            rows.append(row)
    head_row = ["head", "contender"]
    for steps in budgets:
        head_row += [f"rate, {steps}", f"success at {steps}", f"wrong, {steps}"]
    return table(head_row, rows)


def strength_table(cells: list[Cell]) -> str:
    """Pion's strength on the action module: success, and what half-way through it let pass."""
    rows = []
    for scale in sorted({cell.get("action_scale", 1) for cell in cells}):
        tried = of(cells, action_scale=scale, contender="muon_pion", seed=0)
        tried = [cell for cell in tried if cell["probes"]]
        for cell in sorted(tried, key=lambda cell: (cell["rate"], cell["strength"])):
            half = cell["probes"][4]
            step = half["update_rms/action"] / half["update_rms/vision"]
            row = [cell["strength"], f"{cell['rate']:g}", f"{scale:g}", f"{cell['test']:.2f}"]
            row += [f"{cell['loss']:.3f}", f"{step:.2f}"]
            row += [f"{half[f'optim/action/pion/{k}']:.2f}" for k in ("passed_rank", "dead_blocks")]
            rows.append(row)
    head_row = ["strength", "rate", "action scale", "success", "loss", "action step / vision step"]
    return table([*head_row, "passed", "dead"], rows)


def gradient_table(cells: list[Cell]) -> str:
    """Effective rank, top share and SNR of each part's gradient, early and late."""
    rows = []
    for cell in cells:
        if not cell["probes"] or cell["strength"] != "noise" or cell["head"] != cells[0]["head"]:
            continue
        for place, probe in (("2 %", cell["probes"][1]), ("75 %", cell["probes"][-2])):
            row = [NAMES[cell["contender"]], f"{cell['rate']:g}", place]
            for part in PARTS:
                keys = [
                    f"gradient/{part}/{name}" for name in ("effective_rank", "top_share", "snr")
                ]
                row.append(" / ".join(f"{probe[key]:.2g}" for key in keys if key in probe))
            rows.append(row)
    return table(["contender", "rate", "at", *PARTS], rows)


def draw_rates(cells: list[Cell], steps: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = heads(cells)
    figure, axes = plt.subplots(1, len(names), figsize=(5 * len(names), 3.6), squeeze=False)
    for axis, head in zip(axes[0], names, strict=True):
        for name in contenders(cells):
            mine = of(cells, head=head, contender=name, steps=steps, seed=0, strength="noise")
            mine.sort(key=lambda cell: cell["rate"])
            axis.plot(
                [cell["rate"] for cell in mine],
                [cell["validation"] for cell in mine],
                "o-",
                color=COLOURS[name],
                label=NAMES[name],
            )
        axis.set_xscale("log")
        axis.set_ylim(-0.03, 1.03)
        axis.set_xlabel("learning rate of matrices")
        axis.set_title(f"{head} head, {steps} steps, validation")
    axes[0][0].set_ylabel("success")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def draw_gradients(cells: list[Cell], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    head = heads(cells)[0]
    probed = [cell for cell in of(cells, head=head, strength="noise") if cell["probes"]]
    best: dict[str, Cell] = {}
    for cell in probed:
        kept = best.get(cell["contender"])
        if kept is None or cell["validation"] > kept["validation"]:
            best[cell["contender"]] = cell
    measures = {"effective_rank": "effective rank", "top_share": "top share", "snr": "SNR"}
    figure, axes = plt.subplots(
        len(measures), len(PARTS), figsize=(12, 7), sharex=True, sharey="row"
    )
    for row, (key, words) in zip(axes, measures.items(), strict=True):
        for axis, part in zip(row, PARTS, strict=True):
            for name, cell in best.items():
                points = [(p["step"], p.get(f"gradient/{part}/{key}")) for p in cell["probes"]]
                points = [point for point in points if point[1] is not None]
                axis.plot(*zip(*points, strict=True), "o-", ms=3, color=COLOURS[name],
                          label=NAMES[name])  # fmt: skip
            if key == "effective_rank":
                axis.set_title(part)
        row[0].set_ylabel(words)
    axes[0][0].legend(fontsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
