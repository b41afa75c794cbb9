"""Plots a training comparison: held-out loss over the rate, and the best runs' curves."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks._lib.pictures import save_picture
from benchmarks._lib.rows import distinct, mean_of, values, where

SMOOTHING = 0.9  # of the training curves, an exponential mean
COLORS = {
    "adamw": "#555555",
    "adamw_split": "#000000",
    "muon": "#1f77b4",
    "polar_express": "#17a2b8",
    "muon_sgd": "#2ca02c",
    "pion": "#d62728",
    "pion_promote2": "#ff7f0e",
    "pion_noise": "#9467bd",
    "pion_per_head": "#e377c2",
}


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw both panels into a file; its suffix is the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for entry in result["summary"]:
        runs = where(result["runs"], optimizer=entry["optimizer"], aux_lr=entry["aux_lr"])
        finished = [run for run in runs if run["loss"] is not None]
        draw_rates(left, entry, finished)
        draw_curve(right, entry, where(finished, lr=entry["lr"]))

    left.set(xscale="log", xlabel="learning rate of the hidden matrices", ylabel="held-out loss")
    left.set_title("dots: seeds; line: mean of a rate's seeds; ring: the best rate", fontsize=11)
    right.set(xlabel="step", ylabel="training loss, smoothed")
    right.set_title("the best rate of each, mean over seeds", fontsize=11)
    right.legend(frameon=False)
    for axis in (left, right):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)

    save_picture(figure, path, dpi=130)
    plt.close(figure)


def draw_rates(axis: Any, entry: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    """Held-out loss over the rate."""
    color = COLORS.get(entry["optimizer"], "black")
    rates = sorted(distinct(runs, "lr"))
    means = [mean_of(where(runs, lr=rate), "loss") for rate in rates]
    axis.plot(rates, means, color=color, lw=1.5)

    for rate in rates:
        losses = values(where(runs, lr=rate), "loss")
        axis.plot([rate] * len(losses), losses, ".", color=color, ms=5)
    if entry["mean"] is not None:
        axis.plot(entry["lr"], entry["mean"], "o", color=color, mfc="none", ms=11)


def draw_curve(axis: Any, entry: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    """Mean training curve of the best rate."""
    if not runs:
        return

    columns = zip(*values(runs, "train_losses"), strict=True)
    curve = smooth([fmean(column) for column in columns])

    if entry["mean"]:
        label = f"{entry['optimizer']}  {entry['mean']:.3f}"
    else:
        label = entry["optimizer"]

    color = COLORS.get(entry["optimizer"], "black")
    axis.plot(range(1, len(curve) + 1), curve, color=color, lw=1.5, label=label)


def smooth(losses: list[float], keep: float = SMOOTHING) -> list[float]:
    """Exponential mean without a bias at the start.

    Example:
        >>> smooth([1.0, 1.0, 1.0])
        [1.0, 1.0, 1.0]
    """
    means = []
    total = 0.0
    weight = 0.0
    for loss in losses:
        total = keep * total + (1 - keep) * loss
        weight = keep * weight + (1 - keep)
        means.append(total / weight if math.isfinite(loss) else math.nan)
    return means
