"""`mesotron spectrum`: what each filter does to a singular value, in tables, a plot and JSON.

Everything shown is read from `filters`, `response` and `flops`; nothing is computed here that an
optimizer uses. The picture file is drawn by `plot`.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mesotron.config import SpectrumConfig
from mesotron.spectral.filters import Filter, make_filter, noise_edge
from mesotron.spectral.flops import gram_plan, plan_flops, standard_flops
from mesotron.spectral.response import (
    limit_cutoff,
    response,
    slope_at_zero,
    steps_at,
    threshold,
)

SIGMA = (0.001, 0.01, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 1.0)
LEVELS = (0.1, 0.5, 0.9)
PROPERTIES: tuple[str, ...] = ("cutoff", "σ→.1", "σ→.5", "σ→.9", "f'(0)", "passes", "GFLOP", "Gram")
# A narrow terminal gets fewer columns, since a number cut short tells nothing.
WIDE = 78
NARROW_SIGMA = (0.001, 0.01, 0.1, 0.3, 0.8, 1.0)
NARROW_PROPERTIES = ("cutoff", "σ→.5", "passes", "GFLOP", "Gram")
FP32_ROUNDOFF = 2.0**-24
PLOT_WIDTH, PLOT_HEIGHT, PLOT_MARGIN = 56, 3, 22
# Above Muon's largest overshoot, about 1.2.
PLOT_TOP = 1.25
BLOCKS = " ▁▂▃▄▅▆▇█"
STYLES = ("cyan", "blue", "magenta", "red", "yellow", "green")


@dataclass(frozen=True)
class Curve:
    """One filter as it is shown: its label and the shape [m, n] of the matrix, m <= n."""

    label: str
    filter: Filter
    shape: tuple[int, int]

    @property
    def unit(self) -> str:
        """What sigma is a fraction of."""
        relative = isinstance(self.filter.cutoff, float)
        return "largest singular value" if relative else "Frobenius norm"

    def at(self, sigma: Any) -> np.ndarray:
        """f(sigma), any array shape."""
        return response(self.filter, sigma, self.shape)

    def crossing(self, level: float) -> float | None:
        """The smallest sigma with f(sigma) = level; None where f stays below it."""
        reached = self.at(np.linspace(0, 1, 2001)).max() >= level
        return threshold(self.filter, level, self.shape) if reached else None

    @property
    def max_directions(self) -> int:
        """How many directions can pass at half strength or more: their squares sum to at most 1."""
        half = self.crossing(0.5)
        if half is None:
            return 0
        bounded = self.unit == "Frobenius norm"
        return min(self.shape[0], int(1 / half**2)) if bounded else self.shape[0]

    @property
    def gigaflops(self) -> tuple[float, float]:
        """GFLOP for one matrix in the standard and in the Gram form."""
        m, n = self.shape
        steps = steps_at(self.filter, self.shape)
        gram = plan_flops(m, n, gram_plan(steps, FP32_ROUNDOFF))
        return standard_flops(m, n, steps) / 1e9, gram / 1e9


def run(config: SpectrumConfig) -> int:
    """Print the tables and the plot; write the files that were asked for.

    Args:
        config: what to show.

    Returns:
        0, the exit code.
    """
    curves = make_curves(config)
    # Files first: a bad file name then fails before anything is printed.
    if config.out:
        config.out.write_text(json.dumps(as_record(curves), indent=2) + "\n")
    if config.plot:
        from mesotron.spectral.plot import draw

        draw(curves, config.plot, config.axis)
    console = Console(highlight=False)
    wide = console.width >= WIDE
    console.print(response_table(curves, SIGMA if wide else NARROW_SIGMA))
    console.print(property_table(curves, PROPERTIES if wide else NARROW_PROPERTIES))
    plot_width = max(min(PLOT_WIDTH, console.width - PLOT_MARGIN), 1)
    console.print(terminal_plot(curves, config.axis, plot_width))
    return 0


def make_curves(config: SpectrumConfig) -> list[Curve]:
    """The curves that a config asks for, in its order."""
    if not config.filters:
        raise ValueError("no filter to show: name at least one, such as muon or pion")
    if min(config.shape) < 1:
        raise ValueError(f"shape {config.shape} is not a matrix: give rows and columns above 0")
    if (config.promote or config.cutoff) and "pion" not in config.filters:
        raise ValueError("promote and cutoff belong to the pion filter: add pion to the filters")
    rows, columns = sorted(config.shape)
    curves = []
    for name in config.filters:
        for label, options in variants(name, config):
            made = make_filter(name, steps=config.steps, **options)
            curves.append(Curve(label, made, (rows, columns)))
    return curves


def variants(name: str, config: SpectrumConfig) -> list[tuple[str, dict[str, Any]]]:
    """Label and options of each curve of one filter; only Pion has more than one."""
    if name != "pion":
        return [(name, {})]
    promote, cutoff = config.promote, config.cutoff
    if not promote and not cutoff:
        promote, cutoff = (0, 2), ("noise",)
    shown = [(f"pion promote={k}", {"promote": k}) for k in promote]
    return shown + [(f"pion cutoff={c}", {"cutoff": c}) for c in cutoff]


def response_table(curves: list[Curve], grid: tuple[float, ...] = SIGMA) -> Table:
    """f(sigma) on a grid, a row for each filter."""
    table = new_table("response f(σ), σ a fraction of the matrix's norm")
    table.add_column("filter \\ σ", no_wrap=True)
    for sigma in grid:
        table.add_column(f"{sigma:g}".removeprefix("0"), justify="right", no_wrap=True)
    for curve, style in zip(curves, styles(curves)):
        table.add_row(Text(curve.label, style), *map(short, curve.at(grid)))
    return table


def property_table(curves: list[Curve], headings: tuple[str, ...] = PROPERTIES) -> Table:
    """Cutoffs, slope, the number of directions that can pass, and the cost."""
    m, n = curves[0].shape
    table = new_table(f"where it cuts, and what one {m} × {n} matrix costs")
    table.add_column("filter", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for curve, style in zip(curves, styles(curves)):
        cells = [limit_cutoff(curve.filter, curve.shape), *map(curve.crossing, LEVELS)]
        slope = slope_at_zero(curve.filter, curve.shape)
        texts = ["–" if cell is None else f"{cell:.4f}".removeprefix("0") for cell in cells]
        texts.append(f"{slope:.3g}" if slope == 0 or slope > 1e-3 else f"{slope:.0e}")
        texts += [str(curve.max_directions), *(f"{cost:.3g}" for cost in curve.gigaflops)]
        shown = dict(zip(PROPERTIES, texts, strict=True))
        table.add_row(Text(curve.label, style), *(shown[heading] for heading in headings))
    return table


def new_table(title: str) -> Table:
    """A table in the house's look: no frame, the title at the left."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )


