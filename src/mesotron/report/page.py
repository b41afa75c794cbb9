"""The frame of an HTML page: blocks of text, tables and charts in one file.

`page.html.j2` renders it. The page needs nothing else and makes no request. A model can write
anything (`</script>`, an event handler, characters that reverse the text): Jinja escapes all of it,
invisible characters are spelled out as <U+202E>, and the content security policy allows no script
and no style but our own.
"""

import base64
import hashlib
import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, Template
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from mesotron import __version__
from mesotron.report.data import Chart, Line
from mesotron.report.read import Run
from mesotron.report.summary import Figure
from mesotron.runs.files import Row
from mesotron.watch.detectors import Action

Block = dict[str, Any]  # what the template renders: "kind" and the fields of that kind
Cell = str | dict[str, Any]

EVENT_NAMES = {"warn": "warning", "clear": "resolved", "rollback": "rolled back"}
# Controls, formats (text direction, zero width), surrogates, private use, separators.
INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
SMOOTHING = 0.7
MIN_SMOOTHED = 40  # of overlaid runs, if they have this many points
TABLE_POINTS = 8  # of a line with its own x axis, in the table of its numbers


@dataclass
class Page:
    """A page under construction; lines of the `names` (runs or contenders) can be toggled."""

    title: str
    kind: str
    sentences: Sequence[str]
    names: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    runs: list[dict[str, Any]] = field(default_factory=list)  # x values and events, for the script
    charts: list[Chart] = field(default_factory=list)
    sections: list[tuple[str, list[Block]]] = field(default_factory=list)

    def add(self, title: str, *blocks: Block | None) -> None:
        """Add a section, unless all of its blocks are empty."""
        shown = [block for block in blocks if block]
        if shown:
            self.sections.append((title, shown))

    def add_runs(self, runs: Sequence[Run], axes: Sequence[dict[str, Any]]) -> None:
        for run, x in zip(runs, axes, strict=True):
            marks = []
            for event in map(describe_event, run.events):
                mark = {"step": event["step"], "severity": event["kind"], "text": event["text"]}
                marks.append(mark)

            if run.best is not None:
                words = f"best {run.best.measure}: {number(run.best.value)}"
                marks.append({"step": run.best.step, "severity": "best", "text": words})

            self.runs.append({"name": run.name, "x": x, "marks": marks})

    def frames(self, charts: Sequence[Chart]) -> Block | None:
        """A block in which the script draws the charts."""
        shown = []
        for number, chart in enumerate(charts, len(self.charts)):
            frame = {
                "number": number,
                "chart": chart,
                "table": numbers_table(chart),
                "trends": [trend(line) for line in chart.lines],
            }
            shown.append(frame)

        self.charts += charts
        if shown:
            return {"kind": "charts", "charts": shown}

        return None

    def render(self, live: float | None = None) -> str:
        longest = max((len(run["x"]["main"]["steps"]) for run in self.runs), default=0)
        is_smoothed = len(self.runs) > 1 and longest >= MIN_SMOOTHED
        data = {
            "runs": self.runs,
            "smooth": SMOOTHING if is_smoothed else 0.0,
            "shared": len(self.names) > 1,
            "charts": [chart.record() for chart in self.charts],
        }

        script = asset("chart.js") + asset("page.js")
        style = asset("page.css")
        policy = f"default-src 'none'; script-src {fingerprint(script)}; "
        policy += f"style-src {fingerprint(style)}; base-uri 'none'; form-action 'none'"

        return template().render(
            page=self,
            live=live,
            version=__version__,
            policy=policy,
            style=Markup(style),
            script=Markup(script),
            data=embed(data),
        )


