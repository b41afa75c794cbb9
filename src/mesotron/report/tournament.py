"""The page of a tournament: who won and by how much, over which rates, how fast, and what failed.

Reads tournament.json and the run folders of its cells; what the words in it mean stands with
whoever writes it. Nothing is computed here but means over seeds, to draw them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mesotron.report.catalogue import CHAPTERS
from mesotron.report.charts import Chart, Line, make_chapters, make_grids
from mesotron.report.markup import Html, el, join
from mesotron.report.page import Draft
from mesotron.report.read import Column, Run, read_run
from mesotron.report.runs_page import run_record
from mesotron.report.sections import COLOURS, figures, flatten, fold, pairs, swatch, table
from mesotron.report.words import Figure, spell_count
from mesotron.runs.console import spell_time
from mesotron.runs.lines import Row

RECORD = "tournament.json"
ENDED_BADLY = ("dead", "diverged")
SIGNS = {"dead": "■", "diverged": "■", "drifting": "▲"}
# Which of the catalogue's questions are asked of many cells at once.
CURVES = tuple(chapter.question for chapter in CHAPTERS[:2])
MOST_CELLS = 60


def render_tournament(folder: Path, live: float | None = None) -> str:
    """The page of a tournament.

    Args:
        folder: with tournament.json and the cells' run folders.
        live: seconds after which the page loads itself again; None never.

    Returns:
        The text of the HTML file.
    """
    record = read_record(folder)
    names = [contender["name"] for contender in record["contenders"]]
    draft = Draft(
        f"{record['recipe']}: {len(names)} contenders",
        "mesotron report · tournament",
        [*record["words"][:2], *progress(record)],
        names=names,
    )
    draft.add("Ranking", ranking(record, names))
    draft.add("Learning curves", *curves(draft, folder, record, names))
    landscape = rate_chart(record, names)
    shown = draft.frames([landscape]) if landscape.lines else None
    draft.add("Which rate?", rate_note(record), shown, rate_map(record, names))
    draft.add("How fast?", speed(record, names))
    draft.add("What failed?", failures(record))
    draft.add("How it was made fair", *(el("p", sentence) for sentence in record["rule"]))
    draft.add("In words", *(el("p", sentence) for sentence in record["words"]))
    draft.add("Settings", *settings(record))
    return draft.render(figures(top_figures(record)), live)


def read_record(folder: Path) -> Row:
    """tournament.json as it was written."""
    path = folder / RECORD
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def is_finished(folder: Path) -> bool:
    """Whether no cell is waiting or running, and the ranking is made."""
    record = read_record(folder)
    is_open = any(cell["state"] in ("waiting", "running") for cell in record["cells"])
    return bool(record["standings"]) and not is_open


def progress(record: Row) -> list[str]:
    """A sentence while cells are open."""
    states = [cell["state"] for cell in record["cells"]]
    left = sum(state in ("waiting", "running") for state in states)
    return [f"{len(states) - left} of {len(states)} cells are over."] if left else []


def top_figures(record: Row) -> list[Figure]:
    """Who leads, and how much was run."""
    found, cells = [], record["cells"]
    if record["standings"]:
        best = record["standings"][0]
        spread = f"95 % interval {show(best['low'])} to {show(best['high'])}"
        found.append(Figure("first", best["contender"], record["measure"]))
        found.append(Figure("its score", show(best["score"]), spread))
    bad = sum(cell["verdict"] in ENDED_BADLY for cell in cells)
    failed = sum(cell["state"] == "failed" for cell in cells)
    found.append(Figure("cells", str(len(cells)), f"{bad} dead or diverged, {failed} failed"))
    seconds = sum(cell["wall"] or cell["seconds"] or 0.0 for cell in cells)
    return [*found, Figure("time of all cells", spell_time(seconds), "one after the other")]


def ranking(record: Row, names: Sequence[str]) -> Html | None:
    """The standings with their intervals drawn to one scale."""
    standings = record["standings"]
    if not standings:
        return None
    ends = [
        x for one in standings for x in (one["low"], one["high"], one["score"]) if x is not None
    ]
    start = record["start"].get("final")
    ends += [] if start is None else [start]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    rows = []
    for one in standings:
        style = names.index(one["contender"])
        rows.append(
            [
                join(swatch(style), f"{one['rank']}. {one['contender']}"),
                show(one["score"]),
                interval(one, low, high, start, style),
                f"{show(one['low'])} to {show(one['high'])}",
                behind(one),
                show(one["p_holm"]),
                f"{one['rate']:.3g}{edge(one)}",
                f"{len(one['seeds'])}",
                spell_time(one["seconds"]),
                ended(one),
            ]
        )
    head = [
        "contender",
        "score",
        "",
        "95 % interval",
        "behind the best",
        "p (Holm)",
        "rate",
        "seeds",
        "time",
        "ended badly",
    ]
    began = "" if start is None else f" The thin line is the untrained start, {show(start)}."
    note = f"{record['measure']}, means over seeds and problems, bootstrap intervals.{began}"
    return table(head, rows, note[:1].upper() + note[1:], class_="ranking")


def interval(one: Row, low: float, high: float, start: float | None, style: int) -> Html | None:
    """A dot and its interval, from `low` to `high` over the width."""
    if one["score"] is None:
        return None

    def at(value: float) -> str:
        return f"{6 + 188 * (value - low) / ((high - low) or 1.0):.1f}"

    parts = []
    if start is not None:
        parts.append(el("line", x1=at(start), x2=at(start), y1="0", y2="20", class_="start"))
    if one["low"] is not None and one["high"] is not None:
        parts.append(el("line", x1=at(one["low"]), x2=at(one["high"]), y1="10", y2="10"))
    parts.append(el("circle", cx=at(one["score"]), cy="10", r="5"))
    colour = f"interval c{style % COLOURS}"
    return el("svg", *parts, class_=colour, viewBox="0 0 200 20", aria_hidden="true")


def curves(draft: Draft, folder: Path, record: Row, names: Sequence[str]) -> list[Html]:
    """The final cells' curves, seed by seed, in their contender's colour; before, the search's."""
    cells = [cell for cell in record["cells"] if cell["run"] and cell["stage"] == "final"]
    cells = cells or [cell for cell in record["cells"] if cell["run"] and cell["stage"] == "search"]
    runs, styles = [], []
    for cell in cells[:MOST_CELLS]:
        run = read_cell(folder, cell)
        if run is not None:
            runs.append(run)
            styles.append(names.index(cell["contender"]))
    if not runs:
        return []
    grids = make_grids(runs, styles)
    axes = grids.record(runs)
    draft.runs = [run_record(run, x) for run, x in zip(runs, axes, strict=True)]
    for each in draft.runs:  # of sixty cells the ends alone can be told apart
        each["marks"] = [mark for mark in each["marks"] if mark["severity"] == "stop"]
    chapters = dict(make_chapters(runs, grids))
    charts = [chart for question in CURVES for chart in chapters.get(question, [])]
    stage = "final" if cells[0]["stage"] == "final" else "search"
    told = f"One line for each {stage} cell; a contender's seeds share its colour and dash."
    return [el("p", told), draft.frames(charts)]


