"""The page of a tournament: ranking, learning curves, learning rates, speed and failures."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from mesotron.report import standings as tables
from mesotron.report.data import CATALOG, Chart, Column, Line, make_chapters, make_grids
from mesotron.report.page import Block, Cell, Page, cell, fold, pairs_table, table, text
from mesotron.report.read import Run, read_run
from mesotron.report.summary import Figure
from mesotron.runs.console import spell_time
from mesotron.runs.files import Row, read_json
from mesotron.runs.links import refuse_link

RECORD = "tournament.json"
CURVES = tuple(CATALOG)[:2]  # the questions to answer with the cells' curves
MOST_CELLS = 60
INTERVAL = ("low", "high", "score")  # keys of a standing
OPEN = ("waiting", "running")  # states of cells that are not over


def render_tournament(folder: Path, live: float | None = None) -> str:
    record: Row = read_json(folder / RECORD)
    refuse_link(folder / "cells")  # of a cell itself, `read_run` does
    names = [contender["name"] for contender in record["contenders"]]
    page = Page(
        title=f"{record['recipe']}: {len(names)} contenders",
        kind="mesotron report · tournament",
        sentences=[*record["words"][:2], *progress(record)],
        names=names,
        figures=top_figures(record),
    )

    page.add("Ranking", ranking_block(record, names))
    page.add("Learning curves", *curves(page, folder, record, names))

    chart = rate_chart(record, names)
    shown = page.frames([chart]) if chart.lines else None
    rates = table_block(tables.rate_map(record), names)
    page.add("Learning rates", text(rate_note(record)), shown, rates)
    page.add("Speed", table_block(tables.speed(record), names))
    page.add("Failures", table_block(tables.failures(record)))
    page.add("Fairness", *(text(sentence) for sentence in record["rule"]))
    page.add("Summary", *(text(sentence) for sentence in record["words"]))
    who = [
        [one["name"], one["optim"], one["objective"], one["about"]] for one in record["contenders"]
    ]
    head = ["name", "optimizer", "objective", "description"]

    page.add(
        "Settings",
        fold("Contenders", table(head, who, "Contenders")),
        fold("Plan", pairs_table(record["plan"], "Plan")),
        fold("Environment", pairs_table(record["environment"], "Environment")),
    )
    return page.render(live)


def progress(record: Row) -> list[str]:
    """How many cells are over, in a sentence; nothing once all are."""
    states = [one["state"] for one in record["cells"]]
    done = sum(state not in OPEN for state in states)
    if done == len(states):
        return []

    return [f"{done} of {len(states)} cells finished."]


def rate_note(record: Row) -> str:
    note = (
        "Every contender starts with the same number of trials, around the rate that makes its "
        "step as large as AdamW's."
    )
    for one in record["standings"]:
        if one["edge"]:
            note += f" The best rate of {one['contender']} is the {one['edge']}est tried."

    return note


def is_tournament(path: Path) -> bool:
    return (path / RECORD).is_file()


def is_finished(folder: Path) -> bool:
    record: Row = read_json(folder / RECORD)
    is_open = any(one["state"] in OPEN for one in record["cells"])
    return bool(record["standings"] or record["words"]) and not is_open


def top_figures(record: Row) -> list[Figure]:
    figures = []
    cells = record["cells"]

    best = record["standings"][0] if record["standings"] else None
    if best is not None and best["score"] == 0:
        figures.append(Figure("first", "none", f"all score 0: {record['measure']}"))
    elif best is not None and best["score"] is not None:
        spread = f"95% interval {show(best['low'])} to {show(best['high'])}"
        figures.append(Figure("first", best["contender"], record["measure"]))
        figures.append(Figure("score", show(best["score"]), spread))

    bad = sum(one["verdict"] in tables.ENDED_BADLY for one in cells)
    failed = sum(one["state"] == "failed" for one in cells)
    figures.append(Figure("cells", str(len(cells)), f"{bad} dead or diverged, {failed} failed"))
    seconds = sum(one["wall"] or one["seconds"] or 0.0 for one in cells)

    return [*figures, Figure("total time", spell_time(seconds), "sum over cells")]


def table_block(one: tables.Table | None, names: Sequence[str] = (), css: str = "") -> Block | None:
    if one is None or not one.rows or len(one.columns) < 2:
        return None

    rows: list[list[Cell]] = []
    for row in one.rows:
        cells = [cell(entry.text, css=entry.state, title=entry.tip) for entry in row]
        if row[0].text in names:
            cells[0] = cell(row[0].text, style=names.index(row[0].text))
        rows.append(cells)

    caption = ": ".join(filter(None, (one.title, one.note)))
    return table(one.columns, rows, caption[:1].upper() + caption[1:], css)


def ranking_block(record: Row, names: Sequence[str]) -> Block | None:
    """The table of standings with a column in which the intervals are drawn."""
    block = table_block(tables.standings(record), names, "ranking")
    if block is None:
        return None

    place = block["head"].index("score") + 1
    block["head"] = [*block["head"][:place], "", *block["head"][place:]]

    scale = interval_scale(record)
    start = record["start"].get("final")
    for cells, one in zip(block["rows"], record["standings"], strict=True):
        cells[0]["text"] = f"{one['rank']}. {one['contender']}"
        drawn = cell("")
        if one["score"] is not None:
            interval = {key: scale.at(one[key]) for key in INTERVAL}
            interval["start"] = scale.at(start)
            drawn = cell("", style=names.index(one["contender"]), interval=interval)

        cells.insert(place, drawn)

    return block


class IntervalScale(NamedTuple):
    """Scores as places in a drawing that is 200 units wide."""

    low: float
    high: float

    def at(self, value: float | None) -> str:
        if value is None:
            return ""

        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return f"{6 + 188 * share:.1f}"


def interval_scale(record: Row) -> IntervalScale:
    values = [record["start"].get("final")]
    for one in record["standings"]:
        values += [one[key] for key in INTERVAL]

    known = [value for value in values if value is not None] or [0.0, 1.0]
    return IntervalScale(min(known), max(known))


def curves(page: Page, folder: Path, record: Row, names: Sequence[str]) -> list[Block | None]:
    """Curves of the final cells in their contender's color; of the search cells before that."""
    cells = started_cells(record)
    runs: list[Run] = []

    styles: list[int] = []
    for one in cells[:MOST_CELLS]:
        path = folder / one["run"]
        if (path / "metrics.jsonl").is_file() and (path / "env.json").is_file():
            name = f"{one['contender']}, rate {one['rate']:.3g}, seed {one['seed']}"
            runs.append(read_run(path, name))
            styles.append(names.index(one["contender"]))

    if not runs:
        return []

    grids = make_grids(runs, styles)
    page.add_runs(runs, grids.record(runs))

    for each in page.runs:  # with so many cells only stops are distinguishable
        each["marks"] = [mark for mark in each["marks"] if mark["severity"] == "stop"]

    chapters = make_chapters(runs, grids)
    charts = []
    for question in CURVES:
        for chart in chapters.get(question, []):
            charts.append(chart)

    note = f"One line per {cells[0]['stage']} cell; a contender's seeds share color and dash."

    return [text(note), page.frames(charts)]


