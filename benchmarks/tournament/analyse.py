"""The tournament's tables and figure from its cells, by the rules of PROTOCOL.md.

    python -m benchmarks.tournament.analyse OUT/cells ... --out benchmarks/tournament

Writes cells.json.gz, tables.md and figure.png. Arrays are [tasks, seeds] of final accuracy; only
seeds that are complete for all contenders and tasks count.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks._lib.pictures import save_picture
from benchmarks._lib.results import write_json
from benchmarks._lib.rows import listed, spelled, table, where
from benchmarks.tournament.__main__ import read_cells
from benchmarks.tournament.plan import (
    CONTENDERS,
    REPORTING_SEEDS,
    Cell,
    Done,
    highest_stable,
    scores_of,
    search_of,
    stable_at,
)
from benchmarks.tournament.tasks import TASKS
from mesotron.compare.stats import holm

RESAMPLES = 10_000
LEVEL = 0.05
LEAD = 0.02
AHEAD = 3

Runs = dict[tuple[str, int], Cell]  # by task and seed


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A contender against one that is not ahead of it."""

    first: str
    second: str
    lead: float
    low: float
    high: float
    p: float  # corrected
    ahead: int  # tasks on which the first is ahead
    random_low: float  # with tasks as random effects
    random_high: float

    @property
    def wins(self) -> bool:
        return self.p < LEVEL and self.lead >= LEAD and self.ahead >= AHEAD


def reported(done: Done) -> dict[str, Runs]:
    """The reporting runs of each contender, of the seeds that everything has."""
    found: dict[str, Runs] = {name: {} for name in CONTENDERS}
    for cell in where(done.values(), use="reporting"):
        found[cell["contender"]][cell["task"], cell["seed"]] = cell

    whole = [seed for seed in REPORTING_SEEDS if is_whole(found, seed)]
    for runs in found.values():
        for place in list(runs):
            if place[1] not in whole:
                del runs[place]
    return found


def is_whole(found: dict[str, Runs], seed: int) -> bool:
    """Whether every contender has every task with a seed."""
    return all((task, seed) in runs for runs in found.values() for task in TASKS)


def grid(runs: Runs, measure: str) -> np.ndarray:
    """[tasks, seeds]."""
    seeds = sorted({seed for _, seed in runs})
    return np.array([[float(runs[task, seed][measure]) for seed in seeds] for task in TASKS])


def compare(X: dict[str, np.ndarray]) -> list[Comparison]:
    """All pairs, the better one first; p values are corrected by Holm."""
    pairs = []
    for one, other in combinations(X, 2):
        if X[one].mean() >= X[other].mean():
            pairs.append(compare_two(X, one, other))
        else:
            pairs.append(compare_two(X, other, one))

    corrected = holm([pair.p for pair in pairs])
    return [replace(pair, p=p) for pair, p in zip(pairs, corrected, strict=True)]


def compare_two(X: dict[str, np.ndarray], first: str, second: str) -> Comparison:
    """A paired t test with the seeds' variance pooled over tasks, and the interval with tasks as
    random effects."""
    from scipy.stats import t as student

    D = X[first] - X[second]
    lead = float(D.mean())
    tasks, seeds = D.shape
    freedom = tasks * (seeds - 1)

    error = math.sqrt(D.var(axis=1, ddof=1).mean() / D.size)
    half = float(student.ppf(1 - LEVEL / 2, freedom)) * error
    if error:
        p = 2 * float(student.sf(lead / error, freedom))
    else:
        p = float(lead == 0)

    means = D.mean(1)  # [tasks]
    random_error = means.std(ddof=1) / math.sqrt(tasks)
    random_half = float(random_error * student.ppf(1 - LEVEL / 2, tasks - 1))

    return Comparison(
        first=first,
        second=second,
        lead=lead,
        low=lead - half,
        high=lead + half,
        p=p,
        ahead=int((means > 0).sum()),
        random_low=lead - random_half,
        random_high=lead + random_half,
    )


def resample(runs: dict[str, Runs]) -> dict[str, np.ndarray]:
    """Means over tasks in resamples of seeds and problems within tasks, the same for all."""
    rng = np.random.default_rng(0)
    means = {name: np.zeros(RESAMPLES) for name in runs}

    for task in TASKS:
        solved = {name: solved_of(own, task) for name, own in runs.items()}
        S, P = next(iter(solved.values())).shape
        seeds = rng.multinomial(S, np.full(S, 1 / S), size=RESAMPLES) / S
        problems = rng.multinomial(P, np.full(P, 1 / P), size=RESAMPLES) / P

        for name, marks in solved.items():
            means[name] += np.einsum("rs,rs->r", seeds, problems @ marks.T) / len(TASKS)
    return means


def solved_of(runs: Runs, task: str) -> np.ndarray:
    """[seeds, problems], 1 where a problem was solved."""
    marks = []
    for (of, _), cell in sorted(runs.items()):
        if of == task:
            marks.append(cell["solved"])

    return np.array([list(map(float, solved)) for solved in marks])


def tables(done: Done) -> str:
    runs = reported(done)
    X = {name: grid(own, "accuracy") for name, own in runs.items()}
    order = sorted(X, key=lambda name: -X[name].mean())
    seeds = sorted({seed for own in runs.values() for _, seed in own})

    parts = [
        f"Reporting seeds {', '.join(map(str, seeds))}.\n",
        contender_table(runs, X, order),
        pair_table(X),
        rate_table(order, done),
        search_table(order, done),
    ]
    return "\n".join(parts)