@cache
def template() -> Template:
    environment = Environment(
        autoescape=True, finalize=visible, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(asset("page.html.j2"))


@cache
def asset(name: str) -> str:
    return (files("mesotron.report") / "assets" / name).read_text(encoding="utf-8")


def fingerprint(text: str) -> str:
    """The hash by which a content security policy names an inline script."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


# Escaping


def visible(value: Any) -> Any:
    r"""Text with invisible characters spelled out, except line breaks and tabs."""
    if value is None:
        return ""

    text = str(value)
    if isinstance(value, Markup) or (text.isascii() and text.isprintable()):
        return value

    return "".join(map(visible_character, text))


def visible_character(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in INVISIBLE:
        return character

    return f"⟨U+{ord(character):04X}⟩"


def embed(value: Any) -> Markup:
    r"""JSON for a script element: no tag can end in it, fractions have four digits, no NaN."""
    return htmlsafe_json_dumps(plain(value), separators=(",", ":"), allow_nan=False)


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {visible(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return short_number(value)
    if isinstance(value, str):
        return visible(value)

    return value


def short_number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None

    short = value if value.is_integer() else float(f"{value:.4g}")  # steps are exact
    if short.is_integer() and abs(short) < 1e15:
        return int(short)

    return short


# Blocks


def text(words: str, css: str = "", bold: str = "") -> Block:
    return {"kind": "text", "text": words, "css": css, "bold": bold}


def fold(title: str, *blocks: Block | None) -> Block:
    return {"kind": "fold", "title": title, "blocks": [block for block in blocks if block]}


def cell(words: str, **more: Any) -> Cell:
    """A table cell; `style` adds a swatch, `css` a class, `title` a tooltip, `interval` a plot."""
    return {"text": words, **more}


def table(
    head: Sequence[str], rows: Iterable[Sequence[Cell]], caption: str = "", css: str = ""
) -> Block:
    shown = []
    for row in rows:
        shown.append([cell(one) if isinstance(one, str) else one for one in row])

    return {"kind": "table", "head": head, "rows": shown, "caption": caption, "css": css}


def pairs_table(values: Row, caption: str) -> Block:
    return table(["name", "value"], list(flatten(values).items()), caption)


def flatten(values: Row, prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted names and texts."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = spell(value)

    return flat


def spell(value: Any) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, list):
        return ", ".join(map(spell, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"

    return str(value)


def describe_event(event: Row) -> dict[str, Any]:
    """An event of the watch (warn, stop or clear) or of the guard (rollback or stop) in words."""
    kind = str(event.get("severity") or event.get("action") or "note")
    name = str(event.get("detector") or event.get("kind") or "event").replace("_", " ")

    detail = "" if kind == "clear" else str(event.get("diagnosis") or "")
    if event.get("kind") == "guard":
        detail = Action.from_record(event).sentence()

    return {
        "kind": kind,
        "step": event["step"],
        "text": f"{EVENT_NAMES.get(kind, kind)}: {name}",
        "detail": detail,
    }


# Charts in numbers


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def trend(line: Line) -> str:
    """First and last value of a line."""
    summary = line.summary
    if not summary.get("count"):
        return "no finite value" if summary else ""

    if summary["broken"]:
        broken = f"; {len(summary['broken'])} not finite"
    else:
        broken = ""

    first, _ = summary["first"]
    last, _ = summary["last"]
    is_constant = summary["low"][0] == summary["high"][0]
    if summary["count"] == 1 or is_constant:
        return f"{number(first)} throughout{broken}"

    return f"{number(first)} → {number(last)}{broken}"


def numbers_table(chart: Chart) -> Block:
    """A chart as a table: for screen readers, and where no script runs."""
    caption = f"{chart.title} in numbers"
    if chart.x_name:
        rows = [row for line in chart.lines for row in points_of(line)]
        return table(["line", chart.x_name, "value"], rows, caption)

    rows = [extremes_of(line) for line in chart.lines]
    return table(["line", "first", "last", "minimum", "maximum", "not finite"], rows, caption)


def points_of(line: Line) -> list[list[str]]:
    """Some points of a line with its own x axis, evenly spaced."""
    if not line.x:
        return []

    last = len(line.x) - 1
    places = sorted({round(k * last / (TABLE_POINTS - 1)) for k in range(TABLE_POINTS)})

    return [[line.name, number(line.x[place]), number(line.mean[place])] for place in places]


def extremes_of(line: Line) -> list[str]:
    summary = line.summary
    cells = ["", "", "", ""]
    if summary["count"]:
        first, _ = summary["first"]
        last, _ = summary["last"]
        extremes = [f"{number(x)} at step {s:.10g}" for x, s in (summary["low"], summary["high"])]
        cells = [number(first), number(last), *extremes]

    broken = ", ".join(f"step {step}" for step in summary["broken"][:3])
    if len(summary["broken"]) > 3:
        broken += f" and {len(summary['broken']) - 3} more"

    return [line.name, *cells, broken]
