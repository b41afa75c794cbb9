"""Plots a training comparison: held-out loss over the rate, and the best runs' curves."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks._lib.pictures import save_picture

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
        name = entry["optimizer"]
        runs = [r for r in result["runs"] if r["optimizer"] == name]
        draw_rates(left, entry, [r for r in runs if r["aux_lr"] == entry["aux_lr"]])
        draw_curve(right, entry, [r for r in runs if is_best(r, entry)])

    left.set(
        xscale="log",
        xlabel="learning rate of the hidden matrices",
        ylabel="held-out loss",
    )

    left.set_title("dots: seeds; line: mean of a rate's seeds; ring: the best rate", fontsize=11)
    right.set(xlabel="step", ylabel="training loss, smoothed")
    right.set_title("the best rate of each, mean over seeds", fontsize=11)
    right.legend(frameon=False)

    for axis in (left, right):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)

    save_picture(figure, path, dpi=130)
    plt.close(figure)


def is_best(run: dict[str, Any], entry: dict[str, Any]) -> bool:
    """Whether a run was made at the best rates of its optimizer."""
    return (run["lr"], run["aux_lr"]) == (entry["lr"], entry["aux_lr"])


def draw_rates(axis: Any, entry: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    """Held-out loss over the rate; diverged runs are left out."""
    color = COLORS.get(entry["optimizer"], "black")
    by_rate: dict[float, list[float]] = {}
    for run in runs:
        if run["loss"] is not None:
            by_rate.setdefault(run["lr"], []).append(run["loss"])

    rates = sorted(by_rate)
    axis.plot(rates, [fmean(by_rate[rate]) for rate in rates], color=color, lw=1.5)

    for rate in rates:
        axis.plot(
            [rate] * len(by_rate[rate]),
            by_rate[rate],
            ".",
            color=color,
            ms=5,
        )

    if entry["mean"] is not None:
        axis.plot(
            entry["lr"],
            entry["mean"],
            "o",
            color=color,
            mfc="none",
            ms=11,
        )


def draw_curve(axis: Any, entry: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    """Mean training curve of the best rate."""
    curves = [r["train_losses"] for r in runs if r["loss"] is not None]
    if not curves:
        return

    means = [fmean(column) for column in zip(*curves, strict=True)]
    label = f"{entry['optimizer']}  {entry['mean']:.3f}" if entry["mean"] else entry["optimizer"]
    color = COLORS.get(entry["optimizer"], "black")

    axis.plot(
        range(1, len(means) + 1),
        smooth(means),
        color=color,
        lw=1.5,
        label=label,
    )


def smooth(values: list[float], keep: float = SMOOTHING) -> list[float]:
    """Exponential mean without a bias at the start.

    Example:
        >>> smooth([1.0, 1.0, 1.0])
        [1.0, 1.0, 1.0]
    """
    out = []
    total = 0.0

    weight = 0.0
    for value in values:
        total = keep * total + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        out.append(total / weight if math.isfinite(value) else math.nan)

    return out
