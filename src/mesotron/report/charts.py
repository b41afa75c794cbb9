"""Runs to charts: which lines each plot of the catalogue has, reduced to what a page can hold.

A single run's plot holds several metrics, told apart by colour and dash. Of several runs each
metric gets a plot of its own, and colour and dash are the run's on the whole page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mesotron.report.catalogue import CHAPTERS, Plot, match
from mesotron.report.read import Column, Run, make_columns
from mesotron.report.series import Buckets, axes_of, describe, make_buckets

# Numbers that the page may hold, of about seven bytes each: 0.8 MB, and 0.3 MB for the rest.
BUDGET, BUDGET_REST = 120_000, 45_000
MOST_POINTS, FEWEST_POINTS = 300, 24
# Bands of more runs than this hide one another.
MOST_BANDS = 4
# Colours of Okabe and Ito's palette without yellow; with four dashes 28 lines differ in both.
COLOURS, DASHES = 7, 4


@dataclass(frozen=True)
class Line:
    """One line of a chart, reduced to points."""

    run: int
    """Whose x and events it has."""
    name: str
    style: int
    """Colour and dash; lines of one style are switched on and off together."""
    mean: Column
    low: Column | None = None
    high: Column | None = None
    x: list[float] | None = None
    """Its own x; None for the run's."""
    dots: Literal["", "dots", "crosses"] = ""
    """Points on the line, or crosses without one."""
    summary: dict[str, Any] = field(default_factory=dict)

    def record(self, grid: str) -> dict[str, Any]:
        """As the script reads it."""
        found = {"run": self.run, "name": self.name, "grid": grid, "y": self.mean}
        found |= {"group": self.style, "colour": self.style % COLOURS, "dash": self.style % DASHES}
        if self.low is not None and self.high is not None:
            found |= {"low": self.low, "high": self.high}
        if self.x is not None:
            found["x"] = self.x
        return found | ({"dots": self.dots} if self.dots else {})


@dataclass(frozen=True)
class Chart:
    """One chart: its lines, and what is drawn around them."""

    title: str
    lines: list[Line]
    note: str = ""
    log: bool = False
    log_x: bool = False
    x_name: str | None = None
    """Of a chart with an x of its own; None for the page's."""
    rules: tuple[tuple[float, str], ...] = ()
    """Horizontal lines: height and word."""
    rest: bool = False
    """Of a metric that the catalogue does not name."""

    def record(self) -> dict[str, Any]:
        """As the script reads it."""
        return {
            "title": self.title,
            "log": self.log,
            "logX": self.log_x,
            "xName": self.x_name,
            "rules": [list(rule) for rule in self.rules],
            "lines": [line.record("rest" if self.rest else "main") for line in self.lines],
        }


@dataclass(frozen=True)
class Grids:
    """How runs are drawn.

    Args:
        main: the points of each run in the catalogue's plots.
        rest: in the other ones.
        bands: whether lines have bands.
        overlaid: whether a line is a run, rather than a metric of the only one.
        styles: colour and dash of each run.
    """

    main: list[Buckets]
    rest: list[Buckets]
    bands: bool
    overlaid: bool
    styles: Sequence[int]

    def record(self, runs: Sequence[Run]) -> list[dict[str, Any]]:
        """The x of each run."""
        pairs = zip(runs, self.main, self.rest, strict=True)
        return [{"main": axes_of(run, a), "rest": axes_of(run, b)} for run, a, b in pairs]


