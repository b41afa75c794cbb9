"""`mesotron optim spectrum`: what each filter does to a singular value."""

import json
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from mesotron import spectral
from mesotron.config import SpectrumConfig
from mesotron.runs.console import SafeConsole
from mesotron.runs.extras import require
from mesotron.spectral.filters import Filter, make_filter, noise_edge
from mesotron.spectral.response import limit_cutoff, response, steps_at, threshold

SIGMA = (0.001, 0.01, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 1.0)
LEVELS = (0.1, 0.5, 0.9)
PROPERTIES: tuple[str, ...] = ("cutoff", "σ→.1", "σ→.5", "σ→.9", "f'(0)", "passes", "GFLOP", "Gram")
WIDE = 78  # a narrower terminal gets fewer columns
NARROW_SIGMA = (0.001, 0.01, 0.1, 0.3, 0.8, 1.0)
NARROW_PROPERTIES = ("cutoff", "σ→.5", "passes", "GFLOP", "Gram")
FP32_ROUNDOFF = 2.0**-24
PLOT_WIDTH = 56
PLOT_HEIGHT = 3
PLOT_MARGIN = 22
PLOT_TOP = 1.25  # above Muon's largest overshoot, about 1.2
BLOCKS = " ▁▂▃▄▅▆▇█"
STYLES = ("cyan", "blue", "magenta", "red", "yellow", "green")
COOL = ("#33658a", "#5b9bb5", "#7a8b99")  # for Muon's family; warm for Pion's
WARM = ("#b3402a", "#d9822b", "#a8a032", "#8a4f7d", "#5f7a3a", "#c05a7a", "#6d5a46")
SMALLEST = 5e-4  # left end of a log axis, which shows Muon's rise
# Without a date the same curves give the same file.
METADATA = {
    ".png": {},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}


@dataclass(frozen=True)
class ResponseCurve:
    label: str
    filter: Filter
    shape: tuple[int, int]  # of the matrix, [m, n] with m <= n

    @property
    def unit(self) -> str:
        relative = isinstance(self.filter.cutoff, float)
        if relative:
            return "largest singular value"

        return "Frobenius norm"

    def at(self, sigma: Any) -> np.ndarray:
        return response(self.filter, sigma, self.shape)

    def crossing(self, level: float) -> float | None:
        largest = self.at(np.linspace(0, 1, 2001)).max()
        if largest < level:
            return None

        return threshold(self.filter, level, self.shape)

    @property
    def max_directions(self) -> int:
        """How many directions can pass at half strength or more: their squares sum to at most 1."""
        half = self.crossing(0.5)
        if half is None:
            return 0

        m, _ = self.shape
        if self.unit != "Frobenius norm":
            return m

        return min(m, int(1 / half**2))

    @property
    def gigaflops(self) -> tuple[float, float]:
        """GFLOP for one matrix in the standard and in the Gram form."""
        m, n = self.shape
        steps = steps_at(self.filter, self.shape)
        gram = spectral.plan_flops(m, n, spectral.gram_plan(steps, FP32_ROUNDOFF))

        return spectral.standard_flops(m, n, steps) / 1e9, gram / 1e9


def run(config: SpectrumConfig) -> int:
    if config.plot:
        require("plot", what="--plot")

    curves = make_curves(config)
    # Files first: a bad file name then fails before anything is printed.
    if config.out:
        config.out.write_text(json.dumps(as_record(curves), indent=2) + "\n")

    if config.plot:
        draw(curves, config.plot, config.axis)

    console = SafeConsole(highlight=False)
    if not config.brief:
        _print_tables(console, curves)

    plot_width = max(min(PLOT_WIDTH, console.width - PLOT_MARGIN), 1)
    console.print(terminal_plot(curves, config.axis, plot_width))

    return 0


def _print_tables(console: SafeConsole, curves: list[ResponseCurve]) -> None:
    if console.width >= WIDE:
        console.print(response_table(curves, SIGMA))
        console.print(property_table(curves, PROPERTIES))
    else:
        console.print(response_table(curves, NARROW_SIGMA))
        console.print(property_table(curves, NARROW_PROPERTIES))


def make_curves(config: SpectrumConfig) -> list[ResponseCurve]:
    if not config.filters:
        raise ValueError("no filter to show: name at least one, such as muon or pion")
    if (config.promote or config.cutoff) and "pion" not in config.filters:
        raise ValueError("promote and cutoff belong to the pion filter: add pion to the filters")

    rows, columns = sorted(config.shape)
    curves = []
    for name in config.filters:
        for label, options in _variants(name, config):
            filter = make_filter(name, steps=config.steps, **options)
            curves.append(ResponseCurve(label, filter, (rows, columns)))

    return curves


def _variants(name: str, config: SpectrumConfig) -> list[tuple[str, dict[str, Any]]]:
    """The curves of one filter: of Pion one for each strength."""
    if name != "pion":
        return [(name, {})]

    promote = config.promote
    cutoff = config.cutoff
    if not promote and not cutoff:
        promote = (0, 2)
        cutoff = ("aligned",)

    steps = [(f"pion promote={k}", {"promote": k}) for k in promote]
    strengths = [(f"pion cutoff={c}", {"cutoff": c}) for c in cutoff]

    return [*steps, *strengths]


def response_table(curves: list[ResponseCurve], grid: tuple[float, ...]) -> Table:
    table = _new_table("response f(σ), σ a fraction of the matrix's norm", "filter \\ σ")
    for sigma in grid:
        table.add_column(f"{sigma:g}".removeprefix("0"), justify="right", no_wrap=True)

    for curve, style in zip(curves, cycle(STYLES)):
        table.add_row(Text(curve.label, style), *map(short, curve.at(grid)))

    return table


