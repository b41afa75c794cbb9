"""What the study's finished runs say, by the tests of PROTOCOL.md."""

from __future__ import annotations

import math
from statistics import fmean, stdev
from typing import Any

from benchmarks._lib.rows import distinct, table, where
from benchmarks.gsm8k.plan import PARTS
from mesotron.evaluate.scores import bootstrap

Cell = dict[str, Any]


def show(cells: list[Cell]) -> str:
    """The tables of all parts in Markdown."""
    parts = []
    for part in PARTS:
        rows = where(cells, part=part)
        if rows:
            parts.append(f"## {part}\n\n{runs_table(rows)}\n{pairs_table(rows)}")

    return "\n".join(parts)


def runs_table(cells: list[Cell]) -> str:
    head = ["arm", "rate", "seed", "strict before", "after", "gain", "lenient", "cut", "tokens"]
    head += ["pass@8 before, after", "steps", "minutes"]
    rows = []
    for cell in sorted(cells, key=lambda one: (one["arm"], one["rate"], one["seed"])):
        row = [cell["arm"], f"{cell['rate']:g}", str(cell["seed"]), *scores(cell)]
        rows.append([*row, passes(cell), str(cell["steps"]), f"{cell['seconds'] / 60:.1f}"])

    return table(head, rows)


def scores(cell: Cell) -> list[str]:
    before = cell.get("before")
    after = cell.get("after")
    if before is None or after is None:
        return ["", "not finished", "", "", "", ""]

    return [
        f"{before['strict']:.3f}",
        f"{after['strict']:.3f}",
        str(gain(cell)),
        f"{before['lenient']:.3f} to {after['lenient']:.3f}",
        f"{before['truncated']:.2f} to {after['truncated']:.2f}",
        f"{before['tokens']:.0f} to {after['tokens']:.0f}",
    ]


def gain(cell: Cell) -> Any:
    """After minus before, paired by problem, with a 95% interval."""
    return bootstrap(differences(cell["before"]["solved"], cell["after"]["solved"]), signed=True)


def differences(before: str, after: str) -> list[float]:
    return [float(int(b) - int(a)) for a, b in zip(before, after, strict=True)]


def passes(cell: Cell) -> str:
    """pass@8 at temperature 1."""
    values = []
    for result in cell.get("sampled") or []:
        score = result["sampled"]["pass_at"].get("8")
        values.append("?" if score is None else f"{score['value']:.3f}")

    return ", ".join(values)


def pairs_table(cells: list[Cell]) -> str:
    """Differences of arms in the greedy score after training, over the seeds that both have."""
    arms = distinct(cells, "arm")
    rows = []
    for k, first in enumerate(arms):
        for second in arms[k + 1 :]:
            D = paired(where(cells, arm=first), where(cells, arm=second))
            if len(D) > 1:
                rows.append([first, second, student(D), str(len(D))])

    return table(["arm", "minus", "difference", "seeds"], rows)


def paired(first: list[Cell], second: list[Cell]) -> list[float]:
    other = {cell["seed"]: cell["accuracy"] for cell in second}
    return [cell["accuracy"] - other[cell["seed"]] for cell in first if cell["seed"] in other]


def student(D: list[float]) -> str:
    """Mean and Student's 95% interval."""
    from scipy.stats import t

    half = float(t.ppf(0.975, len(D) - 1)) * stdev(D) / math.sqrt(len(D))
    return f"{fmean(D):+.3f} ± {half:.3f}"