def make_grids(runs: Sequence[Run], styles: Sequence[int] | None = None) -> Grids:
    """As many points as fit a page: fewer the more lines there are.

    Args:
        runs: that share the page.
        styles: colour and dash of each; every run its own if not given.
    """
    named = sum(len(_named(run)) for run in runs)
    others = sum(len(run.columns) for run in runs) - named
    bands = len(runs) <= MOST_BANDS
    main = _clip(BUDGET // max(named * (3 if bands else 1), 1))
    rest = _clip(BUDGET_REST // max(others, 1))
    return Grids(
        [make_buckets(len(run.rows), main) for run in runs],
        [make_buckets(len(run.rows), rest) for run in runs],
        bands,
        len(runs) > 1 or styles is not None,
        range(len(runs)) if styles is None else styles,
    )


def make_chapters(runs: Sequence[Run], grids: Grids) -> list[tuple[str, list[Chart]]]:
    """The catalogue's questions with the charts that these runs have."""
    chapters = []
    for chapter in CHAPTERS:
        charts = [c for plot in chapter.plots for c in _draw_plot(plot, runs, grids)]
        if charts:
            chapters.append((chapter.question, charts))
    return chapters


def make_rest(runs: Sequence[Run], grids: Grids) -> list[Chart]:
    """A chart for each metric that the catalogue does not name."""
    named = {metric for run in runs for metric in _named(run)}
    names = dict.fromkeys(metric for run in runs for metric in run.columns if metric not in named)
    return [
        Chart(metric, lines, rest=True)
        for metric in sorted(names)
        if (lines := _metric_lines(metric, runs, grids.rest, grids.styles))
    ]


def _draw_plot(plot: Plot, runs: Sequence[Run], grids: Grids) -> list[Chart]:
    metrics = {metric: word for run in runs for metric, word in _lines_of(plot, run).items()}
    if grids.overlaid:
        return [_overlay(plot, metric, word, runs, grids) for metric, word in metrics.items()]
    return [_single_chart(plot, runs[0], metrics, grids)] if metrics else []


def _single_chart(plot: Plot, run: Run, metrics: dict[str, str], grids: Grids) -> Chart:
    buckets, lines = grids.main[0], []
    low, high = _band(plot, run, next(iter(metrics)), buckets)
    note = plot.note if low is not None else _without_band(plot)
    for place, (metric, word) in enumerate(metrics.items()):
        column = run.columns[metric]
        if place > 0 or low is None:
            low = None if buckets.whole else buckets.lows(column)
            high = None if buckets.whole else buckets.highs(column)
        summary = describe(column, run.steps)
        lines.append(Line(0, word, place, buckets.means(column), low, high, summary=summary))
    return Chart(plot.title, lines, note, plot.log, rules=_rules(plot, run))


def _without_band(plot: Plot) -> str:
    """The note without its second half, which tells of the band."""
    return plot.note.partition(";")[0].rstrip(".") + "." if plot.note else ""


def _overlay(plot: Plot, metric: str, word: str, runs: Sequence[Run], grids: Grids) -> Chart:
    lines = _metric_lines(metric, runs, grids.main, grids.styles, bands=grids.bands)
    words = set(plot.lines.values())
    title = f"{plot.title}: {word}"
    if plot.spoken:
        title = word[0].upper() + word[1:]
    elif len(words) == 1 and "" not in words:
        title = plot.title
    rules = {found for run in runs if (found := _rules(plot, run))}
    note = "" if plot.spoken else _without_band(plot)  # it may be about another line
    # Runs that began elsewhere have no common line to be held against.
    return Chart(title, lines, note, plot.log, rules=rules.pop() if len(rules) == 1 else ())


def _metric_lines(
    metric: str,
    runs: Sequence[Run],
    grids: list[Buckets],
    styles: Sequence[int],
    bands: bool = False,
) -> list[Line]:
    """One line for each run that has the metric."""
    lines = []
    for place, (run, buckets) in enumerate(zip(runs, grids, strict=True)):
        if metric not in run.columns:
            continue
        column = run.columns[metric]
        low = high = None
        if bands and not buckets.whole:
            low, high = buckets.lows(column), buckets.highs(column)
        means = buckets.means(column)
        if any(value is not None for value in means):
            summary = describe(column, run.steps)
            lines.append(Line(place, run.name, styles[place], means, low, high, summary=summary))
    return lines


def _band(
    plot: Plot, run: Run, metric: str, buckets: Buckets
) -> tuple[Column | None, Column | None]:
    """The edges of a plot's band, of the range over runs side by side, or nothing."""
    if run.by_run:
        single = [make_columns(rows) for rows in _split_runs(run)]
        columns = [each[metric] for each in single if metric in each]
        if columns:
            return _edges(columns, min, buckets), _edges(columns, max, buckets)
    if not plot.band or any(name not in run.columns for name in plot.band):
        return None, None
    parts = [buckets.means(run.columns[name]) for name in plot.band]
    if len(parts) == 2:
        return parts[0], parts[1]
    middle = buckets.means(run.columns[metric])
    pairs = list(zip(middle, parts[0], strict=True))
    low = [None if x is None or s is None else x - s for x, s in pairs]
    return low, [None if x is None or s is None else x + s for x, s in pairs]


def _split_runs(run: Run) -> list[list[dict[str, Any]]]:
    """Rows of runs side by side, each padded to the rows of the whole."""
    place = {step: k for k, step in enumerate(run.steps)}
    count = 1 + max(int(row["run"]) for row in run.by_run)
    split: list[list[dict[str, Any]]] = [[{} for _ in run.rows] for _ in range(count)]
    for row in run.by_run:
        if row["step"] in place:
            split[int(row["run"])][place[row["step"]]] = row
    return split


def _edges(columns: list[Column], pick: Any, buckets: Buckets) -> Column:
    means = zip(*(buckets.means(column) for column in columns), strict=True)
    return [pick((x for x in point if x is not None), default=None) for point in means]


def _rules(plot: Plot, run: Run) -> tuple[tuple[float, str], ...]:
    """What a curve is to be held against: a random player, or the model before training."""
    baselines = (run.result or {}).get("baselines", {})
    if "episode/fruit" in plot.lines and baselines:
        legal, full = baselines["random_masked"], baselines["maximum"]
        return ((legal, "random legal moves"), (full, "a full board"))
    start = (run.before or {}).get("greedy", {}).get("strict", {}).get("value")
    if "eval/greedy" in plot.lines and start is not None:
        return ((start, "before training"),)
    return ()


def _lines_of(plot: Plot, run: Run) -> dict[str, str]:
    """The metrics of a run that a plot draws, and what each line is called."""
    if plot.unless and plot.unless in run.columns:
        return {}
    found = {}
    for pattern, word in plot.lines.items():
        for metric in run.columns:
            star = match(pattern, metric)
            if star is not None and _is_drawn(run.columns[metric]):
                found[metric] = word or star
    return found


def _named(run: Run) -> set[str]:
    """The metrics of a run that the catalogue draws, as lines or as edges of bands."""
    plots = [plot for chapter in CHAPTERS for plot in chapter.plots]
    lines = {metric for plot in plots for metric in _lines_of(plot, run)}
    return lines | {name for plot in plots for name in plot.band if name in run.columns}


def _is_drawn(column: Column) -> bool:
    return any(x is not None and math.isfinite(x) for x in column)


def _clip(points: int) -> int:
    return max(FEWEST_POINTS, min(points, MOST_POINTS))