def terminal_plot(curves: list[Curve], axis: str, width: int = PLOT_WIDTH) -> Text:
    """One small area chart under another, so that curves never hide each other."""
    sigma = sigma_grid(axis, width)
    plot = Text()
    for curve, style in zip(curves, styles(curves)):
        for row, line in enumerate(area_rows(curve.at(sigma))):
            plot.append(f"{curve.label if row == PLOT_HEIGHT - 1 else '':>{PLOT_MARGIN - 1}} ")
            plot.append(line + "\n", style)
    left = f"σ = {sigma[0]:.3g}"
    legend = f"{axis} axis, f from 0 to {PLOT_TOP}".center(width - len(left) - 1)
    plot.append(" " * PLOT_MARGIN + left + legend + "1\n")
    return plot


def sigma_grid(axis: str, num_points: int) -> np.ndarray:
    """Singular values from near 0 to 1, evenly spaced on the axis."""
    if axis == "log":
        return np.geomspace(1e-3, 1, num_points)
    return np.linspace(0, 1, num_points)


def area_rows(heights: np.ndarray) -> list[str]:
    """Rows of block characters, the top one first, for heights in [0, PLOT_TOP]."""
    filled = np.round(heights / PLOT_TOP * PLOT_HEIGHT * 8).astype(int)
    # A dot of height shows where the axis is even if nothing passes.
    filled = filled.clip(1, PLOT_HEIGHT * 8)
    floors = [8 * row for row in reversed(range(PLOT_HEIGHT))]
    return ["".join(BLOCKS[min(max(n - floor, 0), 8)] for n in filled) for floor in floors]


def styles(curves: list[Curve]) -> list[str]:
    """A colour for each curve, again from the first when they run out."""
    return [STYLES[i % len(STYLES)] for i in range(len(curves))]


def short(value: float) -> str:
    """A response in four characters: `.845`, `1.13`, `0` for nothing."""
    if abs(value) < 5e-4:
        return "0"
    return f"{value:.2f}" if abs(value) >= 0.9995 else f"{value:.3f}".replace("0.", ".")


def as_record(curves: list[Curve]) -> dict[str, Any]:
    """Everything shown as plain values, for JSON."""
    sigma = np.unique(np.concatenate([sigma_grid("log", 121), sigma_grid("linear", 101)]))
    rows = []
    for curve in curves:
        standard, gram = curve.gigaflops
        rows.append(
            {
                "label": curve.label,
                "steps": steps_at(curve.filter, curve.shape),
                "sigma_unit": curve.unit,
                "response": curve.at(sigma).tolist(),
                "limit_cutoff": limit_cutoff(curve.filter, curve.shape),
                "sigma_giving": {str(level): curve.crossing(level) for level in LEVELS},
                "slope_at_zero": slope_at_zero(curve.filter, curve.shape),
                "max_directions": curve.max_directions,
                "gigaflops": {"standard": standard, "gram": gram},
            }
        )
    shape = curves[0].shape
    edge = noise_edge(*shape)
    return {"shape": shape, "noise_edge": edge, "sigma": sigma.tolist(), "filters": rows}
