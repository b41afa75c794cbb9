"""The page on GSM8K after a supervised start: rates, fresh seeds, several updates per rollout."""

from __future__ import annotations

from statistics import fmean

from benchmarks.smollm2.contests import finals_table
from benchmarks.smollm2.plan import Cell, accuracy, sampled_right
from benchmarks.smollm2.tables import mean_end, names, of, table


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
                mine = of(cells, optim=name, objective=objective, rate=rate)
                rows.append([
                    name, objective, f"{rate:g} (x{mine[0]['gain']:g})", str(mine[0]["steps"]),
                    f"{fmean(map(sampled_right, mine)):.4f}",
                    ", ".join(f"{accuracy(cell):.3f}" for cell in mine),
                    *(mean_end(mine, metric) for metric in
                      ("facts/truncated", "groups/zero_signal", "entropy")),
                ])  # fmt: skip
    head = ["optimizer", "objective", "rate", "steps", "samples right, second half",
            f"greedy on {len(cells[0]['solved'])}, seed by seed", "cut short",
            "groups without signal", "entropy"]  # fmt: skip
    return table(head, rows)