def property_table(curves: list[ResponseCurve], headings: tuple[str, ...]) -> Table:
    m, n = curves[0].shape
    table = _new_table(f"where it cuts, and what one {m} × {n} matrix costs", "filter")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)

    for curve, style in zip(curves, cycle(STYLES)):
        cells = _properties(curve)
        table.add_row(Text(curve.label, style), *(cells[heading] for heading in headings))

    return table


def _properties(curve: ResponseCurve) -> dict[str, str]:
    """The cells of a curve, by `PROPERTIES`."""
    places = [limit_cutoff(curve.filter, curve.shape), *map(curve.crossing, LEVELS)]
    texts = [_place(place) for place in places]

    slope = spectral.slope_at_zero(curve.filter, curve.shape)
    is_tiny = 0 < slope <= 1e-3
    texts.append(f"{slope:.0e}" if is_tiny else f"{slope:.3g}")

    texts.append(str(curve.max_directions))
    texts += [f"{cost:.3g}" for cost in curve.gigaflops]

    return dict(zip(PROPERTIES, texts, strict=True))


def _place(value: float | None) -> str:
    if value is None:
        return "–"

    return f"{value:.4f}".removeprefix("0")


def _new_table(title: str, first: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )
    table.add_column(first, no_wrap=True)

    return table


def terminal_plot(curves: list[ResponseCurve], axis: str, width: int) -> Text:
    sigma = sigma_grid(axis, width)
    plot = Text()
    for curve, style in zip(curves, cycle(STYLES)):
        eighths = np.round(curve.at(sigma) / PLOT_TOP * PLOT_HEIGHT * 8).astype(int)
        eighths = eighths.clip(1, PLOT_HEIGHT * 8)  # at least a dot, which shows the axis
        for row in reversed(range(PLOT_HEIGHT)):
            label = curve.label if row == 0 else ""
            filled = (eighths - 8 * row).clip(0, 8)
            line = "".join(BLOCKS[k] for k in filled)
            plot.append(f"{label:>{PLOT_MARGIN - 1}} ")
            plot.append(line + "\n", style)

    left = f"σ = {sigma[0]:.3g}"
    legend = f"{axis} axis, f from 0 to {PLOT_TOP}".center(width - len(left) - 1)
    plot.append(" " * PLOT_MARGIN + left + legend + "1\n")

    return plot


def sigma_grid(axis: str, num_points: int) -> np.ndarray:
    if axis == "log":
        return np.geomspace(1e-3, 1, num_points)

    return np.linspace(0, 1, num_points)


def short(value: float) -> str:
    if abs(value) < 5e-4:
        return "0"
    if abs(value) >= 0.9995:
        return f"{value:.2f}"

    return f"{value:.3f}".replace("0.", ".")


def as_record(curves: list[ResponseCurve]) -> dict[str, Any]:
    sigma = np.unique(np.concatenate([sigma_grid("log", 121), sigma_grid("linear", 101)]))
    rows = [
        {
            "label": curve.label,
            "steps": steps_at(curve.filter, curve.shape),
            "sigma_unit": curve.unit,
            "response": curve.at(sigma).tolist(),
            "limit_cutoff": limit_cutoff(curve.filter, curve.shape),
            "sigma_giving": {str(level): curve.crossing(level) for level in LEVELS},
            "slope_at_zero": spectral.slope_at_zero(curve.filter, curve.shape),
            "max_directions": curve.max_directions,
            "gigaflops": dict(zip(("standard", "gram"), curve.gigaflops, strict=True)),
        }
        for curve in curves
    ]

    shape = curves[0].shape
    common = {
        "shape": shape,
        "noise_edge": noise_edge(*shape),
        "sigma": sigma.tolist(),
    }

    return {**common, "filters": rows}


def draw(curves: list[ResponseCurve], path: Path, axis: str) -> None:
    if path.suffix not in METADATA:
        raise ValueError(f"cannot draw into {path}: end the name in .png, .svg or .pdf")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(10, 4.5),
        dpi=160,
        layout="constrained",
    )

    axes = figure.add_subplot(
        xscale=axis,
        ylim=(0, 1.3),
        yticks=(0, 0.5, 1),
    )

    sigma = np.linspace(0, 1, 4000)
    if axis == "log":
        sigma = np.geomspace(SMALLEST, 1, 4000)

    axes.set_xlim(sigma[0], 1)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="singular value σ of the normalized matrix", ylabel="response f(σ)")
    axes.set_title("What each filter does to a singular value", loc="left")
    axes.spines[["top", "right"]].set_visible(False)

    warm = cycle(WARM)
    cool = cycle(COOL)
    for curve in curves:
        heights = curve.at(sigma)
        swings = (np.diff(heights) < -1e-6).any()
        axes.plot(
            sigma,
            heights,
            color=next(warm if curve.label.startswith("pion") else cool),
            linewidth=0.8 if swings else 2,  # thin, so that it does not cover the others
            label=curve.label,
        )

    m, n = curves[0].shape
    edge = noise_edge(m, n)
    if edge < 1:
        axes.axvline(
            edge,
            color="gray",
            linestyle=":",
            zorder=0,
            label=f"noise edge, {m} × {n}",
        )

    place: Any = "outside center right"  # missing from matplotlib's types
    figure.legend(loc=place, frameon=False)

    with rc_context({"svg.hashsalt": "mesotron"}):  # fixed ids, for equal files
        figure.savefig(path, metadata=METADATA[path.suffix])
