"""The figure and the table of the page: `python -m benchmarks.finetuning.draw results.json.gz`."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks._lib.pictures import save_picture
from benchmarks._lib.results import read_json
from benchmarks.finetuning.plan import CURVES, FINAL_SEEDS, score

# What the table of reported seeds shows, and how.
SHOWN = {
    "loss": ".4f",
    "accuracy": ".3f",
    "forgetting": "+.3f",
    "kl": ".1f",
    "moved": ".4f",
}
COLORS = {
    4: "#c23b22",
    16: "#e0912f",
    64: "#3b7a57",
    0: "#26418f",
}


def main(path: Path, out: Path) -> None:
    cells = read_json(path)["cells"]
    draw(cells, out)
    print(table(cells), finals(cells), sep="\n\n")


def curves(cells: list[dict[str, Any]]) -> dict[tuple[str, int], dict[float, float]]:
    """(contender, rank) -> rate -> mean held-out loss over the tuning seeds."""
    found: dict[tuple[str, int], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        if cell["seed"] not in FINAL_SEEDS:
            found[cell["contender"], cell["rank"]][cell["rate"]].append(score(cell))

    return {
        key: {rate: fmean(losses) for rate, losses in sorted(rates.items())}
        for key, rates in found.items()
    }


def table(cells: list[dict[str, Any]]) -> str:
    """Best rate and loss of each curve."""
    lines = ["| rule | rank | best rate | held-out loss |", "|---|---|---|---|"]
    for (name, rank), means in sorted(curves(cells).items()):
        best = min(means, key=means.__getitem__)
        lines.append(f"| {name} | {rank or 'full'} | {best:.1e} | {means[best]:.3f} |")

    return "\n".join(lines)


def finals(cells: list[dict[str, Any]]) -> str:
    """The comparison on the reporting seeds, the best first: means and ranges."""
    found: dict[tuple[str, float], list[dict[str, Any]]] = defaultdict(list)
    for cell in cells:
        if cell["seed"] in FINAL_SEEDS:
            found[cell["contender"], cell["rate"]].append(cell)

    lines = [f"| rule | rate | {' | '.join(SHOWN)} |", "|---" * (len(SHOWN) + 2) + "|"]
    for (name, rate), some in sorted(found.items(), key=lambda x: fmean(map(score, x[1]))):
        words = [name, f"{rate:.1e}"]
        for field, form in SHOWN.items():
            values = [cell[field] for cell in some]
            text = format(fmean(values), form)
            if field in ("loss", "accuracy", "forgetting"):
                text += f" [{min(values):{form}}, {max(values):{form}}]"

            words.append(text)

        lines.append(f"| {' | '.join(words)} |")

    return "\n".join(lines)


def draw(cells: list[dict[str, Any]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = curves(cells)

    figure, axes = plt.subplots(1, len(CURVES), figsize=(10, 3.2), sharey=True)
    for axis, name in zip(axes, CURVES, strict=True):
        full = "full adamw" if name == "lora adamw" else "full muon"
        lines = [(r, found[n, r]) for n, r in sorted(found) if n == name]
        lines += [(0, found[full, 0])] if (full, 0) in found else []

        for rank, means in lines:
            label = f"rank {rank}" if rank else full
            axis.plot(
                [*means], [*means.values()], marker="o", ms=3, color=COLORS[rank], label=label
            )
            best = min(means, key=means.__getitem__)

            axis.plot(
                best,
                means[best],
                marker="*",
                ms=11,
                color=COLORS[rank],
            )

        axis.set(
            xscale="log",
            xlabel="learning rate",
            title=name,
        )

        axis.legend(fontsize=7, frameon=False)

    axes[0].set(ylabel="held-out loss", yscale="log")
    figure.tight_layout()
    save_picture(figure, out, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(__file__).with_name("rates.png"))
