"""The HTML page: blocks of text, tables and charts, rendered by `page.html.j2` into one file.

The page needs nothing else and makes no request. A model can write anything (`</script>`, an event
handler, characters that reverse the text): Jinja escapes all of it, invisible characters are
spelled out as <U+202E>, and the content security policy allows no script but our own two.
"""

import base64
import gzip
import hashlib
import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from mesotron import __version__
from mesotron.answers.formats import FORMATS, MAX_TAIL, AnswerFormat
from mesotron.evaluate.transcripts import Transcript, describe_changes, pair_up, verdict
from mesotron.report import summary
from mesotron.report.data import Chart, Line, make_chapters, make_grids, make_rest, make_spectra
from mesotron.report.read import Run
from mesotron.runs.files import Row
from mesotron.watch.events import Action
from mesotron.watch.metrics import METRICS

Block = dict[str, Any]  # what the template renders: "kind" and the fields of that kind
Cell = str | dict[str, Any]

KINDS = {
    "train": "reinforcement learning",
    "sft": "supervised warm start",
    "snake": "PPO on Snake",
    "vla": "vision-language-action",
}
EVENT_NAMES = {
    "warn": "warning",
    "clear": "resolved",
    "rollback": "rolled back",
}
VERDICTS = {"right": "good", "right outside the format": "fair"}
# Controls, formats (text direction, zero width), surrogates, private use, separators.
INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
PAIRS = 8
SAMPLES = 6
PAIRS_OF_SEVERAL = 2
MOST_CHARACTERS = 2400
SMOOTHING = 0.7
MIN_SMOOTHED = 40  # of overlaid runs, if they have this many points


def render_runs(runs: Sequence[Run], live: float | None = None) -> str:
    """The HTML page of some runs; with `live`, it reloads itself after so many seconds."""
    if len(runs) == 1:
        run = runs[0]
        kind = f"mesotron report · {KINDS.get(run.kind, 'run')}"
        page = Page(
            run.name,
            kind,
            summary.summarize_run(run),
            [run.name],
            summary.figures_of(run),
        )

        page.add("Watch", *watch_blocks(run))
        add_charts(page, runs)
        page.add("Completions", *completion_blocks(run, PAIRS))
        page.add("Settings", *settings(run))
        return page.render(live)

    names = [run.name for run in runs]
    page = Page(f"{len(runs)} runs", "mesotron report", summary.summarize_runs(runs), names)
    page.add("Runs", runs_table(runs), differences(runs))
    add_charts(page, runs)
    written = [(run.name, completion_blocks(run, PAIRS_OF_SEVERAL)) for run in runs]
    page.add("Completions", *(fold(name, *blocks) for name, blocks in written if blocks))
    page.add("Settings", *(fold(run.name, *settings(run)) for run in runs))

    return page.render(live)


@dataclass
class Page:
    """A page under construction; lines of the `names` (runs or contenders) can be toggled."""

    title: str
    kind: str
    sentences: Sequence[str]
    names: Sequence[str] = ()
    figures: Sequence[summary.Figure] = ()
    runs: list[dict[str, Any]] = field(default_factory=list)  # x values and events, for the script
    charts: list[Chart] = field(default_factory=list)
    sections: list[tuple[str, list[Block]]] = field(default_factory=list)

    def add(self, title: str, *blocks: Block | None) -> None:
        if shown := [block for block in blocks if block]:
            self.sections.append((title, shown))

    def add_runs(self, runs: Sequence[Run], axes: Sequence[dict[str, Any]]) -> None:
        for run, x in zip(runs, axes, strict=True):
            events = map(describe_event, run.events)
            marks = [
                {
                    "step": e["step"],
                    "severity": e["kind"],
                    "text": e["text"],
                }
                for e in events
            ]

            self.runs.append(
                {
                    "name": run.name,
                    "x": x,
                    "marks": marks,
                }
            )

    def frames(self, charts: Sequence[Chart]) -> Block | None:
        start = len(self.charts)
        self.charts += charts
        shown = [
            {
                "number": start + k,
                "chart": chart,
                "table": numbers_table(chart),
                "trends": [trend(line) for line in chart.lines],
            }
            for k, chart in enumerate(charts)
        ]

        return {"kind": "charts", "charts": shown} if shown else None

    def render(self, live: float | None = None) -> str:
        longest = max((len(run["x"]["main"]["steps"]) for run in self.runs), default=0)
        smooth = SMOOTHING if len(self.runs) > 1 and longest >= MIN_SMOOTHED else 0.0
        data = {
            "runs": self.runs,
            "smooth": smooth,
            "shared": len(self.names) > 1,
            "charts": [chart.record() for chart in self.charts],
        }

        script = asset("page.js")
        style = asset("page.css")
        source, packed = plotly()
        allowed = f"script-src {fingerprint(script)} {fingerprint(source)}"

        # Plotly sets inline styles; without requests they can do no harm.
        policy = f"default-src 'none'; {allowed}; style-src 'unsafe-inline'; "
        policy += "base-uri 'none'; form-action 'none'"

        return template().render(
            page=self,
            live=live,
            version=__version__,
            policy=policy,
            style=Markup(style),
            script=Markup(script),
            plotly=Markup(packed),
            data=embed(data),
        )