def read_cell(folder: Path, cell: Row) -> Run | None:
    """A cell's run; None while it has written nothing."""
    path = folder / cell["run"]
    if not (path / "metrics.jsonl").is_file() or not (path / "env.json").is_file():
        return None
    return read_run(path, f"{cell['contender']}, rate {cell['rate']:.3g}, seed {cell['seed']}")


def rate_chart(record: Row, names: Sequence[str]) -> Chart:
    """Score over learning rate, a line for each contender, dead cells crossed."""
    lines: list[Line] = []
    dead: list[tuple[float, float]] = []
    for style, name in enumerate(names):
        found: dict[float, list[float]] = {}
        for cell in search_cells(record, name):
            if cell["score"] is not None:
                found.setdefault(cell["rate"], []).append(cell["score"])
                if cell["verdict"] in ENDED_BADLY:
                    dead.append((cell["rate"], cell["score"]))
        rates = sorted(found)
        means: Column = [sum(found[rate]) / len(found[rate]) for rate in rates]
        if rates:
            lines.append(Line(0, name, style, means, x=rates, dots="dots"))
    if dead:
        dead.sort()
        ys: Column = [score for _, score in dead]
        xs = [rate for rate, _ in dead]
        lines.append(Line(0, "dead or diverged", len(names), ys, x=xs, dots="crosses"))
    title = f"{record['measure'][:1].upper()}{record['measure'][1:]} over learning rate"
    return Chart(title, lines, "Search cells, means over seeds.", log_x=True, x_name="rate")


def rate_note(record: Row) -> Html:
    """What the landscape shows, and whose best rate lies on the edge."""
    edges = [one for one in record["standings"] if one["edge"]]
    told = "Every contender had the same number of trials at first, around the rate that makes its "
    told += "step as large as AdamW's."
    for one in edges:
        told += f" {one['contender']}'s best rate is the {one['edge']}est that was tried."
    return el("p", told)


