"""The tournament's tables and figure from its cells, by the rules of PROTOCOL.md.

    python -m benchmarks.tournament.analyse OUT/cells ... --out benchmarks/tournament

Writes cells.json.gz, tables.md and figure.png. Arrays are [tasks, seeds] of final accuracy; only
seeds that are complete for all contenders and tasks count.
"""

from __future__ import annotations

import argparse
import math
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from benchmarks._lib.pictures import save_picture
from benchmarks._lib.results import write_json
from benchmarks.smollm2.tables import table
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


class Pair(NamedTuple):
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


def reported(done: Done) -> dict[str, dict[tuple[str, int], Cell]]:
    """Contender -> (task, seed) -> cell, of the seeds that everything has."""
    cells = [cell for cell in done.values() if cell["use"] == "reporting"]
    found: dict[str, dict[tuple[str, int], Cell]] = {name: {} for name in CONTENDERS}
    for cell in cells:
        found[cell["contender"]][cell["task"], cell["seed"]] = cell

    whole = [
        seed
        for seed in REPORTING_SEEDS
        if all((task, seed) in found[name] for name in CONTENDERS for task in TASKS)
    ]
    return {
        name: {place: cell for place, cell in mine.items() if place[1] in whole}
        for name, mine in found.items()
    }


def grid(cells: dict[tuple[str, int], Cell], measure: str) -> np.ndarray:
    """[tasks, seeds]."""
    seeds = sorted({seed for _, seed in cells})
    return np.array([[float(cells[task, seed][measure]) for seed in seeds] for task in TASKS])


def compare(X: dict[str, np.ndarray]) -> list[Pair]:
    """All pairs, the better one first: paired t tests with the seeds' variance pooled over tasks,
    corrected by Holm; and the interval with tasks as random effects."""
    from scipy.stats import t as student

    pairs = []
    for one, other in combinations(X, 2):
        first, second = (one, other) if X[one].mean() >= X[other].mean() else (other, one)
        D = X[first] - X[second]
        tasks, seeds = D.shape
        lead = float(D.mean())
        freedom = tasks * (seeds - 1)
        error = math.sqrt(D.var(axis=1, ddof=1).mean() / D.size)
        p = 2 * float(student.sf(lead / error, freedom)) if error else float(lead == 0)
        half = float(student.ppf(1 - LEVEL / 2, freedom)) * error
        across = D.mean(1).std(ddof=1) / math.sqrt(tasks) * student.ppf(1 - LEVEL / 2, tasks - 1)
        ahead = int((D.mean(1) > 0).sum())

        pairs.append(
            Pair(
                first,
                second,
                lead,
                lead - half,
                lead + half,
                p,
                ahead,
                lead - float(across),
                lead + float(across),
            )
        )

    corrected = holm([pair.p for pair in pairs])
    return [pair._replace(p=p) for pair, p in zip(pairs, corrected, strict=True)]


def resample(cells: dict[str, dict[tuple[str, int], Cell]]) -> dict[str, np.ndarray]:
    """Means over tasks in resamples of seeds and problems within tasks, the same for all."""
    rng = np.random.default_rng(0)
    means = {name: np.zeros(RESAMPLES) for name in cells}
    for task in TASKS:
        solved = {
            name: np.array(
                [
                    [float(mark) for mark in cell["solved"]]
                    for (of, _), cell in sorted(mine.items())
                    if of == task
                ]
            )
            for name, mine in cells.items()
        }

        S, P = next(iter(solved.values())).shape
        seeds = rng.multinomial(S, np.full(S, 1 / S), size=RESAMPLES) / S

        problems = rng.multinomial(P, np.full(P, 1 / P), size=RESAMPLES) / P
        for name, marks in solved.items():
            means[name] += np.einsum("rs,rs->r", seeds, problems @ marks.T) / len(TASKS)

    return means


