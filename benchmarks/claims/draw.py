"""The picture of the rates: `python -m benchmarks.claims.draw`."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks._lib.pictures import save_picture
from benchmarks._lib.results import read_json

FOLDER = Path(__file__).parent

OPTIMIZERS = {
    "adamw": ("AdamW", "#888888"),
    "muon": ("Muon", "#1f77b4"),
    "pion": ("Pion, aligned cutoff", "#9467bd"),
}


def main() -> None:
    draw(read_json(FOLDER / "rates.json.gz"), FOLDER / "rates.png")


def draw(runs: list[dict[str, Any]], out: Path) -> None:
    """Final accuracies over the rate: a dot per seed, a line through the means."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()

    for optimizer, (label, color) in OPTIMIZERS.items():
        ends = defaultdict(list)
        for run in runs:
            name, rate = run["name"].split()
            if name == optimizer:
                ends[float(rate)].append(run["accuracy"])

        rates = sorted(ends)
        axes.plot(rates, [fmean(ends[rate]) for rate in rates], color=color, label=label)
        for rate in rates:
            axes.plot([rate] * len(ends[rate]), ends[rate], ".", color=color)

    _, start = runs[0]["curve"][0]
    axes.axhline(start, color="black", linewidth=0.7, linestyle=":")
    axes.set_xscale("log")
    axes.set_xlabel("rate")
    axes.set_ylabel("final accuracy")
    axes.legend(frameon=False, fontsize=8)
    save_picture(figure, out, dpi=110)


if __name__ == "__main__":
    main()
