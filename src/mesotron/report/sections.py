"""The parts of a page that are words and tables: the watch, charts' frames, config, environment.

Everything here stands in the page without a script; the script draws into the frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mesotron.report.charts import COLOURS, DASHES, Chart, Line
from mesotron.report.markup import Html, el, join
from mesotron.report.read import Run
from mesotron.report.words import Figure, cost_line, final_score
from mesotron.runs.files import Row
from mesotron.watch.events import Action

SIGNS = {"warn": "▲", "stop": "■", "clear": "○", "rollback": "↺"}
WORDS = {"warn": "warning", "stop": "stop", "clear": "over", "rollback": "gone back"}


def anchor(title: str) -> str:
    """A title as links name it.

    Example:
        >>> anchor("Is it learning?")
        'is-it-learning'
    """
    return title.lower().strip("?").replace(" ", "-").replace(",", "")


def section(title: str, *children: str | None) -> Html:
    """A part of the page under a heading of its own."""
    key = anchor(title)
    head = el("h2", title, id=f"{key}-title")
    return el("section", head, *children, id=key, aria_labelledby=f"{key}-title")


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "", class_: str = ""
) -> Html:
    """A table whose first column names its rows; it scrolls sideways on a narrow screen."""
    top = el("thead", el("tr", *(el("th", word, scope="col") for word in head)))
    body = [
        el("tr", el("th", row[0], scope="row"), *(el("td", cell) for cell in row[1:]))
        for row in rows
    ]
    parts = [el("caption", caption) if caption else None, top, el("tbody", *body)]
    inner = el("table", *parts, class_=class_ or None)
    return el(
        "div", inner, class_="wide", tabindex="0", role="region", aria_label=caption or head[0]
    )


def figures(found: Sequence[Figure]) -> Html:
    """Large numbers in a row."""
    tiles = [
        el(
            "div",
            el("dt", one.word),
            el("dd", el("b", one.value), el("small", one.note)),
            class_="figure",
        )
        for one in found
    ]
    return el("dl", *tiles, class_="figures")


def chart_frame(chart: Chart, number: int, shared_legend: bool) -> Html:
    """A chart's place on the page: title, legend, the drawing, its numbers as a table."""
    own_legend = len(chart.lines) > 1 and not shared_legend
    words = " ".join(f"{line.name}: {course(line)}." for line in chart.lines[:6])
    drawing = el(
        "div",
        class_="plot",
        tabindex="0",
        role="img",
        data_chart=str(number),
        aria_label=f"Chart, {chart.title}. {words} Arrow keys read its points.",
    )
    head = [el("h3", chart.title), el("p", course(chart.lines[0]), class_="course")]
    return el(
        "figure",
        el("figcaption", *(head if len(chart.lines) == 1 else head[:1])),
        legend(chart.lines) if own_legend else None,
        drawing,
        el("p", chart.note, class_="note") if chart.note else None,
        el("details", el("summary", "numbers"), numbers(chart)),
        class_="chart",
    )


def legend(lines: Sequence[Line]) -> Html:
    """What each line is, with its colour and dash."""
    items = [el("li", _sign(line), line.name) for line in lines]
    return el("ul", *items, class_="legend")


def _sign(line: Line) -> Html:
    if line.dots != "crosses":
        return swatch(line.style)
    drawn = el("path", d="M8 0l10 10m0 -10l-10 10", class_="cross")
    return el("svg", drawn, class_="swatch", viewBox="0 0 26 10", aria_hidden="true")


def swatch(style: int) -> Html:
    """A short piece of a line in its colour and dash."""
    drawn = el("line", x1="0", y1="5", x2="26", y2="5", class_=_style(style))
    return el("svg", drawn, class_="swatch", viewBox="0 0 26 10", aria_hidden="true")