def tables(done: Done) -> str:
    cells = reported(done)
    X = {name: grid(mine, "accuracy") for name, mine in cells.items()}
    drawn = resample(cells)
    first = np.array(list(drawn.values())).argmax(0)
    order = sorted(X, key=lambda name: -X[name].mean())

    rows = []
    for name in order:
        low, high = np.quantile(drawn[name], [0.025, 0.975])
        share = float((first == list(drawn).index(name)).mean())
        mine = cells[name]

        rows.append(
            [
                name,
                f"{X[name].mean():.3f} [{low:.3f}, {high:.3f}]",
                f"{share:.2f}",
                *(f"{value:.3f}" for value in X[name].mean(1)),
                f"{grid(mine, 'area').mean():.3f}",
                f"{grid(mine, 'forgetting').mean():+.3f}",
                f"{int(grid(mine, 'stable').sum())} of {len(mine)}",
            ]
        )

    head = [
        "contender",
        "final accuracy",
        "first in resamples",
        *TASKS,
        "area",
        "forgetting, nats",
        "stable",
    ]

    start = {
        task: fmean(c["curve"][0][1] for c in cells["adamw"].values() if c["task"] == task)
        for task in TASKS
    }

    rows.append(
        [
            "start",
            f"{fmean(start.values()):.3f}",
            "",
            *(f"{x:.3f}" for x in start.values()),
            "",
            "",
            "",
        ]
    )

    seeds = sorted({seed for mine in cells.values() for _, seed in mine})
    parts = [f"Reporting seeds {', '.join(map(str, seeds))}.", "", table(head, rows)]
    head = ["pair", "lead", "p (Holm)", "tasks ahead", "tasks random", "verdict"]
    shown = sorted(compare(X), key=lambda pair: pair.p)

    pairs = [
        [
            f"{pair.first} over {pair.second}",
            f"{pair.lead:.3f} [{pair.low:.3f}, {pair.high:.3f}]",
            f"{pair.p:.3f}" if pair.p >= 0.001 else "< 0.001",
            f"{pair.ahead} of {len(TASKS)}",
            f"[{pair.random_low:.3f}, {pair.random_high:.3f}]",
            "win" if pair.wins else "no significant difference",
        ]
        for pair in shown
    ]

    rates = [[name, *rates_of(name, done)] for name in order]
    parts.append(table(head, pairs))
    parts.append(table(["contender", "chosen rate", "highest stable rate"], rates))
    head = ["contender", "mean validation accuracy by rate", "best rate of each task", "mean"]
    parts.append(table(head, [[name, *search_row(name, done)] for name in order]))

    return "\n".join(parts)


def search_row(name: str, done: Done) -> tuple[str, str, str]:
    """What the tuning runs say: scores by rate, and with a rate for each task."""
    rate = CONTENDERS[name].grid.rate
    scores = sorted(scores_of(tuple(TASKS), name, done).items())
    tried = [dict(scores_of((task,), name, done)) for task in TASKS]
    best = [max(found, key=lambda k: found[k]) for found in tried]

    return (
        ", ".join(f"{rate(k):g}: {score:.3f}" for k, score in scores),
        ", ".join(f"{rate(k):g}" for k in best),
        f"{fmean(found[k] for found, k in zip(tried, best, strict=True)):.3f}",
    )


def rates_of(name: str, done: Done) -> tuple[str, str]:
    """The chosen rate (* at the end of the grid) and the highest stable one; ≥ where no higher one
    is known to be unstable."""
    tasks = tuple(TASKS)
    rate = CONTENDERS[name].grid.rate
    found = search_of(tasks, name, done)
    top = highest_stable(tasks, name, done)
    chosen = "" if found.best is None else f"{rate(found.best):g}{'*' * (found.edge is not None)}"
    if top is None:
        return chosen, "none"

    open_above = stable_at(tasks, name, top + 1, done) is None
    return chosen, f"{'≥ ' * open_above}{rate(top):g}"


def draw(done: Done, path: Path) -> None:
    """Above the mean test curves of each task, below validation accuracy over rates."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = reported(done)

    figure, axes = pyplot.subplots(2, len(TASKS), figsize=(13, 6), constrained_layout=True)
    for column, task in enumerate(TASKS):
        above, below = axes[:, column]
        for k, name in enumerate(CONTENDERS):
            mine = [cell for (of, _), cell in cells[name].items() if of == task]
            whole = [dict(cell["curve"]) for cell in mine]
            steps = sorted(set.intersection(*map(set, whole))) if whole else []
            means = [fmean(curve[step] for curve in whole) for step in steps]

            above.plot(
                steps,
                means,
                color=f"C{k}",
                label=name,
                lw=1.2,
            )

            scores = dict(sorted(scores_of((task,), name, done).items()))
            rates = [CONTENDERS[name].grid.rate(index) for index in scores]
            below.plot(
                rates,
                list(scores.values()),
                color=f"C{k}",
                marker=".",
                lw=1,
            )

        above.set(title=task, xlabel="step")
        below.set(xscale="log", xlabel="rate")

        for axis in (above, below):
            axis.grid(alpha=0.3)

    axes[0, 0].set_ylabel("test accuracy, mean of reporting seeds")
    axes[1, 0].set_ylabel("validation accuracy, tuning seeds")
    axes[0, 0].legend(fontsize=7)
    save_picture(figure, path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "cells",
        type=Path,
        nargs="+",
        help="files or folders",
    )

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
