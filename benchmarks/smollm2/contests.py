"""Pages on the best optimizer: the tournament, its rate map, what makes it faster."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import numpy as np

from benchmarks.smollm2.plan import Cell, accuracy, died, map_row, map_rows
from benchmarks.smollm2.tables import column_end, mean_end, names, of, table
from mesotron.compare.kinds import is_for_choosing
from mesotron.compare.stats import Difference, bootstrap, holm, paired_test, pool_seeds


def tournament(cells: list[Cell]) -> str:
    search, finals = of(cells, stage="search"), of(cells, stage="final")
    parts = ["## Rates", "", rates_table(search)]
    if finals:
        parts += ["## Fresh seeds at the chosen rate", "", finals_table(finals)]
    released = of(cells, stage="released")
    if released:
        parts += ["## Muon with the released constant", "", single_table(released)]
    return "\n".join(parts)


def rates_table(search: list[Cell]) -> str:
    """Accuracy on the half of the problems that chooses, one seed; † died by the watch."""
    rates = sorted({cell["rate"] for cell in search})
    rows = []
    for name in names(search):
        mine = {cell["rate"]: cell for cell in of(search, optim=name)}
        gain = next(iter(mine.values()))["gain"]
        shown = [f"{marked(mine[rate])}" if rate in mine else "" for rate in rates]
        rows.append([f"{name} (x{gain:g})", *shown])
    steps = search[0]["steps"] if search else 0
    return table([f"{steps} steps, rate", *(f"{rate:g}" for rate in rates)], rows)


def marked(cell: Cell) -> str:
    return f"{accuracy(cell, choosing=True):.3f}{'†' * died(cell)}"


def judged(cells: list[Cell]) -> np.ndarray:
    """[seeds, problems] of the half that judges; of GSM8K all, since none of them chose."""
    everyone = cells[0]["part"] == "gsm8k"
    kept = [k for k in range(len(cells[0]["solved"]))
            if everyone or not is_for_choosing(f"sums-eval-{k}")]  # fmt: skip
    return np.array([[float(cell["solved"][k]) for k in kept] for cell in cells])


def finals_table(finals: list[Cell]) -> str:
    """The half that judges, with intervals over seeds and problems, and tests against the best."""
    by_name = {
        name: sorted(of(finals, optim=name), key=lambda c: c["seed"]) for name in names(finals)
    }
    order = sorted(by_name, key=lambda name: -judged(by_name[name]).mean())
    tests = paired_tests(by_name, order)
    rows = []
    for name in order:
        mine = by_name[name]
        interval, lead = bootstrap(judged(mine)), tests.get((order[0], name))
        behind = f"{lead[0].value:.3f} [{lead[0].low:.3f}, {lead[0].high:.3f}]" if lead else ""
        dead = [cell["dead_blocks"] for cell in mine if cell["dead_blocks"] is not None]
        rows.append([
            name, f"{mine[0]['rate']:g} (x{mine[0]['gain']:g})",
            f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]",
            ", ".join(f"{accuracy(cell):.3f}" for cell in mine),
            behind, f"{lead[1]:.3f}" if lead else "",
            f"{fmean(column_end(cell, 'entropy') for cell in mine):.2f}",
            f"{fmean(dead):.0%}" if dead else "",
        ])  # fmt: skip
    judges = f"{judged(finals[:1]).size} problems that judge"
    head = [f"{finals[0]['steps']} steps", "rate", judges, "all problems, seed by seed",
            "behind the first", "p (Holm)", "entropy at the end", "dead blocks"]  # fmt: skip
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
            better, worse = (judged([cells[seed] for seed in seeds]) for cells in pairs)
            apart[first, second] = better - worse
    if not apart:
        return {}
    pooled = pool_seeds(list(apart.values()))
    found = {pair: paired_test(D, pooled) for pair, D in apart.items()}
    corrected = holm([difference.p for difference in found.values()])
    return {pair: (value, p) for (pair, value), p in zip(found.items(), corrected, strict=True)}


def single_table(cells: list[Cell]) -> str:
    rows = [
        [cell["optim"], f"{cell['rate']:g}", str(cell["steps"]), f"{accuracy(cell):.3f}",
         f"{column_end(cell, 'entropy'):.2f}", cell["health"][2]]
        for cell in cells
    ]  # fmt: skip
    return table(["optimizer", "rate", "steps", "accuracy", "entropy at the end", "watch"], rows)


def step_map(cells: list[Cell]) -> str:
    """A row for each optimizer and shape of a rollout, a column for each factor of the rate."""
    factors = sorted({cell["stage"] for cell in cells}, key=lambda stage: float(stage[1:]))
    rows = []
    for name in names(cells):
        for row, here in map_rows(of(cells, optim=name)).items():
            entries = [map_entry(cell) for stage in factors for cell in of(here, stage=stage)]
            rows.append([name, map_row(*row), *entries])
    head = ["optimizer", "rollout", *(f"{stage[1:]} times its best rate" for stage in factors)]
    return "\n".join(["Accuracy, entropy at the end; † dead by the watch.", "", table(head, rows)])


def map_entry(cell: Cell) -> str:
    return f"{accuracy(cell):.3f}{'†' * died(cell)}, {column_end(cell, 'entropy'):.2f}"


def levers(cells: list[Cell]) -> str:
    """Each change next to the unchanged recipe, by accuracy after equally many steps."""
    rows = []
    best_first = sorted(cells, key=lambda cell: -cell["accuracy"])
    for name in names(best_first, "stage"):
        mine = sorted(of(cells, stage=name), key=lambda cell: cell["seed"])
        rows.append([
            name, f"{mine[0]['rate']:g} (x{mine[0]['gain']:g})", on_the_way(mine),
            ", ".join(f"{cell['accuracy']:.3f}{cut_at(cell)}" for cell in mine),
            *(mean_end(mine, metric) for metric in
              ("groups/zero_signal", "entropy", "completions/mean_length")),
        ])  # fmt: skip
    head = ["change", "rate", "accuracy (at step), mean of the seeds", "last, seed by seed",
            "groups without signal", "entropy", "tokens"]  # fmt: skip
    return table(head, rows)


def on_the_way(mine: list[Cell]) -> str:
    """The evaluations that all seeds have; the first is of the untrained model."""
    curves = [dict(cell["curve"][1:]) for cell in mine]
    common = [step for step in curves[0] if all(step in curve for curve in curves)]
    return ", ".join(f"{fmean(curve[step] for curve in curves):.3f} ({step})" for step in common)


def cut_at(cell: Cell) -> str:
    """The step at which time was up, if it was."""
    return f" (step {cell['steps_done']})" if cell["steps_done"] < cell["steps"] else ""