def course(line: Line) -> str:
    """A line in a few words: where it began and ended, and its extremes."""
    found = line.summary
    if not found.get("count"):
        return "no finite value" if found else ""
    (first, _), (last, _) = found["first"], found["last"]
    broken = f"; {len(found['broken'])} not finite" if found["broken"] else ""
    if found["count"] == 1 or found["low"][0] == found["high"][0]:
        return f"{number(first)} throughout{broken}"
    return f"{number(first)} → {number(last)}{broken}"


def numbers(chart: Chart) -> Html:
    """A chart's table: for those who cannot see it, and where no script runs."""
    if chart.x_name:
        return _points_table(chart)
    head = ["line", "first", "last", "least", "largest", "not finite"]
    rows = [[line.name, *_summary_cells(line.summary)] for line in chart.lines]
    return table(head, rows, f"{chart.title} in numbers")


def number(value: float | None) -> str:
    """A number with four digits.

    Example:
        >>> number(0.123456), number(1234567.0), number(None)
        ('0.1235', '1.235e+06', '')
    """
    return "" if value is None else f"{value:.4g}"


def watch_parts(run: Run) -> list[Html | None]:
    """The story and the events in words; nothing if there is neither."""
    story = run.story
    if story is None:
        return [event_list(run.events)]
    parts = [phases(run), el("p", f"{story.text()}.", class_="story")]
    if story.cause:
        parts.append(el("p", el("b", "Why: "), f"{story.diagnosis}."))
        parts.append(el("p", el("b", "What to do: "), f"{story.remedy}."))
    if story.blind:
        names = ", ".join(name.replace("_", " ") for name in story.blind)
        lacking = f"Could not look for, for lack of a metric: {names}."
        parts.append(el("p", lacking, class_="note"))
    return [*parts, event_list(run.events)]


def event_list(events: Sequence[Row]) -> Html | None:
    """Every event with its sign."""
    if not events:
        return None
    items = []
    for event in events:
        kind = kind_of(event)
        mark = el("span", SIGNS.get(kind, "●"), class_=f"sign {kind}", aria_hidden="true")
        head = el("b", f" step {event['step']}, {event_text(event)}. ")
        items.append(el("li", mark, head, event_detail(event)))
    return el("ol", *items, class_="events")


def kind_of(event: Row) -> str:
    """What the watch saw (warn, stop, clear) or the guard did (rollback, stop)."""
    return str(event.get("severity") or event.get("action") or "note")


def event_text(event: Row) -> str:
    """One event as the mark on a curve says it."""
    what = str(event.get("detector") or event.get("kind") or "event").replace("_", " ")
    return f"{WORDS.get(kind_of(event), kind_of(event))}: {what}"


def event_detail(event: Row) -> str:
    """What else is to be said of an event: its diagnosis, or what the guard did."""
    if event.get("kind") == "guard":
        return Action.from_record(event).sentence()
    return "" if kind_of(event) == "clear" else str(event.get("diagnosis") or "")


def phases(run: Run) -> Html | None:
    """The run as a strip: healthy, drifting, dead."""
    story = run.story
    if story is None or len(run.rows) < 2:
        return None
    first, last = run.steps[0], max(run.steps[-1], run.steps[0] + 1)
    pieces, words = [], []
    for phase in story.phases:
        start = 100 * (phase.first - first) / (last - first)
        width = max(100 * (phase.last - phase.first) / (last - first), 0.5)
        pieces.append(
            el(
                "rect",
                x=f"{start:.2f}",
                y="0",
                width=f"{width:.2f}",
                height="4",
                class_=phase.condition,
            )
        )
        words.append(
            el(
                "li",
                el("i", class_=phase.condition),
                f"{phase.condition}, steps {phase.first} to {phase.last}",
            )
        )
    strip = el(
        "svg",
        *pieces,
        viewBox="0 0 100 4",
        preserveAspectRatio="none",
        class_="strip",
        aria_hidden="true",
    )
    return join(strip, el("ul", *words, class_="phases"))