def started_cells(record: Row) -> list[Row]:
    """The final cells that have a run; before there are any, those of the search."""
    finals = [one for one in tables.final_cells(record) if one["run"]]
    return finals or [c for c in record["cells"] if c["run"] and c["stage"] == "search"]


def rate_chart(record: Row, names: Sequence[str]) -> Chart:
    """Score over learning rate by contender; dead cells are crossed."""
    lines: list[Line] = []
    cells = [c for c in record["cells"] if c["stage"] == "search" and c["score"] is not None]
    for style, name in enumerate(names):
        by_rate: dict[float, list[float]] = {}
        for one in cells:
            if one["contender"] == name:
                by_rate.setdefault(one["rate"], []).append(one["score"])

        if by_rate:
            rates = sorted(by_rate)
            means: Column = [fmean(by_rate[rate]) for rate in rates]
            lines.append(Line(0, name, style, means, x=rates, dots="dots"))

    dead = sorted((c["rate"], c["score"]) for c in cells if c["verdict"] in tables.ENDED_BADLY)
    if dead:
        xs, ys = map(list, zip(*dead, strict=True))
        lines.append(Line(0, "dead or diverged", len(names), ys, x=xs, dots="crosses"))

    title = f"{record['measure'][:1].upper()}{record['measure'][1:]} over learning rate"
    return Chart(title, lines, "Search cells, mean over seeds.", log_x=True, x_name="rate")


def show(value: float | None) -> str:
    return "–" if value is None else f"{value + 0.0:.3g}"
