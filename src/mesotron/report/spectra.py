"""Charts of spectra.jsonl: the singular values of chosen blocks before and after the filter."""

from __future__ import annotations

from mesotron.report.charts import Chart, Line
from mesotron.report.read import Run
from mesotron.runs.files import Row


def spectra_charts(run: Run) -> list[Chart]:
    """One chart a block, with its first and its last measurement; none if the run has none."""
    blocks: dict[str, list[Row]] = {}
    for row in run.spectra:
        blocks.setdefault(str(row["block"]), []).append(row)
    return [_draw_block(name, rows) for name, rows in blocks.items()]


def _draw_block(name: str, rows: list[Row]) -> Chart:
    lines = []
    moments = [rows[-1]] if len(rows) == 1 else [rows[-1], rows[0]]
    for place, row in enumerate(moments):
        for which, key in enumerate(("before", "after")):
            word = f"{key} the filter, step {row['step']}"
            style = which if place == 0 else which + 2
            lines.append(Line(0, word, style, row[key], x=row["rank"]))
    size = "x".join(str(side) for side in rows[-1]["shape"])
    return Chart(
        name.removesuffix(".weight"), lines, f"{rows[-1]['rule']}, block of {size}", x_name="rank"
    )
