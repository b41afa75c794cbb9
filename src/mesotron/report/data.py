"""Charts as data: which metrics are drawn together, reduced to as many points as a page can hold.

A chart of a single run has several metrics, distinguished by color and dash. With several runs each
metric gets its own chart, and color and dash belong to the run on the whole page.
"""

import math
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

from mesotron.report.read import Column, Run, finite_values, make_columns
from mesotron.runs.files import Row

# Numbers a page may hold, about seven bytes each, for the named charts and for the others.
BUDGET = 75_000
BUDGET_REST = 25_000
MOST_POINTS = 300
FEWEST_POINTS = 24
MOST_BANDS = 4  # bands of more runs hide one another
# Okabe and Ito's palette without yellow; with four dashes 28 lines differ.
COLORS = 7
DASHES = 4
# x axis -> the columns that give it (the first that a run has), whether they add up, and a factor.
AXES: dict[str, tuple[tuple[str, bool, float], ...]] = {
    "minutes": (
        ("time/seconds", False, 1 / 60),
        ("time/step", True, 1 / 60),
        ("step_time", True, 1 / 60),
    ),
    "tokens": (("num_tokens", False, 1.0),),
    "env steps": (("time/env_steps", False, 1.0),),
}


@dataclass(frozen=True)
class Plot:
    """What is drawn in one chart; assets/catalog.toml describes the fields."""

    title: str
    lines: dict[str, str]
    note: str = ""
    band: tuple[str, ...] = ()
    log: bool = False
    standalone: bool = False
    unless: str = ""
    internal: bool = False


def read_catalog(path: Path) -> dict[str, tuple[Plot, ...]]:
    """Question -> the plots that answer it."""
    catalog = {}
    for question, tables in tomllib.loads(path.read_text("utf-8")).items():
        plots = []
        for table in tables:
            band = tuple(table.pop("band", ()))
            plots.append(Plot(**table, band=band))

        catalog[question] = tuple(plots)

    return catalog


CATALOG = read_catalog(Path(__file__).parent / "assets" / "catalog.toml")


@dataclass(frozen=True)
class Line:
    run: int  # whose x values and events apply
    name: str
    style: int  # color and dash; lines of one style are toggled together
    mean: Column
    low: Column | None = None
    high: Column | None = None
    x: list[float] | None = None  # its own x values, instead of the run's
    dots: Literal["", "dots", "crosses"] = ""  # points on the line, or crosses without one
    summary: dict[str, Any] = field(default_factory=dict)

    def record(self, grid: str) -> dict[str, Any]:
        values = {
            "run": self.run,
            "name": self.name,
            "grid": grid,
            "y": self.mean,
            "group": self.style,
            "color": self.style % COLORS,
            "dash": self.style % DASHES,
        }
        optional = {
            "low": self.low,
            "high": self.high,
            "x": self.x,
            "dots": self.dots or None,
        }
        for key, value in optional.items():
            if value is not None:
                values[key] = value

        return values


@dataclass(frozen=True)
class Chart:
    title: str
    lines: list[Line]
    note: str = ""
    log: bool = False
    log_x: bool = False
    x_name: str | None = None  # of a chart with its own x axis; None for the page's
    rules: tuple[tuple[float, str], ...] = ()  # horizontal lines: (height, label)
    rest: bool = False  # of a metric that is not in the catalog
    internal: bool = False  # of interest to few

    @property
    def is_flat(self) -> bool:
        """Every line keeps one finite value."""
        for line in self.lines:
            summary = line.summary
            if not summary.get("count") or summary["broken"]:
                return False
            if summary["low"][0] != summary["high"][0]:
                return False

        return True

    def record(self) -> dict[str, Any]:
        lines = [line.record("rest" if self.rest else "main") for line in self.lines]

        return {
            "title": self.title,
            "log": self.log,
            "logX": self.log_x,
            "xName": self.x_name,
            "rules": self.rules,
            "lines": lines,
        }


