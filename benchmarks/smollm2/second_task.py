"""The tables on GSM8K after a supervised start: rates, fresh seeds, several updates per rollout."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import numpy as np

from benchmarks._lib.rows import distinct, table, values, where
from benchmarks.smollm2.plan import Cell, accuracy, sampled_right
from benchmarks.smollm2.tables import column_end, mean_ends
from mesotron.compare.stats import ScoreDifference, bootstrap, holm, paired_test, pool_seeds

Lead = tuple[ScoreDifference, float]  # and its p value, corrected


def gsm8k(cells: list[Cell]) -> str:
    """Results of the finished stages."""
    parts = []
    for cell in where(cells, stage="warm"):
        before = cell["curve"][0][1]
        steps = cell["curve"][-1][0]
        after = cell["accuracy"]
        parts.append(f"Supervised start: {before:.3f} before, {after:.3f} after {steps} steps.\n")

    search = where(cells, stage="search")
    if search:
        parts += ["## Rates, one seed", "", runs_table(search)]

    finals = where(cells, stage="final")
    if finals:
        parts += ["## Fresh seeds at the rate that samples more right answers", ""]
        parts += [runs_table(finals), finals_table(finals)]

    several = where(cells, stage="several")
    if several:
        parts += ["## Four updates with each rollout, one seed", "", runs_table(several)]
    return "\n".join(parts)


def runs_table(cells: list[Cell]) -> str:
    """A row for each optimizer, rate and objective, over its seeds."""
    rows = []
    for optim in distinct(cells, "optim"):
        of_optim = where(cells, optim=optim)
        for objective in distinct(of_optim, "objective"):
            of_objective = where(of_optim, objective=objective)
            for rate in distinct(of_objective, "rate"):
                rows.append(runs_row(where(of_objective, rate=rate)))

    greedy = f"greedy on {len(cells[0]['solved'])}, seed by seed"
    head = ["optimizer", "objective", "rate", "steps", "samples right, second half", greedy]
    return table([*head, "cut short", "groups without signal", "entropy"], rows)


def runs_row(cells: list[Cell]) -> list[str]:
    """The seeds of one setting."""
    first = cells[0]
    return [
        first["optim"],
        first["objective"],
        rate_of(first),
        str(first["steps"]),
        f"{fmean(map(sampled_right, cells)):.4f}",
        seed_by_seed(cells),
        *mean_ends(cells, ["facts/truncated", "groups/zero_signal", "entropy"]),
    ]


def rate_of(cell: Cell) -> str:
    return f"{cell['rate']:g} (x{cell['gain']:g})"


def seed_by_seed(cells: list[Cell]) -> str:
    return ", ".join(f"{accuracy(cell):.3f}" for cell in cells)


def solved(cells: list[Cell]) -> np.ndarray:
    """[seeds, problems] of zeros and ones."""
    return np.array([list(map(float, cell["solved"])) for cell in cells])


def finals_table(finals: list[Cell]) -> str:
    """Intervals over seeds and problems, and tests against the best."""
    by_name = {}
    for name in distinct(finals, "optim"):
        by_name[name] = sorted(where(finals, optim=name), key=lambda cell: cell["seed"])

    order = sorted(by_name, key=lambda name: -solved(by_name[name]).mean())
    leads = leads_over(by_name, order)
    rows = [finals_row(name, by_name[name], leads.get((order[0], name))) for name in order]

    steps = f"{finals[0]['steps']} steps"
    problems = f"{len(finals[0]['solved'])} problems"
    head = [steps, "rate", problems, "seed by seed", "behind the first", "p (Holm)"]
    return table([*head, "entropy at the end", "dead blocks"], rows)


def finals_row(name: str, cells: list[Cell], lead: Lead | None) -> list[str]:
    """One optimizer at its chosen rate; `lead` is that of the first over it."""
    behind = ""
    p = ""
    if lead:
        difference, corrected = lead
        behind = f"{difference.value:.3f} [{difference.low:.3f}, {difference.high:.3f}]"
        p = f"{corrected:.3f}"

    interval = bootstrap(solved(cells))
    dead = values(cells, "dead_blocks")
    return [
        name,
        rate_of(cells[0]),
        f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]",
        seed_by_seed(cells),
        behind,
        p,
        f"{fmean(column_end(cell, 'entropy') for cell in cells):.2f}",
        f"{fmean(dead):.0%}" if dead else "",
    ]


def leads_over(by_name: dict[str, list[Cell]], order: list[str]) -> dict[tuple[str, str], Lead]:
    """Every pair by seeds that both have, the noise of seeds from all pairs, corrected for them."""
    apart = {}
    for first, second in combinations(order, 2):
        better = {cell["seed"]: cell for cell in by_name[first]}
        worse = {cell["seed"]: cell for cell in by_name[second]}
        seeds = sorted(better.keys() & worse.keys())
        if seeds:
            ahead = solved([better[seed] for seed in seeds])
            apart[first, second] = ahead - solved([worse[seed] for seed in seeds])

    if not apart:
        return {}

    pooled = pool_seeds(list(apart.values()))
    differences = [paired_test(D, pooled) for D in apart.values()]
    corrected = holm([difference.p for difference in differences])
    return dict(zip(apart, zip(differences, corrected, strict=True), strict=True))
