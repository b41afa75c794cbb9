"""The plots of the study's pages, from cells alone."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import matplotlib

from benchmarks._lib.pictures import save_picture

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.smollm2.accounts import source_of
from benchmarks.smollm2.plan import Cell, MapRow, accuracy, died, map_row, map_rows

STYLES = {"sft": "--", "rlvr": "-"}
SHOWN = ("q_proj", "v_proj", "down_proj")
NAMED = 8  # levers that a legend can hold


def save(figure: pyplot.Figure, path: Path) -> None:
    save_picture(figure, path, dpi=110)
    pyplot.close(figure)


def draw_map(cells: list[Cell], path: Path) -> None:
    """One plot per optimizer: objectives and rollouts by rate, colored by accuracy."""
    optims = list(dict.fromkeys(cell["optim"] for cell in cells))
    figure, axes = pyplot.subplots(
        1, len(optims), figsize=(3.4 * len(optims) + 1, 3.2), constrained_layout=True, squeeze=False
    )

    rows = list(map_rows(cells))
    for axis, name in zip(axes[0], optims, strict=True):
        draw_grid(axis, [cell for cell in cells if cell["optim"] == name], rows)
        axis.set_title(name, fontsize=9)
        axis.set_yticks(range(len(rows)), [map_row(*row) for row in rows], fontsize=7)
        axis.label_outer()

    save(figure, path)


def draw_grid(axis: Axes, mine: list[Cell], rows: list[MapRow]) -> None:
    rates = sorted({cell["rate"] for cell in mine})
    grid = [[float("nan")] * len(rates) for _ in rows]
    for row, here in map_rows(mine).items():
        for cell in here:
            place = rows.index(row), rates.index(cell["rate"])
            grid[place[0]][place[1]] = accuracy(cell)
            text = f"{accuracy(cell):.2f}{'†' * died(cell)}"

            axis.text(
                place[1],
                place[0],
                text,
                ha="center",
                va="center",
                fontsize=8,
                color="white",
            )

    axis.imshow(
        grid,
        vmin=0,
        vmax=0.3,
        cmap="viridis",
        aspect="auto",
    )

    axis.set_facecolor("lightgrey")  # not run
    axis.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates], fontsize=7)
    axis.set_xlabel("rate", fontsize=7)


def draw_spectrum(cells: list[Cell], path: Path) -> None:
    """Singular values of whole gradients, the noise edge, and what the directions are worth."""
    sizes = [key for key in cells[0]["blocks"][0] if key.isdigit()]
    figure, axes = pyplot.subplots(
        2, len(SHOWN), figsize=(4 * len(SHOWN), 6.4), constrained_layout=True
    )
    for column, projection in enumerate(SHOWN):
        for k, cell in enumerate(cells):
            blocks = [b for b in cell["blocks"] if b["view"] == "whole"]
            blocks = [b for b in blocks if b["block"].endswith(projection)]

            label = f"{source_of(cell)}, step {cell['steps']}"
            for row, what in enumerate(("sigma", "worth")):
                ranks = blocks[0][sizes[-1]]["rank"]
                series = [b[sizes[-1]][what] for b in blocks]
                values = [fmean(each) for each in zip(*series, strict=True)]
                style = STYLES[cell["stage"]]

                axes[row][column].plot(
                    ranks,
                    values,
                    style,
                    color=f"C{k}",
                    lw=1.2,
                    label=label,
                )

        edge = blocks[0]["edge"]
        axes[0][column].axhline(
            edge,
            color="black",
            ls=":",
            lw=1,
            label="noise edge",
        )

        axes[0][column].set(
            title=projection,
            xscale="log",
            yscale="log",
        )

        axes[1][column].set(xscale="log", xlabel="direction, by its singular value")
        axes[1][column].axhline(0, color="black", lw=0.6)

    axes[0][0].set_ylabel("singular value over the norm")
    axes[1][0].set_ylabel("what it is worth on other data")
    axes[0][0].legend(fontsize=7)
    save(figure, path)


def draw_levers(cells: list[Cell], path: Path) -> None:
    """Accuracy over steps: the best changes in color, the references in black."""
    figure, axis = pyplot.subplots(figsize=(9, 4.6), constrained_layout=True)
    best_first = sorted(cells, key=lambda cell: -cell["accuracy"])
    named = dict.fromkeys(cell["stage"] for cell in best_first if not is_reference(cell))
    colours = {name: f"C{k}" for k, name in enumerate([*named][:NAMED])}

    told: set[str] = set()
    for cell in best_first:
        # Where time ended a run its last accuracy is no point of the curve.
        points = [p for p in cell["curve"] if p[0] < cell["steps_done"]]
        points.append([cell["steps_done"], cell["accuracy"]])
        plain = is_reference(cell)
        known = is_reference(cell) or cell["stage"] in colours
        colour = "black" if plain else colours.get(cell["stage"], "lightgrey")
        label = cell["stage"] if known else "others"

        axis.plot(
            *zip(*points, strict=True),
            "--" if plain else "-",
            lw=1.2,
            color=colour,
            marker=marker_of(cell),
            ms=3,
            zorder=1 + known,
            label="_" * (label in told) + label,
        )

        told.add(label)

    axis.set(xlabel="step", ylabel="greedy accuracy")
    axis.grid(alpha=0.3)
    axis.legend(
        fontsize=7,
        loc="center left",
        bbox_to_anchor=(1, 0.5),
    )

    save(figure, path)


def is_reference(cell: Cell) -> bool:
    """Plain TRL, and the recipe with an optimizer alone."""
    return cell["stage"].startswith("stock") or cell["stage"] in ("adamw", "muon")


def marker_of(cell: Cell) -> str:
    """Tells the black lines apart."""
    return {"stock, near": "s", "stock, near, twice the rate": "^"}.get(cell["stage"], "o")


def draw_gsm8k(cells: list[Cell], path: Path) -> None:
    """Right answers among those sampled: fresh seeds, and several updates with each rollout."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    runs = [cell for cell in cells if cell["stage"] != "warm"]
    for k, name in enumerate(dict.fromkeys(cell["optim"] for cell in runs)):
        told: set[str] = set()
        for cell in (c for c in runs if c["optim"] == name):
            several = cell["stage"] == "several"
            style = "--" if cell["objective"] == "gmpo" or cell["stage"] == "search" else "-"
            label = {"search": f"{name}, search", "final": name}.get(
                cell["stage"], f"{name}, {cell['objective']}"
            )
            points = smooth(cell["rows"].get("facts/correct", []))
            axis = right if several else left

            axis.plot(
                *zip(*points, strict=True),
                style,
                color=f"C{k}",
                lw=1,
                label="_" * (label in told) + label,
            )

            told.add(label)

    left.set(
        xlabel="step",
        ylabel="share of samples right, mean of 5",
        title="one update",
    )

    right.set(xlabel="step", title="four updates with each rollout")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.set_visible(bool(axis.lines))

        if axis.lines:
            axis.legend(fontsize=7)

    save(figure, path)


def smooth(points: list[list[float]], size: int = 5) -> list[tuple[float, float]]:
    """Means of the last few values."""
    return [
        (step, fmean(value for _, value in points[max(0, k + 1 - size) : k + 1]))
        for k, (step, _) in enumerate(points)
    ]
