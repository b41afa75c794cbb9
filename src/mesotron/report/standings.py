"""Tables of a tournament: the ranking with its intervals, the map of rates, speed and failures."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from mesotron.report.charts import COLOURS, Chart, Line
from mesotron.report.markup import Html, el, join
from mesotron.report.read import Column
from mesotron.report.sections import swatch, table
from mesotron.report.words import spell_count
from mesotron.runs.console import spell_time
from mesotron.runs.files import Row

ENDED_BADLY = ("dead", "diverged")
SIGNS = {"dead": "■", "diverged": "■", "drifting": "▲"}


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


def behind(one: Row) -> str:
    """How far behind the best, with its interval."""
    if one["behind"] is None:
        return "the best" if one["rank"] == 1 and one["score"] else "–"
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


def search_cells(record: Row, name: str) -> list[Row]:
    """The search cells of a contender."""
    return [c for c in record["cells"] if c["contender"] == name and c["stage"] == "search"]


def final_cells(record: Row) -> list[Row]:
    """The final cells that count: not those at a rate that a longer search has left again."""
    chosen = {one["contender"]: one["rate"] for one in record["standings"]}
    return [
        cell
        for cell in record["cells"]
        if cell["stage"] == "final" and chosen.get(cell["contender"], cell["rate"]) == cell["rate"]
    ]


def speed(record: Row, names: Sequence[str]) -> Html | None:
    """Time, tokens and steps to the threshold, median over the final cells that got there."""
    threshold = record["threshold"]
    finals = final_cells(record)
    if not threshold or threshold["value"] is None or not finals:
        return None
    rows = []
    for style, name in enumerate(names):
        cells = [cell for cell in finals if cell["contender"] == name]
        there = [cell for cell in cells if cell["threshold_steps"] is not None]
        middle = {
            key: middle_of([cell[key] for cell in there])
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


def middle_of(values: list[Any]) -> float | None:
    """The median of the known ones, None if there is none."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def show(value: float | None) -> str:
    """A number with three digits, a dash if it is not known."""
    return "–" if value is None else f"{value + 0.0:.3g}"
