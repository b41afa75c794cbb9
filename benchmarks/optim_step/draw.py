"""The picture of the page: `python -m benchmarks.optim_step.draw`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks._lib.pictures import save_picture
from benchmarks._lib.results import read_json

FOLDER = Path(__file__).parent

COLORS = {
    "muon": "#1f77b4",
    "pion": "#9467bd",
    "pion_noise": "#d62728",
    "pytorch_optimizer_gram": "#bbbbbb",
    "torch_muon": "#888888",
}
WIDTH = 0.16  # of a bar; five of them and a gap fill a model's place


def main() -> None:
    draw(read_json(FOLDER / "cpu.json.gz")["models"], FOLDER / "steps.png")


def draw(models: list[dict[str, Any]], out: Path) -> None:
    """Bars: a step of each optimizer over the bare products, by model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()

    for place, (optimizer, color) in enumerate(COLORS.items()):
        positions = []
        heights = []
        for index, model in enumerate(models):
            for row in model["rows"]:
                if row["optimizer"] == optimizer:
                    positions.append(index + place * WIDTH)
                    heights.append(row["versus_floor"])

        axes.bar(positions, heights, WIDTH, label=optimizer, color=color)

    axes.set_yscale("log")
    axes.set_xticks([index + 2 * WIDTH for index in range(len(models))])
    axes.set_xticklabels([model["model"] for model in models])
    axes.set_ylabel("step / bare products")
    axes.axhline(1, color="black", linewidth=0.7)
    figure.legend(loc="outside upper center", ncols=len(COLORS), frameon=False, fontsize=8)
    save_picture(figure, out, dpi=110)


if __name__ == "__main__":
    main()
