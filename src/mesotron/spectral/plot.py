"""The picture of `mesotron spectrum --plot`: response curves, each labelled where it rises.

Needs matplotlib, which is the extra `plot` and not a core dependency.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mesotron.spectral.filters import noise_edge

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Dark enough to read as text on white; Muon's family is cool, Pion's is warm.
COOL = ("#33658a", "#5b9bb5", "#7a8b99")
WARM = ("#b3402a", "#d9822b", "#a8a032", "#8a4f7d", "#5f7a3a", "#c05a7a", "#6d5a46")
INK, FAINT = "#33373d", "#9aa0a8"
# Left end of a log axis: where Muon's rise is in sight and Pion's labels still have room.
SMALLEST = 5e-4
DATELESS = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


class Drawable(Protocol):
    """What a curve must offer: a label, the matrix shape, f(sigma) and where it crosses a level."""

    @property
    def label(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    def at(self, sigma: Any) -> np.ndarray: ...
    def crossing(self, level: float) -> float | None: ...


def draw(curves: Sequence[Drawable], path: Path, axis: str) -> None:
    """Draw f(sigma) of every curve into a file.

    Args:
        curves: at least one.
        path: its suffix names the format: .png, .svg or .pdf.
        axis: "log" or "linear" sigma.
    """
    check_picture(path)
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw_axes(axes, axis, curves[0].shape)
    draw_curves(axes, curves, axis)
    # Without the date, and with SVG's ids from a fixed salt, the same curves give the same file.
    with rc_context({"svg.hashsalt": "mesotron"}):
        figure.savefig(path, metadata=DATELESS[path.suffix])


def check_picture(path: Path) -> None:
    """Refuse a picture that could not be drawn, before the work that would go into it."""
    if path.suffix not in DATELESS:
        raise ValueError(f"cannot draw into {path}: end the name in .png, .svg or .pdf")
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError("--plot needs matplotlib: pip install 'mesotron[plot]'") from error


def draw_axes(axes: Axes, axis: str, shape: tuple[int, int]) -> None:
    """Axes without a frame, and the noise edge of the shape as a hairline."""
    axes.set_xscale(axis)
    axes.set_xlim(SMALLEST if axis == "log" else 0, 1)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(0, 1.3)
    axes.set_xlabel("singular value σ of the normalised matrix", color=INK)
    axes.set_ylabel("response f(σ)", color=INK)
    axes.set_title("What each filter does to a singular value", loc="left", color=INK, pad=14)
    axes.set_yticks([0, 0.5, 1])
    axes.tick_params(colors=INK, which="both", length=3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.axhline(1, color=FAINT, linewidth=0.6, zorder=0)
    edge = noise_edge(*shape)
    if edge < 1:
        axes.axvline(edge, color=FAINT, linewidth=0.8, linestyle=(0, (2, 3)), zorder=0)
        text = f" noise edge of {shape[0]} × {shape[1]} "
        side = "left" if edge < 0.3 else "right"
        axes.text(edge, 1.29, text, ha=side, va="top", fontsize=8, color=FAINT)


def draw_curves(axes: Axes, curves: Sequence[Drawable], axis: str) -> None:
    """The curves, and at each one's rise its name: labels step down from left to right."""
    sigma = np.geomspace(SMALLEST, 1, 4000) if axis == "log" else np.linspace(0, 1, 4000)
    rises = sorted(curves, key=lambda curve: curve.crossing(0.5) or 1.0)
    levels = np.linspace(0.88, 0.12, len(curves)) if len(curves) > 1 else [0.5]
    for curve, colour in zip(curves, colours(curves)):
        heights = curve.at(sigma)
        # A curve that swings about 1 is drawn thin, so that it does not cover the others.
        swings = bool((np.diff(heights) < -1e-6).any())
        axes.plot(sigma, heights, color=colour, linewidth=0.8 if swings else 2, zorder=2 - swings)
        level = float(levels[rises.index(curve)])
        label(axes, curve, level, colour, axis)


def label(axes: Axes, curve: Drawable, level: float, colour: str, axis: str) -> None:
    """The curve's name beside the point where it first reaches `level`."""
    place = max(curve.crossing(level) or 1.0, SMALLEST)
    # A rise near the right edge has no room on its right.
    side = -1 if place > (0.4 if axis == "log" else 0.7) else 1
    axes.annotate(
        curve.label,
        (place, level),
        xytext=(6 * side, 0),
        textcoords="offset points",
        ha="left" if side > 0 else "right",
        va="center",
        fontsize=8.5,
        color=colour,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2, "alpha": 0.85},
    )


def colours(curves: Sequence[Drawable]) -> list[str]:
    """A colour for each curve by its family, in order."""
    cool, warm = 0, 0
    chosen = []
    for curve in curves:
        if curve.label.startswith("pion"):
            chosen.append(WARM[warm % len(WARM)])
            warm += 1
        else:
            chosen.append(COOL[cool % len(COOL)])
            cool += 1
    return chosen
