"""The page of one run or several: verdict, charts, completions and settings."""

from collections.abc import Sequence
from typing import Any

from mesotron.answers.formats import FORMATS, MAX_TAIL, AnswerFormat
from mesotron.evaluate.transcripts import (
    Transcript,
    describe_changes,
    pair_up,
    verdict,
)
from mesotron.report import pocket, summary
from mesotron.report.data import CATALOG, Chart, make_chapters, make_grids, make_rest, make_spectra
from mesotron.report.page import (
    Block,
    Page,
    cell,
    describe_event,
    flatten,
    fold,
    pairs_table,
    table,
    text,
    trend,
)
from mesotron.report.read import Run
from mesotron.runs.files import Row
from mesotron.watch.diagnosis import Diagnosis
from mesotron.watch.metrics import METRICS

KINDS = {
    "train": "reinforcement learning",
    "sft": "supervised warm start",
    "snake": "PPO on Snake",
    "vla": "vision-language-action",
}
VERDICTS = {"right": "good", "right outside the format": "fair"}
PAIRS = 8
SAMPLES = 6
LATEST = 4
PAIRS_OF_SEVERAL = 2
MOST_CHARACTERS = 2400


def render_runs(runs: Sequence[Run], live: float | None = None) -> str:
    """The HTML page of some runs; with `live`, it reloads itself after so many seconds."""
    if len(runs) == 1:
        page = make_page(runs[0], is_live=live is not None)
    else:
        page = make_page_of_several(runs)

    return page.render(live)


def make_page(run: Run, is_live: bool = False) -> Page:
    page = Page(
        title=run.name,
        kind=f"mesotron report · {KINDS.get(run.kind, 'run')}",
        sentences=summary.summarize_run(run),
        names=[run.name],
        figures=summary.figures_of(run),
    )

    latest = latest_block(run) if is_live else None
    add_charts(page, [run], watch_blocks(run), latest)
    searches = pocket.searches_of(run)
    if searches:
        charts = pocket.make_charts(searches)
        page.add("Which rate?", page.frames(charts), pocket.forks_table(searches))

    page.add("Completions", *completion_blocks(run, PAIRS))
    page.add("Settings", *settings(run))

    return page


def make_page_of_several(runs: Sequence[Run]) -> Page:
    page = Page(
        title=f"{len(runs)} runs",
        kind="mesotron report",
        sentences=summary.summarize_runs(runs),
        names=[run.name for run in runs],
    )

    page.add("Runs", runs_table(runs))
    add_charts(page, runs)

    written = []
    for run in runs:
        blocks = completion_blocks(run, PAIRS_OF_SEVERAL)
        if blocks:
            written.append(fold(run.name, *blocks))

    page.add("Completions", *written)
    page.add("Settings", differences(runs), *(fold(run.name, *settings(run)) for run in runs))

    return page


def add_charts(
    page: Page, runs: Sequence[Run], watch: Sequence[Block] = (), latest: Block | None = None
) -> None:
    """The reward and its kin, the watch, the catalog's other chapters, the rest folded."""
    grids = make_grids(runs)
    page.add_runs(runs, grids.record(runs))

    first = next(iter(CATALOG))
    chapters = make_chapters(runs, grids)

    page.add(first, page.frames(chapters.pop(first, [])))
    page.add("Watch", *watch)
    page.add("Latest completions", latest)
    for question, charts in chapters.items():
        page.add(question, *chapter_blocks(page, charts))

    spectra = make_spectra(runs[0]) if len(runs) == 1 else []
    if spectra:
        note = "Singular values of each block before and after the filter, relative to the largest."
        filters = fold(f"{len(spectra)} blocks", text(note), page.frames(spectra))
        page.add("What does the filter do?", filters)

    rest = make_rest(runs, grids)
    if rest:
        page.add("Other metrics", fold(f"{len(rest)} more", page.frames(rest)))


