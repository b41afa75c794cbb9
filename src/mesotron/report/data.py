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
BUDGET = 120_000
BUDGET_REST = 45_000
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


_TABLES = tomllib.loads((Path(__file__).parent / "assets" / "catalog.toml").read_text("utf-8"))
CATALOG: dict[str, tuple[Plot, ...]] = {  # question -> the plots that answer it
    question: tuple(Plot(**table | {"band": tuple(table.get("band", ()))}) for table in tables)
    for question, tables in _TABLES.items()
}


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
        out = {
            "run": self.run,
            "name": self.name,
            "grid": grid,
            "y": self.mean,
        }

        out |= {
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
        return out | {key: value for key, value in optional.items() if value is not None}


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

    def record(self) -> dict[str, Any]:
        lines = [line.record("rest" if self.rest else "main") for line in self.lines]
        out = {
            "title": self.title,
            "log": self.log,
            "logX": self.log_x,
            "xName": self.x_name,
        }

        return out | {"rules": self.rules, "lines": lines}


@dataclass(frozen=True)
class Buckets:
    """Groups of consecutive rows, one per point, by their first rows and the row count."""

    edges: tuple[int, ...]

    @classmethod
    def split(cls, num_rows: int, most: int) -> Self:
        count = min(num_rows, most)
        return cls(tuple(k * num_rows // count for k in range(count + 1)) if count else (0,))

    def middles(self, column: Sequence[float]) -> list[float]:
        """The value in the middle of each bucket; the ends for the first and last one."""
        places = [(a + b - 1) // 2 for a, b in pairwise(self.edges)]
        if len(places) > 1:
            places[0], places[-1] = 0, self.edges[-1] - 1
        return [column[place] for place in places]

    def reduce(self, column: Column, how: Callable[[list[float]], float] | None = None) -> Column:
        """The mean (or `how`) of the finite values in each bucket, None where there is none."""
        how = how or (lambda part: sum(part) / len(part))
        parts = (finite_values(column[a:b]) for a, b in pairwise(self.edges))
        return [how(part) if part else None for part in parts]

    def range(self, column: Column) -> tuple[Column | None, Column | None]:
        if self.edges[-1] == len(self.edges) - 1:
            return None, None
        return self.reduce(column, min), self.reduce(column, max)


@dataclass(frozen=True)
class Grids:
    main: list[Buckets]  # points of each run in the catalog's charts
    rest: list[Buckets]  # and in the others
    bands: bool
    overlaid: bool  # a line is a run, not a metric of the only run
    styles: Sequence[int]  # of each run

    def record(self, runs: Sequence[Run]) -> list[dict[str, Any]]:
        pairs = zip(runs, self.main, self.rest, strict=True)
        return [{"main": make_axes(run, a), "rest": make_axes(run, b)} for run, a, b in pairs]


def make_grids(runs: Sequence[Run], styles: Sequence[int] | None = None) -> Grids:
    """As many points as fit a page: fewer the more lines there are."""
    named = sum(len(_named_metrics(run)) for run in runs)
    others = sum(len(run.columns) for run in runs) - named
    bands = len(runs) <= MOST_BANDS
    budgets = (BUDGET // max(named * (3 if bands else 1), 1), BUDGET_REST // max(others, 1))
    main, rest = (max(FEWEST_POINTS, min(points, MOST_POINTS)) for points in budgets)
    points = [[Buckets.split(len(run.rows), most) for run in runs] for most in (main, rest)]
    overlaid = len(runs) > 1 or styles is not None
    styles = range(len(runs)) if styles is None else styles

    return Grids(points[0], points[1], bands, overlaid, styles)


def make_axes(run: Run, buckets: Buckets) -> dict[str, list[float]]:
    axes = {"steps": buckets.middles(run.steps)}
    for name, sources in AXES.items():
        for metric, adds_up, factor in [each for each in sources if each[0] in run.columns][:1]:
            values = []
            total = 0.0
            for value in run.columns[metric]:  # a gap repeats the value before it
                if value is not None and math.isfinite(value):
                    total = total + value if adds_up else value
                values.append(total * factor)

            axes[name] = buckets.middles(values)

    return axes


def make_chapters(runs: Sequence[Run], grids: Grids) -> dict[str, list[Chart]]:
    chapters = {
        question: [chart for plot in plots for chart in _draw(plot, runs, grids)]
        for question, plots in CATALOG.items()
    }
    return {question: charts for question, charts in chapters.items() if charts}


def make_rest(runs: Sequence[Run], grids: Grids) -> list[Chart]:
    named = {metric for run in runs for metric in _named_metrics(run)}
    names = {metric for run in runs for metric in run.columns if metric not in named}
    lines = {
        metric: _overlaid_lines(
            metric,
            runs,
            grids.rest,
            grids.styles,
            bands=False,
        )
        for metric in sorted(names)
    }

    return [Chart(metric, shown, rest=True) for metric, shown in lines.items() if shown]


def make_spectra(run: Run) -> list[Chart]:
    """Singular values before and after the filter: the first and last measurement per block."""
    blocks: dict[str, list[Row]] = {}
    for row in run.spectra:
        blocks.setdefault(str(row["block"]), []).append(row)

    charts = []
    for name, rows in blocks.items():
        shown = [rows[-1]] if len(rows) == 1 else [rows[-1], rows[0]]
        lines = [
            Line(
                0,
                f"{key} filter, step {row['step']}",
                2 * age + k,
                row[key],
                x=row["rank"],
            )
            for age, row in enumerate(shown)
            for k, key in enumerate(("before", "after"))
        ]

        note = f"{rows[-1]['rule']}, block of {'x'.join(map(str, rows[-1]['shape']))}"
        charts.append(Chart(name.removesuffix(".weight"), lines, note, x_name="rank"))

    return charts


def describe(column: Column, steps: Sequence[float]) -> dict[str, Any]:
    """First, last, least and largest finite value with their steps; steps that are not finite."""
    pairs = [(x, s) for x, s in zip(column, steps) if x is not None]
    finite = [pair for pair in pairs if math.isfinite(pair[0])]
    broken = [int(s) for x, s in pairs if not math.isfinite(x)] if len(finite) < len(pairs) else []

    out: dict[str, Any] = {"broken": broken, "count": len(finite)}
    if finite:
        out |= {
            "first": finite[0],
            "last": finite[-1],
            "low": min(finite),
            "high": max(finite),
        }

    return out


def match(pattern: str, metric: str) -> str | None:
    """What the `*` of a pattern matches in a metric, "" for an equal name, None for no match."""
    found = re.fullmatch(re.escape(pattern).replace(r"\*", "(.+)"), metric, re.DOTALL)
    return None if found is None else "".join(found.groups())


def _draw(plot: Plot, runs: Sequence[Run], grids: Grids) -> list[Chart]:
    metrics = {metric: name for run in runs for metric, name in _lines_of(plot, run).items()}
    if grids.overlaid or not metrics:
        return [
            _overlay(
                plot,
                metric,
                name,
                runs,
                grids,
            )
            for metric, name in metrics.items()
        ]

    run = runs[0]
    buckets = grids.main[0]
    band = _band(plot, run, next(iter(metrics)), buckets)

    lines = []
    for index, (metric, name) in enumerate(metrics.items()):
        column = run.columns[metric]
        edges = band if index == 0 and band else buckets.range(column)
        summary = describe(column, run.steps)

        lines.append(
            Line(
                0,
                name,
                index,
                buckets.reduce(column),
                *edges,
                summary=summary,
            )
        )

    note = plot.note if band else _note_without_band(plot)
    return [
        Chart(
            plot.title,
            lines,
            note,
            plot.log,
            rules=_rules(plot, run),
        )
    ]


def _overlay(plot: Plot, metric: str, name: str, runs: Sequence[Run], grids: Grids) -> Chart:
    lines = _overlaid_lines(
        metric,
        runs,
        grids.main,
        grids.styles,
        grids.bands,
    )

    names = set(plot.lines.values())
    title = f"{plot.title}: {name}"
    if plot.standalone:
        title = name[0].upper() + name[1:]
    elif len(names) == 1 and "" not in names:
        title = plot.title

    rules = {rule for run in runs if (rule := _rules(plot, run))}
    note = "" if plot.standalone else _note_without_band(plot)  # it may be about another line

    # Runs with different starts have no common reference line.
    return Chart(
        title,
        lines,
        note,
        plot.log,
        rules=rules.pop() if len(rules) == 1 else (),
    )


def _overlaid_lines(
    metric: str, runs: Sequence[Run], grids: list[Buckets], styles: Sequence[int], bands: bool
) -> list[Line]:
    lines = []
    for index, (run, buckets) in enumerate(zip(runs, grids, strict=True)):
        if (column := run.columns.get(metric)) is None or not finite_values(column):
            continue

        edges = buckets.range(column) if bands else (None, None)
        summary = describe(column, run.steps)
        mean = buckets.reduce(column)

        lines.append(
            Line(
                index,
                run.name,
                styles[index],
                mean,
                *edges,
                summary=summary,
            )
        )

    return lines


def _band(plot: Plot, run: Run, metric: str, buckets: Buckets) -> tuple[Column, Column] | None:
    """The edges of a plot's band, or of the range over parallel runs."""
    if run.by_run and (columns := [each[metric] for each in _split_runs(run) if metric in each]):
        points = list(zip(*(buckets.reduce(column) for column in columns), strict=True))
        finite = [[x for x in point if x is not None] for point in points]
        return [min(p, default=None) for p in finite], [max(p, default=None) for p in finite]

    if not plot.band or any(name not in run.columns for name in plot.band):
        return None

    edges = [buckets.reduce(run.columns[name]) for name in plot.band]
    if len(edges) == 2:
        return edges[0], edges[1]

    pairs = list(zip(buckets.reduce(run.columns[metric]), edges[0], strict=True))
    low: Column = [None if x is None or s is None else x - s for x, s in pairs]

    return low, [None if x is None or s is None else x + s for x, s in pairs]


def _split_runs(run: Run) -> list[dict[str, Column]]:
    """Columns of parallel runs, each padded to the rows of the whole."""
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
    return plot.note.partition(";")[0].rstrip(".") + "." if plot.note else ""


def _lines_of(plot: Plot, run: Run) -> dict[str, str]:
    patterns = {} if plot.unless in run.columns else plot.lines
    metrics = {  # the last of the metrics that share a name
        name or star: metric
        for pattern, name in patterns.items()
        for metric, column in run.columns.items()
        if (star := match(pattern, metric)) is not None and finite_values(column)
    }

    return {metric: name for name, metric in metrics.items()}


def _named_metrics(run: Run) -> set[str]:
    plots = [plot for plots in CATALOG.values() for plot in plots]
    lines = {metric for plot in plots for metric in _lines_of(plot, run)}
    return lines | {name for plot in plots for name in plot.band if name in run.columns}
