"""The page of a tournament: who won and by how much, over which rates, how fast, and what failed.

Reads tournament.json and the run folders of its cells; what the words in it mean stands with
whoever writes it. Nothing is computed here but means over seeds, to draw them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from mesotron.report.catalogue import CHAPTERS
from mesotron.report.charts import make_chapters, make_grids
from mesotron.report.markup import Html, el
from mesotron.report.page import Draft
from mesotron.report.read import Run, read_run
from mesotron.report.runs_page import run_record
from mesotron.report.sections import figures, flatten, fold, pairs, table
from mesotron.report.standings import (
    ENDED_BADLY,
    failures,
    final_cells,
    ranking,
    rate_chart,
    rate_map,
    rate_note,
    show,
    speed,
)
from mesotron.report.words import Figure
from mesotron.runs.console import spell_time
from mesotron.runs.files import Row

RECORD = "tournament.json"
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
    """Whether no cell is waiting or running, and it is concluded, be it without a score."""
    record = read_record(folder)
    is_open = any(cell["state"] in ("waiting", "running") for cell in record["cells"])
    return bool(record["standings"] or record["words"]) and not is_open


def progress(record: Row) -> list[str]:
    """A sentence while cells are open."""
    states = [cell["state"] for cell in record["cells"]]
    left = sum(state in ("waiting", "running") for state in states)
    return [f"{len(states) - left} of {len(states)} cells are over."] if left else []


def top_figures(record: Row) -> list[Figure]:
    """Who leads, and how much was run."""
    found, cells = [], record["cells"]
    best = record["standings"][0] if record["standings"] else None
    if best is not None and best["score"] == 0:
        found.append(Figure("first", "nobody", f"all have 0: {record['measure']}"))
    elif best is not None and best["score"] is not None:
        spread = f"95 % interval {show(best['low'])} to {show(best['high'])}"
        found.append(Figure("first", best["contender"], record["measure"]))
        found.append(Figure("its score", show(best["score"]), spread))
    bad = sum(cell["verdict"] in ENDED_BADLY for cell in cells)
    failed = sum(cell["state"] == "failed" for cell in cells)
    found.append(Figure("cells", str(len(cells)), f"{bad} dead or diverged, {failed} failed"))
    seconds = sum(cell["wall"] or cell["seconds"] or 0.0 for cell in cells)
    return [*found, Figure("time of all cells", spell_time(seconds), "one after the other")]


def curves(draft: Draft, folder: Path, record: Row, names: Sequence[str]) -> list[Html]:
    """The final cells' curves, seed by seed, in their contender's colour; before, the search's."""
    cells = [cell for cell in final_cells(record) if cell["run"]]
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
