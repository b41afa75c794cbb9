"""The page of one run, or of several over one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mesotron.report.charts import make_chapters, make_grids, make_rest
from mesotron.report.markup import el, join
from mesotron.report.page import Draft
from mesotron.report.read import Run
from mesotron.report.sections import (
    differences,
    event_text,
    figures,
    fold,
    kind_of,
    routing,
    runs_table,
    settings,
    watch_parts,
)
from mesotron.report.spectra import spectra_charts
from mesotron.report.transcripts import transcript_parts
from mesotron.report.words import figures_of, tell_run, tell_runs

KINDS = {
    "train": "reinforcement learning",
    "sft": "warm start",
    "snake": "PPO on Snake",
    "vla": "vision, language, action",
}
PAIRS_EACH = 2  # problems shown of each run, of several


def render_runs(runs: Sequence[Run], live: float | None = None) -> str:
    """The page of one or several runs.

    Args:
        runs: at least one, read.
        live: seconds after which the page loads itself again.

    Returns:
        The text of the HTML file.
    """
    if len(runs) == 1:
        return render_run(runs[0], live)
    names = [run.name for run in runs]
    draft = Draft(f"{len(runs)} runs", "mesotron report", tell_runs(runs), names=names)
    draft.add("The runs", runs_table(runs), differences(runs))
    draw(draft, runs)
    written = [(run, transcript_parts(run, PAIRS_EACH)) for run in runs]
    draft.add("What they wrote", *(fold(run.name, *parts) for run, parts in written if parts))
    draft.add("Settings", *(fold(run.name, routing(run), settings(run)) for run in runs))
    return draft.render(join(), live)


def render_run(run: Run, live: float | None = None) -> str:
    """The page of one run."""
    kind = f"mesotron report · {KINDS.get(run.kind, 'run')}"
    draft = Draft(run.name, kind, tell_run(run), names=[run.name])
    draft.add("The watch", *watch_parts(run))
    draw(draft, [run])
    draft.add("What it wrote", *transcript_parts(run))
    draft.add("Settings", routing(run), settings(run))
    return draft.render(figures(figures_of(run)), live)


def draw(draft: Draft, runs: Sequence[Run]) -> None:
    """Add the charts of runs: the catalogue's chapters, the spectra, and the rest folded."""
    grids = make_grids(runs)
    axes = grids.record(runs)
    draft.runs = [run_record(run, x) for run, x in zip(runs, axes, strict=True)]
    for question, charts in make_chapters(runs, grids):
        draft.add(question, draft.frames(charts))
    if len(runs) == 1:
        spectra = spectra_charts(runs[0])
        if spectra:
            note = (
                "Singular values of what the filter got and of what it gave, block by block, over "
                "their rank; the largest one before the filter is 1."
            )
            draft.add("What does the filter do?", el("p", note), draft.frames(spectra))
    rest = make_rest(runs, grids)
    if rest:
        draft.add("Other metrics", fold(f"{len(rest)} more", draft.frames(rest)))


def run_record(run: Run, axes: dict[str, Any]) -> dict[str, Any]:
    """A run as the script reads it: its x and the marks of its events."""
    marks = [
        {
            "step": event["step"],
            "severity": kind_of(event),
            "text": event_text(event),
        }
        for event in run.events
    ]
    return {"name": run.name, "x": axes, "marks": marks}