def chapter_blocks(page: Page, charts: Sequence[Chart]) -> list[Block | None]:
    """Charts that move in view; flat and internal ones folded under their names."""
    shown = []
    folded = []
    for chart in charts:
        if chart.internal or chart.is_flat:
            folded.append(chart)
        else:
            shown.append(chart)

    blocks = [page.frames(shown)]
    if folded:
        blocks.append(fold(", ".join(map(title_with_value, folded)), page.frames(folded)))

    return blocks


def title_with_value(chart: Chart) -> str:
    if len(chart.lines) == 1 and chart.is_flat:
        return f"{chart.title} ({trend(chart.lines[0])})"

    return chart.title


# The watch


def watch_blocks(run: Run) -> list[Block]:
    blocks = []
    if run.diagnosis is not None:
        if len(run.rows) > 1:
            blocks.append(phases_block(run, run.diagnosis))
        blocks += diagnosis_blocks(run.diagnosis)

    blocks += [text(forecast) for forecast in run.forecasts]
    if run.events:
        blocks.append({"kind": "events", "events": list(map(describe_event, run.events))})

    return blocks


def phases_block(run: Run, diagnosis: Diagnosis) -> Block:
    """The conditions of a run, one after another, as a bar."""
    first = run.steps[0]
    length = max(run.steps[-1] - first, 1)

    phases = []
    for phase in diagnosis.phases:
        start = 100 * (phase.first - first) / length
        width = max(100 * (phase.last - phase.first) / length, 0.5)
        phases.append(
            {
                "condition": phase.condition,
                "first": phase.first,
                "last": phase.last,
                "start": f"{start:.2f}",
                "width": f"{width:.2f}",
            }
        )

    return {"kind": "phases", "phases": phases}


def diagnosis_blocks(diagnosis: Diagnosis) -> list[Block]:
    blocks = [text(f"{diagnosis.text()}.", "story")]
    if diagnosis.cause:
        blocks.append(text(f"{diagnosis.diagnosis}.", bold="Cause: "))
        blocks.append(text(f"{diagnosis.remedy}.", bold="Remedy: "))

    if diagnosis.missing:
        names = ", ".join(METRICS[name].meaning for name in diagnosis.missing)
        missing = f"{len(diagnosis.blind)} checks lack a metric. To know more, log {names}."
        blocks.append(text(missing, "note"))

    return blocks


# Tables of runs and settings


def runs_table(runs: Sequence[Run]) -> Block:
    rows = []
    for index, run in enumerate(runs):
        score = summary.final_score(run)
        reached = f"{score.label} {score.text}" if score else ""

        state = summary.verdict_of(run)
        if not run.result:
            state = f"{state} (unfinished)".strip()

        shown = cell(state, css="stop") if run.condition == "dead" else state
        best = f"{run.best.value:.3g} at step {run.best.step}" if run.best else ""

        name = cell(run.name, style=index)
        rows.append([name, reached, best, shown, str(run.last_step), summary.cost_of(run)])

    return table(["run", "result", "best evaluation", "watch", "steps", "cost"], rows, "Runs")


def differences(runs: Sequence[Run]) -> Block | None:
    flats = [flatten(run.config) for run in runs]
    names = dict.fromkeys(name for flat in flats for name in flat)

    rows = []
    for name in names:
        values = [flat.get(name, "none") for flat in flats]
        if len(set(values)) > 1 and name != "out":
            rows.append([name, *values])

    if not rows:
        return None

    head = ["setting", *(run.name for run in runs)]
    return table(head, rows, "Settings that differ")


def settings(run: Run) -> list[Block]:
    blocks = []
    if run.routing:
        blocks.append(fold("Routing", routing_table(run.routing)))

    for title, values in (("Config", run.config), ("Environment", run.environment)):
        blocks.append(fold(title, pairs_table(values, f"{title} of {run.name}")))

    return blocks


def routing_table(routing: Sequence[Row]) -> Block:
    head = ["parameter", "shape", "role", "rule", "view", "reason"]
    rows = []
    for row in routing:
        shape = "x".join(map(str, row.get("shape") or ())) or "scalar"
        more = [str(row.get(key, "")) for key in head[2:]]
        rows.append([str(row.get("name")), shape, *more])

    return table(head, rows, "Update rule of each parameter")