def runs_table(runs: Sequence[Run]) -> Html:
    """One line for each run: how it ended, and what it cost."""
    rows = []
    for place, run in enumerate(runs):
        score = final_score(run)
        steps = f"{int(run.steps[-1])}" if run.rows else "0"
        state = (
            run.condition or "" if run.result else f"{run.condition or ''} (not finished)".strip()
        )
        rows.append(
            [
                join(swatch(place), run.name),
                f"{score.word} {score.shown}" if score else "",
                state,
                steps,
                cost_line(run),
            ]
        )
    return table(["run", "ended at", "the watch", "steps", "cost"], rows, "The runs")


def differences(runs: Sequence[Run]) -> Html | None:
    """The settings in which runs differ."""
    flats = [flatten(run.config) for run in runs]
    keys = dict.fromkeys(key for flat in flats for key in flat)
    unlike = [key for key in keys if len({flat.get(key) for flat in flats}) > 1 and key != "out"]
    if not unlike:
        return None
    rows = [[key, *(flat.get(key, "") for flat in flats)] for key in unlike]
    return table(["setting", *(run.name for run in runs)], rows, "Where their settings differ")


def settings(run: Run) -> Html:
    """Config and environment, folded."""
    parts = [
        fold("Config", pairs(flatten(run.config), f"Config of {run.name}")),
        fold("Environment", pairs(flatten(run.environment), f"Environment of {run.name}")),
    ]
    return join(*parts)


def routing(run: Run) -> Html | None:
    """Which rule each parameter got, folded."""
    if not run.routing:
        return None
    head = ["parameter", "shape", "role", "rule", "view", "reason"]
    rows = [
        [
            str(row["name"]),
            "x".join(map(str, row["shape"])) or "scalar",
            *(str(row[key]) for key in head[2:]),
        ]
        for row in run.routing
    ]
    return fold("Routing", table(head, rows, "Who is trained by which rule"))


def fold(title: str, *children: str | None) -> Html:
    """A part that opens when it is asked for."""
    return el("details", el("summary", title), *children, class_="fold")


def pairs(values: dict[str, str], caption: str) -> Html:
    """Names and values as a table."""
    return table(["name", "value"], [[key, value] for key, value in values.items()], caption)


def flatten(values: Row, before: str = "") -> dict[str, str]:
    """Nested settings as dotted names and words.

    Example:
        >>> flatten({"optim": {"lr": 0.1, "name": "pion"}, "levels": [1, 2], "path": None})
        {'optim.lr': '0.1', 'optim.name': 'pion', 'levels': '1, 2', 'path': 'none'}
    """
    out: dict[str, str] = {}
    for key, value in values.items():
        name = f"{before}{key}"
        if isinstance(value, dict):
            out |= flatten(value, f"{name}.")
        else:
            out[name] = _spell(value)
    return out


def _spell(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, list):
        return ", ".join(_spell(item) for item in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _summary_cells(found: dict[str, Any]) -> list[str]:
    broken = ", ".join(f"step {step}" for step in found["broken"][:3])
    more = f" and {len(found['broken']) - 3} more" if len(found["broken"]) > 3 else ""
    if not found["count"]:
        return ["", "", "", "", broken + more]
    cells = [number(found["first"][0]), number(found["last"][0])]
    for key in ("low", "high"):
        value, step = found[key]
        cells.append(f"{number(value)} at step {step:g}")
    return [*cells, broken + more]


def _points_table(chart: Chart) -> Html:
    rows = []
    for line in chart.lines:
        xs = line.x or []
        places = sorted({round(k * (len(xs) - 1) / 7) for k in range(8)}) if xs else []
        rows += [[line.name, number(xs[k]), number(line.mean[k])] for k in places]
    return table(["line", chart.x_name or "x", "value"], rows, f"{chart.title} in numbers")


def _style(style: int) -> str:
    return f"line c{style % COLOURS} d{style % DASHES}"