@dataclass(frozen=True)
class Buckets:
    """Groups of consecutive rows, one per point, by their first rows and the row count."""

    edges: tuple[int, ...]

    @classmethod
    def split(cls, num_rows: int, most: int) -> Self:
        count = min(num_rows, most)
        if not count:
            return cls((0,))

        return cls(tuple(k * num_rows // count for k in range(count + 1)))

    def middles(self, column: Sequence[float]) -> list[float]:
        """The value in the middle of each bucket; the ends for the first and last one."""
        places = [(a + b - 1) // 2 for a, b in pairwise(self.edges)]
        if len(places) > 1:
            places[0] = 0
            places[-1] = self.edges[-1] - 1

        return [column[place] for place in places]

    def reduce(self, column: Column, how: Callable[[list[float]], float] | None = None) -> Column:
        """The mean (or `how`) of the finite values in each bucket, None where there is none."""
        how = mean if how is None else how
        reduced: Column = []
        for start, end in pairwise(self.edges):
            part = finite_values(column[start:end])
            reduced.append(how(part) if part else None)

        return reduced

    def range(self, column: Column) -> tuple[Column | None, Column | None]:
        if self.edges[-1] == len(self.edges) - 1:  # one row each
            return None, None

        return self.reduce(column, min), self.reduce(column, max)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True, kw_only=True)
class Grids:
    """The points of every run, and how its lines are drawn."""

    main: list[Buckets]  # points of each run in the catalog's charts
    rest: list[Buckets]  # and in the others
    bands: bool
    overlaid: bool  # a line is a run, not a metric of the only run
    styles: Sequence[int]  # of each run

    def record(self, runs: Sequence[Run]) -> list[dict[str, Any]]:
        axes = []
        for run, main, rest in zip(runs, self.main, self.rest, strict=True):
            axes.append({"main": make_axes(run, main), "rest": make_axes(run, rest)})

        return axes


def make_grids(runs: Sequence[Run], styles: Sequence[int] | None = None) -> Grids:
    """As many points as fit a page: fewer the more lines there are."""
    named = sum(len(_named_metrics(run)) for run in runs)
    others = sum(len(run.columns) for run in runs) - named
    bands = len(runs) <= MOST_BANDS
    columns = named * (3 if bands else 1)
    most = points_within(BUDGET, columns)
    most_rest = points_within(BUDGET_REST, others)

    return Grids(
        main=[Buckets.split(len(run.rows), most) for run in runs],
        rest=[Buckets.split(len(run.rows), most_rest) for run in runs],
        bands=bands,
        overlaid=len(runs) > 1 or styles is not None,
        styles=range(len(runs)) if styles is None else styles,
    )


def points_within(budget: int, columns: int) -> int:
    points = budget // max(columns, 1)
    return max(FEWEST_POINTS, min(points, MOST_POINTS))


def make_axes(run: Run, buckets: Buckets) -> dict[str, list[float]]:
    """The x values of a run's points, in every unit that its rows give."""
    axes = {"steps": buckets.middles(run.steps)}
    for name, sources in AXES.items():
        for metric, adds_up, factor in sources:
            if metric in run.columns:
                axes[name] = buckets.middles(progress(run.columns[metric], adds_up, factor))
                break

    return axes


def progress(column: Column, adds_up: bool, factor: float) -> list[float]:
    """A column as x values; a gap repeats the value before it."""
    values = []
    total = 0.0
    for value in column:
        if value is not None and math.isfinite(value):
            total = total + value if adds_up else value
        values.append(total * factor)

    return values


def make_chapters(runs: Sequence[Run], grids: Grids) -> dict[str, list[Chart]]:
    """Question -> its charts, where the runs have any."""
    chapters = {}
    for question, plots in CATALOG.items():
        charts = []
        for plot in plots:
            charts += _draw(plot, runs, grids)
        if charts:
            chapters[question] = charts

    return chapters


def make_rest(runs: Sequence[Run], grids: Grids) -> list[Chart]:
    """One chart for each metric that is not in the catalog."""
    named: set[str] = set()
    metrics: set[str] = set()
    for run in runs:
        named |= _named_metrics(run)
        metrics |= run.columns.keys()

    charts = []
    for metric in sorted(metrics - named):
        lines = _overlaid_lines(metric, runs, grids.rest, grids.styles, bands=False)
        if lines:
            charts.append(Chart(metric, lines, rest=True))

    return charts


def make_spectra(run: Run) -> list[Chart]:
    """Singular values before and after the filter: the first and last measurement per block."""
    blocks: dict[str, list[Row]] = {}
    for row in run.spectra:
        blocks.setdefault(str(row["block"]), []).append(row)

    charts = []
    for name, rows in blocks.items():
        shown = [rows[-1]] if len(rows) == 1 else [rows[-1], rows[0]]
        lines = []
        for row in shown:
            for key in ("before", "after"):
                label = f"{key} filter, step {row['step']}"
                lines.append(Line(0, label, style=len(lines), mean=row[key], x=row["rank"]))

        note = f"{rows[-1]['rule']}, block of {'x'.join(map(str, rows[-1]['shape']))}"
        charts.append(Chart(name.removesuffix(".weight"), lines, note, x_name="rank"))

    return charts


def describe(column: Column, steps: Sequence[float]) -> dict[str, Any]:
    """First, last, least and largest finite value with their steps; steps that are not finite."""
    finite = []
    broken = []
    for x, step in zip(column, steps):
        if x is None:
            continue
        if math.isfinite(x):
            finite.append((x, step))
        else:
            broken.append(int(step))

    summary: dict[str, Any] = {"broken": broken, "count": len(finite)}
    if finite:
        summary |= {
            "first": finite[0],
            "last": finite[-1],
            "low": min(finite),
            "high": max(finite),
        }

    return summary


def match(pattern: str, metric: str) -> str | None:
    """What the `*` of a pattern matches in a metric, "" for an equal name, None for no match."""
    found = re.fullmatch(re.escape(pattern).replace(r"\*", "(.+)"), metric, re.DOTALL)
    return None if found is None else "".join(found.groups())


def _draw(plot: Plot, runs: Sequence[Run], grids: Grids) -> list[Chart]:
    """One chart of a single run; of several runs one for each of its metrics."""
    metrics: dict[str, str] = {}
    for run in runs:
        metrics |= _lines_of(plot, run)

    if grids.overlaid:
        return [_overlay(plot, metric, name, runs, grids) for metric, name in metrics.items()]
    if not metrics:
        return []

    run = runs[0]
    buckets = grids.main[0]
    band = _band(plot, run, next(iter(metrics)), buckets)

    lines = []
    for index, (metric, name) in enumerate(metrics.items()):
        column = run.columns[metric]
        low, high = band if index == 0 and band else buckets.range(column)
        summary = describe(column, run.steps)
        mean = buckets.reduce(column)
        lines.append(Line(0, name, index, mean, low, high, summary=summary))

    note = plot.note if band else _note_without_band(plot)
    rules = _rules(plot, run)
    return [Chart(plot.title, lines, note, plot.log, rules=rules, internal=plot.internal)]


def _overlay(plot: Plot, metric: str, name: str, runs: Sequence[Run], grids: Grids) -> Chart:
    lines = _overlaid_lines(metric, runs, grids.main, grids.styles, grids.bands)
    names = set(plot.lines.values())
    title = f"{plot.title}: {name}"
    if plot.standalone:
        title = name[0].upper() + name[1:]
    elif len(names) == 1 and "" not in names:
        title = plot.title

    note = "" if plot.standalone else _note_without_band(plot)  # it may be about another line

    # Runs with different starts have no common reference line.
    different = {_rules(plot, run) for run in runs} - {()}
    rules = different.pop() if len(different) == 1 else ()

    return Chart(title, lines, note, plot.log, rules=rules, internal=plot.internal)


def _overlaid_lines(
    metric: str, runs: Sequence[Run], grids: list[Buckets], styles: Sequence[int], bands: bool
) -> list[Line]:
    lines = []
    for index, (run, buckets) in enumerate(zip(runs, grids, strict=True)):
        column = run.columns.get(metric)
        if column is None or not finite_values(column):
            continue

        low, high = buckets.range(column) if bands else (None, None)
        summary = describe(column, run.steps)
        mean = buckets.reduce(column)
        lines.append(Line(index, run.name, styles[index], mean, low, high, summary=summary))

    return lines


def _band(plot: Plot, run: Run, metric: str, buckets: Buckets) -> tuple[Column, Column] | None:
    """The edges of a plot's band, or of the range over parallel runs."""
    parallel = []
    for each in _split_runs(run):
        if metric in each:
            parallel.append(each[metric])

    if parallel:
        return _range_over([buckets.reduce(column) for column in parallel])

    if not plot.band or any(name not in run.columns for name in plot.band):
        return None

    edges = [buckets.reduce(run.columns[name]) for name in plot.band]
    if len(edges) == 2:
        return edges[0], edges[1]

    return _spread_around(buckets.reduce(run.columns[metric]), edges[0])


def _range_over(columns: Sequence[Column]) -> tuple[Column, Column]:
    low: Column = []
    high: Column = []
    for point in zip(*columns, strict=True):
        known = [x for x in point if x is not None]
        low.append(min(known, default=None))
        high.append(max(known, default=None))

    return low, high


def _spread_around(mean: Column, spread: Column) -> tuple[Column, Column]:
    low: Column = []
    high: Column = []
    for x, s in zip(mean, spread, strict=True):
        if x is None or s is None:
            low.append(None)
            high.append(None)
        else:
            low.append(x - s)
            high.append(x + s)

    return low, high


def _split_runs(run: Run) -> list[dict[str, Column]]:
    """Columns of parallel runs, each padded to the rows of the whole."""
    if not run.by_run:
        return []

    index = {step: k for k, step in enumerate(run.steps)}
    count = 1 + max(int(row["run"]) for row in run.by_run)

    split: list[list[Row]] = [[{} for _ in run.rows] for _ in range(count)]
    for row in run.by_run:
        if row["step"] in index:
            split[int(row["run"])][index[row["step"]]] = row

    return [make_columns(rows) for rows in split]


def _rules(plot: Plot, run: Run) -> tuple[tuple[float, str], ...]:
    baselines = (run.result or {}).get("baselines", {})
    if "episode/fruit" in plot.lines and baselines:
        return (baselines["random_masked"], "random legal moves"), (baselines["maximum"], "maximum")

    greedy = (run.before or {}).get("greedy") or {}
    for metric, name in (("eval/greedy", "strict"), ("eval/reward", "reward")):
        if metric in plot.lines and greedy.get(name):  # None without golds, or without a reward
            return ((greedy[name]["value"], "before training"),)

    return ()


def _note_without_band(plot: Plot) -> str:
    if not plot.note:
        return ""

    first, _, _ = plot.note.partition(";")
    return first.rstrip(".") + "."


def _lines_of(plot: Plot, run: Run) -> dict[str, str]:
    """Metric -> name of the lines that a run has for a plot."""
    if plot.unless in run.columns:
        return {}

    by_name: dict[str, str] = {}  # the last of the metrics that share a name
    for pattern, name in plot.lines.items():
        for metric, column in run.columns.items():
            star = match(pattern, metric)
            if star is not None and finite_values(column):
                by_name[name or star] = metric

    return {metric: name for name, metric in by_name.items()}


def _named_metrics(run: Run) -> set[str]:
    """Metrics of a run that a plot of the catalog shows."""
    metrics: set[str] = set()
    for plots in CATALOG.values():
        for plot in plots:
            metrics.update(_lines_of(plot, run))
            metrics.update(name for name in plot.band if name in run.columns)

    return metrics