@cache
def template() -> Any:
    options = {
        "finalize": visible,
        "trim_blocks": True,
        "lstrip_blocks": True,
    }
    return Environment(autoescape=True, **options).from_string(asset("page.html.j2"))


@cache
def asset(name: str) -> str:
    return (files("mesotron.report") / "assets" / name).read_text(encoding="utf-8")


@cache
def plotly() -> tuple[str, str]:
    """Plotly's script, and the same as base64 of gzip: 2 MB instead of 5."""
    source = (files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    return source.decode(), base64.b64encode(gzip.compress(source, 9, mtime=0)).decode()


def fingerprint(text: str) -> str:
    """The hash by which a content security policy names an inline script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def visible(value: Any) -> Any:
    r"""Text with invisible characters spelled out, except line breaks and tabs."""
    text = "" if value is None else str(value)
    if isinstance(value, Markup) or (text.isascii() and text.isprintable()):
        return "" if value is None else value

    return "".join(
        f"⟨U+{ord(c):04X}⟩" if unicodedata.category(c) in INVISIBLE and c not in "\n\t" else c
        for c in text
    )


def embed(value: Any) -> Markup:
    r"""JSON for a script element: no tag can end in it, fractions have four digits, no NaN."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {visible(str(key)): plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]

        if isinstance(value, float):
            if not math.isfinite(value):
                return None
            short = value if value.is_integer() else float(f"{value:.4g}")  # steps are exact
            return int(short) if short.is_integer() and abs(short) < 1e15 else short

        return visible(value) if isinstance(value, str) else value

    return htmlsafe_json_dumps(plain(value), separators=(",", ":"), allow_nan=False)


def text(words: str, css: str = "", bold: str = "") -> Block:
    return {
        "kind": "text",
        "text": words,
        "css": css,
        "bold": bold,
    }


def fold(title: str, *blocks: Block | None) -> Block:
    return {
        "kind": "fold",
        "title": title,
        "blocks": [block for block in blocks if block],
    }


def cell(words: str, **more: Any) -> Cell:
    """A table cell; `style` adds a swatch, `css` a class, `title` a tooltip, `interval` a plot."""
    return {"text": words, **more}


def table(
    head: Sequence[str], rows: Iterable[Sequence[Cell]], caption: str = "", css: str = ""
) -> Block:
    shown = [[cell(one) if isinstance(one, str) else one for one in row] for row in rows]
    return {
        "kind": "table",
        "head": head,
        "rows": shown,
        "caption": caption,
        "css": css,
    }


def pairs_table(values: Row, caption: str) -> Block:
    return table(["name", "value"], list(flatten(values).items()), caption)


def add_charts(page: Page, runs: Sequence[Run]) -> None:
    """The catalog's chapters, the spectra, and all other metrics folded."""
    grids = make_grids(runs)
    page.add_runs(runs, grids.record(runs))

    for question, charts in make_chapters(runs, grids).items():
        page.add(question, page.frames(charts))

    if len(runs) == 1 and (spectra := make_spectra(runs[0])):
        note = "Singular values of each block before and after the filter, relative to the largest."
        page.add("What does the filter do?", text(note), page.frames(spectra))

    if rest := make_rest(runs, grids):
        page.add("Other metrics", fold(f"{len(rest)} more", page.frames(rest)))


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def trend(line: Line) -> str:
    found = line.summary
    if not found.get("count"):
        return "no finite value" if found else ""

    broken = f"; {len(found['broken'])} not finite" if found["broken"] else ""
    if found["count"] == 1 or found["low"][0] == found["high"][0]:
        return f"{number(found['first'][0])} throughout{broken}"

    return f"{number(found['first'][0])} → {number(found['last'][0])}{broken}"


def numbers_table(chart: Chart) -> Block:
    """A chart as a table: for screen readers, and where no script runs."""
    caption = f"{chart.title} in numbers"
    rows = []
    if chart.x_name:
        for line in chart.lines:
            xs = line.x or []
            places = sorted({round(k * (len(xs) - 1) / 7) for k in range(8)}) if xs else []
            rows += [[line.name, number(xs[k]), number(line.mean[k])] for k in places]

        return table(["line", chart.x_name, "value"], rows, caption)

    for line in chart.lines:
        found = line.summary
        cells = ["", "", "", ""]
        if found["count"]:
            extremes = [f"{number(v)} at step {s:.10g}" for v, s in (found["low"], found["high"])]
            cells = [number(found["first"][0]), number(found["last"][0]), *extremes]

        broken = ", ".join(f"step {step}" for step in found["broken"][:3])
        more = f" and {len(found['broken']) - 3} more" if len(found["broken"]) > 3 else ""
        rows.append([line.name, *cells, broken + more])

    return table(["line", "first", "last", "minimum", "maximum", "not finite"], rows, caption)


def watch_blocks(run: Run) -> list[Block]:
    diagnosis = run.diagnosis
    blocks = []
    if diagnosis is not None:
        if len(run.rows) > 1:
            first = run.steps[0]
            length = max(run.steps[-1] - run.steps[0], 1)
            phases = [
                {
                    "condition": phase.condition,
                    "first": phase.first,
                    "last": phase.last,
                    "start": f"{100 * (phase.first - first) / length:.2f}",
                    "width": f"{max(100 * (phase.last - phase.first) / length, 0.5):.2f}",
                }
                for phase in diagnosis.phases
            ]

            blocks.append({"kind": "phases", "phases": phases})

        blocks.append(text(f"{diagnosis.text()}.", "story"))
        if diagnosis.cause:
            blocks.append(text(f"{diagnosis.diagnosis}.", bold="Cause: "))
            blocks.append(text(f"{diagnosis.remedy}.", bold="Remedy: "))

        if diagnosis.missing:
            names = ", ".join(METRICS[name].meaning for name in diagnosis.missing)
            missing = f"{len(diagnosis.blind)} checks lack a metric. To know more, log {names}."
            blocks.append(text(missing, "note"))

    if run.events:
        blocks.append({"kind": "events", "events": [*map(describe_event, run.events)]})

    return blocks


def describe_event(event: Row) -> dict[str, Any]:
    # warn, stop or clear by the watch; rollback or stop by the guard
    kind = str(event.get("severity") or event.get("action") or "note")
    name = str(event.get("detector") or event.get("kind") or "event").replace("_", " ")

    detail = "" if kind == "clear" else str(event.get("diagnosis") or "")
    if event.get("kind") == "guard":
        detail = Action.from_record(event).sentence()

    text = f"{EVENT_NAMES.get(kind, kind)}: {name}"
    return {
        "kind": kind,
        "step": event["step"],
        "text": text,
        "detail": detail,
    }


def runs_table(runs: Sequence[Run]) -> Block:
    rows = []
    for index, run in enumerate(runs):
        score = summary.final_score(run)
        condition = run.condition or ""
        state = condition if run.result else f"{condition} (unfinished)".strip()
        reached = f"{score.label} {score.text}" if score else ""
        cost = summary.cost_of(run)
        shown = cell(state, css="stop") if condition == "dead" else state
        rows.append([cell(run.name, style=index), reached, shown, str(run.last_step), cost])

    return table(["run", "result", "watch", "steps", "cost"], rows, "Runs")


def differences(runs: Sequence[Run]) -> Block | None:
    flats = [flatten(run.config) for run in runs]
    keys = dict.fromkeys(key for flat in flats for key in flat)
    unlike = [key for key in keys if len({flat.get(key) for flat in flats}) > 1 and key != "out"]
    rows = [[key, *(flat.get(key, "") for flat in flats)] for key in unlike]
    head = ["setting", *(run.name for run in runs)]

    return table(head, rows, "Settings that differ") if rows else None


def settings(run: Run) -> list[Block]:
    blocks = []
    if run.routing:
        head = ["parameter", "shape", "role", "rule", "view", "reason"]
        rows = [
            [
                str(row.get("name")),
                "x".join(map(str, row.get("shape") or ())) or "scalar",
                *(str(row.get(key, "")) for key in head[2:]),
            ]
            for row in run.routing
        ]

        blocks.append(fold("Routing", table(head, rows, "Update rule of each parameter")))

    for title, values in (("Config", run.config), ("Environment", run.environment)):
        blocks.append(fold(title, pairs_table(values, f"{title} of {run.name}")))

    return blocks


def flatten(values: Row, prefix: str = "") -> dict[str, str]:
    def spell(value: Any) -> str:
        if value is None or value == []:
            return "none"
        if isinstance(value, list):
            return ", ".join(spell(item) for item in value)
        if isinstance(value, bool):
            return "yes" if value else "no"

        return f"{value:g}" if isinstance(value, float) else str(value)

    out: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        out |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: spell(value)}

    return out


