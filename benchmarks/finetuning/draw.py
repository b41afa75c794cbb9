"""The figure and the table of the page: `python -m benchmarks.finetuning.draw results.json.gz`."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks._lib.pictures import save_picture
from benchmarks._lib.results import read_json
from benchmarks._lib.rows import table, values
from benchmarks.finetuning.plan import CURVES, FINAL_SEEDS, Cell, score

# What the table of reported seeds shows, and how.
SHOWN = {
    "loss": ".4f",
    "accuracy": ".3f",
    "forgetting": "+.3f",
    "kl": ".1f",
    "moved": ".4f",
}
WITH_RANGE = ("loss", "accuracy", "forgetting")
COLORS = {
    4: "#c23b22",
    16: "#e0912f",
    64: "#3b7a57",
    0: "#26418f",
}

Means = dict[float, float]  # a held-out loss by rate


def main(path: Path, out: Path) -> None:
    cells = read_json(path)["cells"]
    draw(cells, out)
    print(best_rates(cells), finals(cells), sep="\n")


def curves(cells: list[Cell]) -> dict[tuple[str, int], Means]:
    """(contender, rank) -> rate -> mean held-out loss over the tuning seeds."""
    losses: dict[tuple[str, int], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        if cell["seed"] not in FINAL_SEEDS:
            losses[cell["contender"], cell["rank"]][cell["rate"]].append(score(cell))

    means = {}
    for key, by_rate in losses.items():
        means[key] = {rate: fmean(by_rate[rate]) for rate in sorted(by_rate)}
    return means


def best_rates(cells: list[Cell]) -> str:
    """Best rate and loss of each curve."""
    rows = []
    for (name, rank), means in sorted(curves(cells).items()):
        best = min(means, key=means.__getitem__)
        rows.append([name, str(rank or "full"), f"{best:.1e}", f"{means[best]:.3f}"])
    return table(["rule", "rank", "best rate", "held-out loss"], rows)


def finals(cells: list[Cell]) -> str:
    """The comparison on the reporting seeds, the best first: means and ranges."""
    groups: dict[tuple[str, float], list[Cell]] = defaultdict(list)
    for cell in cells:
        if cell["seed"] in FINAL_SEEDS:
            groups[cell["contender"], cell["rate"]].append(cell)

    rows = []
    for name, rate in sorted(groups, key=lambda key: mean_score(groups[key])):
        shown = [summary_of(groups[name, rate], field) for field in SHOWN]
        rows.append([name, f"{rate:.1e}", *shown])
    return table(["rule", "rate", *SHOWN], rows)


def mean_score(cells: Iterable[Cell]) -> float:
    return fmean(map(score, cells))


def summary_of(cells: list[Cell], field: str) -> str:
    """The mean over seeds, and the range where it is shown."""
    form = SHOWN[field]
    found = values(cells, field)
    text = format(fmean(found), form)
    if field in WITH_RANGE:
        text += f" [{min(found):{form}}, {max(found):{form}}]"
    return text


def draw(cells: list[Cell], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = curves(cells)
    figure, axes = plt.subplots(1, len(CURVES), figsize=(10, 3.2), sharey=True)
    for axis, name in zip(axes, CURVES, strict=True):
        for of, rank in sorted(found):
            if of == name:
                draw_curve(axis, found[of, rank], f"rank {rank}", COLORS[rank])

        full = "full adamw" if name == "lora adamw" else "full muon"
        if (full, 0) in found:
            draw_curve(axis, found[full, 0], full, COLORS[0])

        axis.set(xscale="log", xlabel="learning rate", title=name)
        axis.legend(fontsize=7, frameon=False)

    axes[0].set(ylabel="held-out loss", yscale="log")
    figure.tight_layout()
    save_picture(figure, out, dpi=110)


def draw_curve(axis: Any, means: Means, label: str, color: str) -> None:
    """Losses by rate, with a star at the best."""
    axis.plot(list(means), list(means.values()), marker="o", ms=3, color=color, label=label)
    best = min(means, key=means.__getitem__)
    axis.plot(best, means[best], marker="*", ms=11, color=color)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(__file__).with_name("rates.png"))
