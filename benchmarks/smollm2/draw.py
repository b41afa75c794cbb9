"""The plots of the study's pages, from cells alone."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

from benchmarks._lib.pictures import save_picture
from benchmarks._lib.rows import distinct, where

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.smollm2.accounts import batch_sizes, source_of
from benchmarks.smollm2.plan import Cell, MapRow, accuracy, died, map_row, map_rows

STYLES = {"sft": "--", "rlvr": "-"}
SHOWN = ("q_proj", "v_proj", "down_proj")
NAMED = 8  # levers that a legend can hold


def save(figure: pyplot.Figure, path: Path) -> None:
    save_picture(figure, path, dpi=110)
    pyplot.close(figure)


def draw_map(cells: list[Cell], path: Path) -> None:
    """One plot per optimizer: objectives and rollouts by rate, colored by accuracy."""
    optims = distinct(cells, "optim")
    size = (3.4 * len(optims) + 1, 3.2)
    figure, axes = pyplot.subplots(
        1, len(optims), figsize=size, constrained_layout=True, squeeze=False
    )

    rows = list(map_rows(cells))
    for axis, name in zip(axes[0], optims, strict=True):
        draw_grid(axis, where(cells, optim=name), rows)
        axis.set_title(name, fontsize=9)
        axis.set_yticks(range(len(rows)), [map_row(*row) for row in rows], fontsize=7)
        axis.label_outer()
    save(figure, path)


def draw_grid(axis: Axes, cells: list[Cell], rows: list[MapRow]) -> None:
    rates = sorted(distinct(cells, "rate"))
    grid = [[float("nan")] * len(rates) for _ in rows]
    for row, own in map_rows(cells).items():
        for cell in own:
            y = rows.index(row)
            x = rates.index(cell["rate"])
            grid[y][x] = accuracy(cell)
            text = f"{accuracy(cell):.2f}{'†' * died(cell)}"
            axis.text(x, y, text, ha="center", va="center", fontsize=8, color="white")

    axis.imshow(grid, vmin=0, vmax=0.3, cmap="viridis", aspect="auto")
    axis.set_facecolor("lightgrey")  # not run
    axis.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates], fontsize=7)
    axis.set_xlabel("rate", fontsize=7)


def draw_spectrum(cells: list[Cell], path: Path) -> None:
    """Singular values of whole gradients, the noise edge, and what the directions are worth."""
    size = (4 * len(SHOWN), 6.4)
    figure, axes = pyplot.subplots(2, len(SHOWN), figsize=size, constrained_layout=True)
    for column, projection in enumerate(SHOWN):
        above, below = axes[:, column]
        for k, cell in enumerate(cells):
            blocks = whole_blocks(cell, projection)
            draw_directions(above, cell, blocks, "sigma", f"C{k}")
            draw_directions(below, cell, blocks, "worth", f"C{k}")

        edge = whole_blocks(cells[-1], projection)[0]["edge"]
        above.axhline(edge, color="black", ls=":", lw=1, label="noise edge")
        above.set(title=projection, xscale="log", yscale="log")
        below.set(xscale="log", xlabel="direction, by its singular value")
        below.axhline(0, color="black", lw=0.6)

    axes[0][0].set_ylabel("singular value over the norm")
    axes[1][0].set_ylabel("what it is worth on other data")
    axes[0][0].legend(fontsize=7)
    save(figure, path)


def whole_blocks(cell: Cell, projection: str) -> list[dict[str, Any]]:
    """The whole matrices of a projection in all layers."""
    blocks = where(cell["blocks"], view="whole")
    return [block for block in blocks if block["block"].endswith(projection)]


def draw_directions(
    axis: Axes, cell: Cell, blocks: list[dict[str, Any]], what: str, color: str
) -> None:
    """The mean over layers, at the largest number of batches."""
    size = batch_sizes(cell)[-1]
    columns = zip(*(block[size][what] for block in blocks), strict=True)
    means = [fmean(column) for column in columns]
    label = f"{source_of(cell)}, step {cell['steps']}"
    style = STYLES[cell["stage"]]
    axis.plot(blocks[0][size]["rank"], means, style, color=color, lw=1.2, label=label)


def draw_levers(cells: list[Cell], path: Path) -> None:
    """Accuracy over steps: the best changes in color, the references in black."""
    figure, axis = pyplot.subplots(figsize=(9, 4.6), constrained_layout=True)
    best_first = sorted(cells, key=lambda cell: -cell["accuracy"])
    changes = [cell for cell in best_first if not is_reference(cell)]
    named = distinct(changes, "stage")[:NAMED]
    colors = {name: f"C{k}" for k, name in enumerate(named)}

    labels: set[str] = set()
    for cell in best_first:
        name = cell["stage"]
        style = {"color": colors.get(name, "lightgrey"), "zorder": 1 + (name in colors)}
        label = name if name in colors else "others"
        if is_reference(cell):
            style = {"color": "black", "zorder": 2, "ls": "--"}
            label = name

        # Where time ended a run its last accuracy is no point of the curve.
        points = []
        for point in cell["curve"]:
            if point[0] < cell["steps_done"]:
                points.append(point)

        points.append([cell["steps_done"], cell["accuracy"]])
        x, y = zip(*points, strict=True)
        axis.plot(x, y, lw=1.2, marker=marker_of(cell), ms=3, label=once(label, labels), **style)

    axis.set(xlabel="step", ylabel="greedy accuracy")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)


def once(label: str, labels: set[str]) -> str:
    """A label for the legend the first time; with an underscore it is left out."""
    if label in labels:
        return f"_{label}"
    labels.add(label)
    return label


def is_reference(cell: Cell) -> bool:
    """Plain TRL, and the recipe with an optimizer alone."""
    return cell["stage"].startswith("stock") or cell["stage"] in ("adamw", "muon")


def marker_of(cell: Cell) -> str:
    """Another marker for each black line."""
    return {"stock, near": "s", "stock, near, twice the rate": "^"}.get(cell["stage"], "o")


def draw_gsm8k(cells: list[Cell], path: Path) -> None:
    """Right answers among those sampled: fresh seeds, and several updates with each rollout."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    runs = [cell for cell in cells if cell["stage"] != "warm"]
    for k, name in enumerate(distinct(runs, "optim")):
        labels: set[str] = set()
        for cell in where(runs, optim=name):
            dashed = cell["objective"] == "gmpo" or cell["stage"] == "search"
            x, y = zip(*smooth(cell["rows"].get("facts/correct", [])), strict=True)
            axis = right if cell["stage"] == "several" else left
            label = once(label_of(cell), labels)
            axis.plot(x, y, "--" if dashed else "-", color=f"C{k}", lw=1, label=label)

    left.set(xlabel="step", ylabel="share of samples right, mean of 5", title="one update")
    right.set(xlabel="step", title="four updates with each rollout")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.set_visible(bool(axis.lines))
        if axis.lines:
            axis.legend(fontsize=7)
    save(figure, path)


def label_of(cell: Cell) -> str:
    """An optimizer, and what is special about its run."""
    if cell["stage"] == "final":
        return cell["optim"]
    return f"{cell['optim']}, {'search' if cell['stage'] == 'search' else cell['objective']}"


def smooth(points: list[list[float]], size: int = 5) -> list[tuple[float, float]]:
    """Means of the last few values."""
    means = []
    for k, (step, _) in enumerate(points):
        last = points[max(0, k + 1 - size) : k + 1]
        means.append((step, fmean(value for _, value in last)))
    return means
