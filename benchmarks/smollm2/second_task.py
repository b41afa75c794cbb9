"""The page on GSM8K after a supervised start: rates, fresh seeds, several updates per rollout."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import numpy as np

from benchmarks.smollm2.plan import Cell, accuracy, sampled_right
from benchmarks.smollm2.tables import column_end, mean_end, names, of, table
from mesotron.compare.stats import Difference, bootstrap, holm, paired_test, pool_seeds


def gsm8k(cells: list[Cell]) -> str:
    """Results of the finished stages."""
    parts = [
        f"Supervised start: {cell['curve'][0][1]:.3f} before, {cell['accuracy']:.3f} after "
        f"{cell['curve'][-1][0]} steps.\n"
        for cell in of(cells, stage="warm")
    ]

    stages = {
        "search": "## Rates, one seed",
        "final": "## Fresh seeds at the rate that samples more right answers",
        "several": "## Four updates with each rollout, one seed",
    }
    for stage, title in stages.items():
        mine = of(cells, stage=stage)
        if mine:
            parts += [title, "", runs_table(mine)]

        if mine and stage == "final":
            parts.append(finals_table(mine))

    return "\n".join(parts)


def runs_table(cells: list[Cell]) -> str:
    """A row for each optimizer, rate and objective, over its seeds."""
    rows = []
    for name in names(cells):
        for objective in names(of(cells, optim=name), "objective"):
            for rate in names(of(cells, optim=name, objective=objective), "rate"):
                mine = of(
                    cells,
                    optim=name,
                    objective=objective,
                    rate=rate,
                )

                rows.append(
                    [
                        name,
                        objective,
                        f"{rate:g} (x{mine[0]['gain']:g})",
                        str(mine[0]["steps"]),
                        f"{fmean(map(sampled_right, mine)):.4f}",
                        ", ".join(f"{accuracy(cell):.3f}" for cell in mine),
                        *(
                            mean_end(mine, metric)
                            for metric in ("facts/truncated", "groups/zero_signal", "entropy")
                        ),
                    ]
                )

    head = [
        "optimizer",
        "objective",
        "rate",
        "steps",
        "samples right, second half",
        f"greedy on {len(cells[0]['solved'])}, seed by seed",
        "cut short",
        "groups without signal",
        "entropy",
    ]
    return table(head, rows)


def solved(cells: list[Cell]) -> np.ndarray:
    """[seeds, problems] of zeros and ones."""
    return np.array([[float(mark) for mark in cell["solved"]] for cell in cells])


def finals_table(finals: list[Cell]) -> str:
    """Intervals over seeds and problems, and tests against the best."""
    by_name = {
        name: sorted(of(finals, optim=name), key=lambda c: c["seed"]) for name in names(finals)
    }
    order = sorted(by_name, key=lambda name: -solved(by_name[name]).mean())
    tests = paired_tests(by_name, order)

    rows = []
    for name in order:
        mine = by_name[name]
        interval = bootstrap(solved(mine))
        lead = tests.get((order[0], name))
        behind = f"{lead[0].value:.3f} [{lead[0].low:.3f}, {lead[0].high:.3f}]" if lead else ""
        dead = [cell["dead_blocks"] for cell in mine if cell["dead_blocks"] is not None]

        rows.append(
            [
                name,
                f"{mine[0]['rate']:g} (x{mine[0]['gain']:g})",
                f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]",
                ", ".join(f"{accuracy(cell):.3f}" for cell in mine),
                behind,
                f"{lead[1]:.3f}" if lead else "",
                f"{fmean(column_end(cell, 'entropy') for cell in mine):.2f}",
                f"{fmean(dead):.0%}" if dead else "",
            ]
        )

    problems = f"{len(finals[0]['solved'])} problems"
    head = [
        f"{finals[0]['steps']} steps",
        "rate",
        problems,
        "seed by seed",
        "behind the first",
        "p (Holm)",
        "entropy at the end",
        "dead blocks",
    ]

    return table(head, rows)


def paired_tests(
    by_name: dict[str, list[Cell]], order: list[str]
) -> dict[tuple[str, str], tuple[Difference, float]]:
    """Every pair by seeds that both have, the noise of seeds from all pairs, corrected for them."""
    apart = {}
    for first, second in combinations(order, 2):
        pairs = [{cell["seed"]: cell for cell in by_name[name]} for name in (first, second)]
        seeds = sorted(pairs[0].keys() & pairs[1].keys())
        if seeds:
            better, worse = (solved([cells[seed] for seed in seeds]) for cells in pairs)
            apart[first, second] = better - worse

    if not apart:
        return {}

    pooled = pool_seeds(list(apart.values()))
    found = {pair: paired_test(D, pooled) for pair, D in apart.items()}
    corrected = holm([difference.p for difference in found.values()])

    return {pair: (value, p) for (pair, value), p in zip(found.items(), corrected, strict=True)}