# Completions


def completion_blocks(run: Run, count: int) -> list[Block]:
    """Pairs of completions before and after training, and samples in between."""
    format = format_of(run)
    before = transcripts_of(run.before)
    after = transcripts_of(run.after)

    blocks: list[Block] = []
    pairs = pair_up(before, after, count)
    if pairs:
        changes = f"{describe_changes(before, after)}. Below, {len(pairs)} in these proportions."
        is_graded = before[0].gold is not None and before[0].reward is None
        blocks.append(text(changes if is_graded else "The largest changes of the reward first."))

        for pair in pairs:
            columns = [
                transcript_column("before", pair.before, format),
                transcript_column("after", pair.after, format),
            ]
            blocks.append(
                {
                    "kind": "pair",
                    "title": pair.change,
                    "question": pair.before.question,
                    "gold": pair.before.gold,
                    "columns": columns,
                }
            )
    elif before:
        columns = [transcript_column("before", one, format) for one in before[:count]]
        blocks.append({"kind": "pair", "title": "Before training, greedy", "columns": columns})

    samples = [row for row in run.samples if isinstance(row.get("completion"), str)]
    shown = evenly_spaced(samples, min(count, SAMPLES))
    if shown:
        columns = [sample_column(row, format) for row in shown]
        blocks.append({"kind": "pair", "title": "During training", "columns": columns})

    return blocks


def latest_block(run: Run) -> Block | None:
    """The last samples of a run that goes on, the newest first."""
    samples = [row for row in run.samples if isinstance(row.get("completion"), str)]
    columns = [sample_column(row, format_of(run)) for row in reversed(samples[-LATEST:])]
    if not columns:
        return None

    return {"kind": "pair", "title": "The newest first", "columns": columns}


def format_of(run: Run) -> AnswerFormat:
    task = run.config.get("task")
    name = task.get("format") if isinstance(task, dict) else None

    if name in FORMATS:
        return FORMATS[name]

    return FORMATS["boxed"]


def transcripts_of(evaluation: Row | None) -> list[Transcript]:
    if not evaluation:
        return []

    return [Transcript(**one) for one in evaluation["transcripts"]]


def evenly_spaced(rows: Sequence[Row], count: int) -> Sequence[Row]:
    """So many of the rows, from the first to the last."""
    if len(rows) <= count:
        return rows

    last = len(rows) - 1
    places = [round(k * last / max(count - 1, 1)) for k in range(count)]

    return [rows[place] for place in places]


def transcript_column(when: str, one: Transcript, format: AnswerFormat) -> dict[str, Any]:
    word = verdict(one)
    return {
        "label": when,
        "verdict": word,
        "css": VERDICTS.get(word, "bad"),
        "text": highlight(one.completion, format, not one.truncated),
    }


def sample_column(row: Row, format: AnswerFormat) -> dict[str, Any]:
    label = f"step {row.get('step', '?')}"
    reward = row.get("reward")
    if isinstance(reward, int | float):
        label += f", reward {reward:.3g}"

    return {
        "label": label,
        "prompt": cut(str(row.get("prompt", "")), 600),
        "text": highlight(row["completion"], format),
    }


def highlight(text: str, format: AnswerFormat, complete: bool = True) -> tuple[str, str, str]:
    r"""A completion as (head, answer, tail), cut in the middle if it is long."""
    skipped = max(len(text) - MAX_TAIL, 0)
    place = format.find(text[skipped:], complete)
    if place is None:
        return cut(text), "", ""

    begin, answer = place
    start = text.index(answer, skipped + begin)
    end = start + len(answer)

    return cut(text[:start]), text[start:end], cut(text[end:])


def cut(text: str, most: int = MOST_CHARACTERS) -> str:
    if len(text) <= most:
        return text

    half = most // 2
    return f"{text[:half]}\n[ {len(text) - 2 * half:,} characters ]\n{text[-half:]}"