def contender_table(runs: dict[str, Runs], X: dict[str, np.ndarray], order: list[str]) -> str:
    """Accuracy with intervals, by task, and what else was measured."""
    drawn = resample(runs)
    first = np.array(list(drawn.values())).argmax(0)
    places = list(drawn)

    rows = []
    for name in order:
        own = runs[name]
        low, high = np.quantile(drawn[name], [0.025, 0.975])
        is_first = float((first == places.index(name)).mean())
        row = [
            name,
            f"{X[name].mean():.3f} [{low:.3f}, {high:.3f}]",
            f"{is_first:.2f}",
            *spelled(X[name].mean(1), ".3f"),
            f"{grid(own, 'area').mean():.3f}",
            f"{grid(own, 'forgetting').mean():+.3f}",
            f"{int(grid(own, 'stable').sum())} of {len(own)}",
        ]
        rows.append(row)

    starts = start_of_tasks(runs["adamw"])
    rows.append(["start", f"{fmean(starts):.3f}", "", *spelled(starts, ".3f"), "", "", ""])

    head = ["contender", "final accuracy", "first in resamples", *TASKS]
    return table([*head, "area", "forgetting, nats", "stable"], rows)


def start_of_tasks(runs: Runs) -> list[float]:
    """Test accuracy before training, by task."""
    starts = []
    for task in TASKS:
        cells = where(runs.values(), task=task)
        starts.append(fmean(cell["curve"][0][1] for cell in cells))
    return starts


def pair_table(X: dict[str, np.ndarray]) -> str:
    """All pairs, the smallest p first."""
    rows = []
    for pair in sorted(compare(X), key=lambda pair: pair.p):
        row = [
            f"{pair.first} over {pair.second}",
            f"{pair.lead:.3f} [{pair.low:.3f}, {pair.high:.3f}]",
            f"{pair.p:.3f}" if pair.p >= 0.001 else "< 0.001",
            f"{pair.ahead} of {len(TASKS)}",
            f"[{pair.random_low:.3f}, {pair.random_high:.3f}]",
            "win" if pair.wins else "no significant difference",
        ]
        rows.append(row)
    return table(["pair", "lead", "p (Holm)", "tasks ahead", "tasks random", "verdict"], rows)


def rate_table(order: list[str], done: Done) -> str:
    rows = [[name, *rates_of(name, done)] for name in order]
    return table(["contender", "chosen rate", "highest stable rate"], rows)


def rates_of(name: str, done: Done) -> tuple[str, str]:
    """The chosen rate (* at the end of the grid) and the highest stable one; ≥ where no higher one
    is known to be unstable."""
    tasks = tuple(TASKS)
    rate = CONTENDERS[name].grid.rate
    found = search_of(tasks, name, done)

    chosen = ""
    if found.best is not None:
        at_edge = found.edge is not None
        chosen = f"{rate(found.best):g}{'*' * at_edge}"

    top = highest_stable(tasks, name, done)
    if top is None:
        return chosen, "none"

    open_above = stable_at(tasks, name, top + 1, done) is None
    return chosen, f"{'≥ ' * open_above}{rate(top):g}"


def search_table(order: list[str], done: Done) -> str:
    head = ["contender", "mean validation accuracy by rate", "best rate of each task", "mean"]
    return table(head, [[name, *search_row(name, done)] for name in order])


def search_row(name: str, done: Done) -> tuple[str, str, str]:
    """What the tuning runs say: scores by rate, and with a rate for each task."""
    rate = CONTENDERS[name].grid.rate
    scores = scores_of(tuple(TASKS), name, done)
    by_rate = ", ".join(f"{rate(k):g}: {scores[k]:.3f}" for k in sorted(scores))

    best_rates = []
    best_scores = []
    for task in TASKS:
        of_task = scores_of((task,), name, done)
        best = max(of_task, key=of_task.__getitem__)
        best_rates.append(rate(best))
        best_scores.append(of_task[best])

    return by_rate, listed(best_rates, "g"), f"{fmean(best_scores):.3f}"


def draw(done: Done, path: Path) -> None:
    """Above the mean test curves of each task, below validation accuracy over rates."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = reported(done)
    figure, axes = pyplot.subplots(2, len(TASKS), figsize=(13, 6), constrained_layout=True)
    for column, task in enumerate(TASKS):
        above, below = axes[:, column]
        for k, name in enumerate(CONTENDERS):
            draw_curve(above, where(runs[name].values(), task=task), name, f"C{k}")
            draw_rates(below, scores_of((task,), name, done), name, f"C{k}")

        above.set(title=task, xlabel="step")
        below.set(xscale="log", xlabel="rate")
        above.grid(alpha=0.3)
        below.grid(alpha=0.3)

    axes[0, 0].set_ylabel("test accuracy, mean of reporting seeds")
    axes[1, 0].set_ylabel("validation accuracy, tuning seeds")
    axes[0, 0].legend(fontsize=7)
    save_picture(figure, path, dpi=100)


def draw_curve(axis: Any, cells: list[Cell], name: str, color: str) -> None:
    """The mean over seeds at the steps that all of them have."""
    curves = [dict(cell["curve"]) for cell in cells]
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    means = [fmean(curve[step] for curve in curves) for step in steps]
    axis.plot(steps, means, color=color, label=name, lw=1.2)


def draw_rates(axis: Any, scores: dict[int, float], name: str, color: str) -> None:
    indices = sorted(scores)
    rates = [CONTENDERS[name].grid.rate(k) for k in indices]
    axis.plot(rates, [scores[k] for k in indices], color=color, marker=".", lw=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cells", type=Path, nargs="+", help="files or folders")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()

    done = read_cells(given.cells)
    given.out.mkdir(parents=True, exist_ok=True)
    write_json(list(done.values()), given.out / "cells.json.gz")
    (given.out / "tables.md").write_text(tables(done))
    draw(done, given.out / "figure.png")
    print(given.out / "tables.md")


if __name__ == "__main__":
    main()