def rate_map(record: Row, names: Sequence[str]) -> Html | None:
    """Contender by rate: the score, and a sign where the watch found the run dead."""
    rates = sorted({cell["rate"] for name in names for cell in search_cells(record, name)})
    if not rates:
        return None
    chosen = {one["contender"]: one["rate"] for one in record["standings"]}
    rows = []
    for style, name in enumerate(names):
        row: list[str] = [join(swatch(style), name)]
        for rate in rates:
            cells = [cell for cell in search_cells(record, name) if cell["rate"] == rate]
            row.append(join(*(map_cell(cell, chosen.get(name) == rate) for cell in cells)))
        rows.append(row)
    head = ["contender", *(f"{rate:.3g}" for rate in rates)]
    return table(head, rows, "Search: ■ dead or diverged, ▲ drifting, ✕ failed, ★ chosen")


def map_cell(cell: Row, chosen: bool) -> Html:
    """One search cell in a few characters."""
    if cell["state"] != "done":
        sign = {"failed": "✕ failed", "running": "running", "waiting": "·"}[cell["state"]]
        return el("span", sign, class_=f"cell {cell['state']}", title=cell["why"] or None)
    verdict = cell["verdict"] or ""
    words = " ".join(filter(None, [show(cell["score"]), SIGNS.get(verdict), "★" if chosen else ""]))
    state = verdict if verdict in SIGNS else ("best" if chosen else "")
    return el("span", f"{words} ", class_=f"cell {state}".strip(), title=cell["story"] or None)


def speed(record: Row, names: Sequence[str]) -> Html | None:
    """Time, tokens and steps to the threshold, median over the final cells that got there."""
    threshold = record["threshold"]
    finals = [cell for cell in record["cells"] if cell["stage"] == "final"]
    if not threshold or threshold["value"] is None or not finals:
        return None
    rows = []
    for style, name in enumerate(names):
        cells = [cell for cell in finals if cell["contender"] == name]
        there = [cell for cell in cells if cell["threshold_steps"] is not None]
        middle = {
            key: median([cell[key] for cell in there])
            for key in ("threshold_seconds", "threshold_tokens", "threshold_steps")
        }
        seconds, tokens = middle["threshold_seconds"], middle["threshold_tokens"]
        rows.append(
            [
                join(swatch(style), name),
                f"{len(there)} of {len(cells)}",
                spell_time(seconds) if seconds is not None else "never",
                show(middle["threshold_steps"]),
                "–" if tokens is None else spell_count(tokens),
            ]
        )
    goal = f"until {threshold['metric']} has passed {show(threshold['value'])}"
    return table(
        ["contender", "got there", "time", "steps", "tokens"],
        rows,
        f"Training time {goal}: median over the final cells that got there",
    )


def failures(record: Row) -> Html | None:
    """Cells that crashed, diverged or died, with what they said."""
    rows = []
    for cell in record["cells"]:
        if cell["state"] == "failed" or cell["verdict"] in ENDED_BADLY:
            word = "failed" if cell["state"] == "failed" else cell["verdict"]
            rows.append(
                [
                    cell["id"],
                    cell["contender"],
                    f"{cell['rate']:.3g}",
                    str(cell["seed"]),
                    word,
                    cell["why"] or cell["story"] or (cell["cause"] or ""),
                ]
            )
    head = ["cell", "contender", "rate", "seed", "how", "why"]
    return table(head, rows, "Cells that crashed, diverged or died") if rows else None


def settings(record: Row) -> list[Html]:
    """Contenders, plan and environment."""
    who = [
        [one["name"], one["optim"], one["objective"], one["about"]] for one in record["contenders"]
    ]
    return [
        fold(
            "Contenders", table(["name", "optimizer", "objective", "what it is"], who, "Contenders")
        ),
        fold("Plan", pairs(flatten(record["plan"]), "Plan")),
        fold("Environment", pairs(flatten(record["environment"]), "Environment")),
    ]


def search_cells(record: Row, name: str) -> list[Row]:
    """The search cells of a contender."""
    return [c for c in record["cells"] if c["contender"] == name and c["stage"] == "search"]


def behind(one: Row) -> str:
    """How far behind the best, with its interval."""
    if one["behind"] is None:
        return "the best"
    return f"{show(one['behind'])} ({show(one['behind_low'])} to {show(one['behind_high'])})"


def edge(one: Row) -> str:
    """A word where the best rate lies at the end of those that were tried."""
    return f" (the {one['edge']}est tried)" if one["edge"] else ""


def ended(one: Row) -> str:
    """Final cells that died or crashed."""
    words = [
        f"{one['dead']} dead" if one["dead"] else "",
        f"{one['failed']} failed" if one["failed"] else "",
    ]
    return ", ".join(filter(None, words)) or "none"


def median(values: list[Any]) -> float | None:
    """The middle of the known ones, None if there is none."""
    known = sorted(value for value in values if value is not None)
    return known[len(known) // 2] if known else None


def show(value: float | None) -> str:
    """A number with three digits, a dash if it is not known."""
    return "–" if value is None else f"{value + 0.0:.3g}"