def completion_blocks(run: Run, count: int) -> list[Block]:
    task = run.config.get("task")
    name = task.get("format") if isinstance(task, dict) else None
    format = FORMATS[name] if name in FORMATS else FORMATS["boxed"]

    before, after = (
        [Transcript(**one) for one in result["transcripts"]] if result else []
        for result in (run.before, run.after)
    )

    blocks: list[Block] = []
    if pairs := pair_up(before, after, count):
        changes = f"{describe_changes(before, after)}. Below, {len(pairs)} in these proportions."
        graded = before[0].gold is not None and before[0].reward is None
        blocks.append(text(changes if graded else "The largest changes of the reward first."))

        blocks += [
            {
                "kind": "pair",
                "title": pair.change,
                "question": pair.before.question,
                "gold": pair.before.gold,
                "columns": [
                    _transcript("before", pair.before, format),
                    _transcript("after", pair.after, format),
                ],
            }
            for pair in pairs
        ]
    elif before:
        columns = [_transcript("before", one, format) for one in before[:count]]
        blocks.append(
            {
                "kind": "pair",
                "title": "Before training, greedy",
                "columns": columns,
            }
        )

    samples = [row for row in run.samples if isinstance(row.get("completion"), str)]
    shown = min(count, SAMPLES)
    if len(samples) > shown:  # evenly spaced, from the first to the last
        places = [round(k * (len(samples) - 1) / max(shown - 1, 1)) for k in range(shown)]
        samples = [samples[place] for place in places]

    if samples:
        columns = []
        for row in samples:
            reward = row.get("reward")
            label = f"step {row.get('step', '?')}"
            label += f", reward {reward:.3g}" if isinstance(reward, int | float) else ""
            prompt = _cut(str(row.get("prompt", "")), 600)
            words = row["completion"]

            columns.append(
                {
                    "label": label,
                    "prompt": prompt,
                    "text": highlight(words, format),
                }
            )

        blocks.append(
            {
                "kind": "pair",
                "title": "During training",
                "columns": columns,
            }
        )

    return blocks


def highlight(text: str, format: AnswerFormat, complete: bool = True) -> tuple[str, str, str]:
    r"""A completion as (head, answer, tail), cut in the middle if it is long."""
    skipped = max(len(text) - MAX_TAIL, 0)
    if (found := format.find(text[skipped:], complete)) is None:
        return _cut(text), "", ""

    start = text.index(found[1], skipped + found[0])
    end = start + len(found[1])

    return _cut(text[:start]), text[start:end], _cut(text[end:])


def _transcript(when: str, one: Transcript, format: AnswerFormat) -> dict[str, Any]:
    shown = highlight(one.completion, format, not one.truncated)
    word = verdict(one)

    return {
        "label": when,
        "verdict": word,
        "css": VERDICTS.get(word, "bad"),
        "text": shown,
    }


def _cut(text: str, most: int = MOST_CHARACTERS) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[ {len(text) - 2 * half:,} characters ]\n{text[-half:]}"
