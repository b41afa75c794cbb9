"""The study's JSON as tables and plots for its page.

python -m benchmarks.vla.page benchmarks/vla/object10.json.gz
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks._lib.pictures import save_picture
from benchmarks._lib.results import beside, read_json
from benchmarks._lib.rows import distinct, listed, table, values, where
from benchmarks.vla.plan import PARTS, TRUSTED, Cell, of, preference

NAMES = {
    "adamw": "AdamW",
    "muon": "Muon",
    "muon_pion": "Muon, Pion on action",
    "pion": "Pion everywhere",
    "muon_low_rank": "Muon, low rank on action",
}
COLORS = {
    "adamw": "#888888",
    "muon": "#1f77b4",
    "muon_pion": "#d62728",
    "pion": "#9467bd",
    "muon_low_rank": "#2ca02c",
}


MEASURES = {
    "effective_rank": "effective rank",
    "top_share": "top share",
    "snr": "SNR",
}


def main() -> None:
    write(Path(sys.argv[1]))


def write(path: Path) -> None:
    """Print the tables and draw the pictures of a result."""
    found = read_json(path)
    cells = found["cells"]
    settings = found["settings"]
    small = settings["small"]
    full = settings["full"]
    episodes = settings["test"] * len(found["facts"]["expert"]["tasks"])

    print(rates_table(cells, small))
    print(finals_table(cells, [small, full]))
    print(behind_table(cells, {small: episodes // 2, full: episodes}))
    print(long_table(cells, settings["long"]))
    print(strength_table(cells, full))
    print(gradient_table(cells))

    draw_rates(cells, small, beside(path, "_rates.png"))
    if any(cell["probes"] for cell in cells):
        draw_gradients(cells, beside(path, "_gradients.png"))
    if where(cells, steps=full):
        draw_learning(cells, full, beside(path, "_learning.png"))


def at(cells: list[Cell], head: str, name: str, steps: int) -> dict[float, Cell]:
    """Cells of the first seed with the default strength, by rate."""
    return of(dict(enumerate(cells)), head, name, steps)


def chosen(cells: list[Cell], head: str, name: str, steps: int) -> list[Cell]:
    """The seeds of the rate that validation or loss preferred on the first seed."""
    first = list(at(cells, head, name, steps).values())
    if not first:
        return []

    rate = max(first, key=preference(first))["rate"]
    seeds = where(cells, head=head, contender=name, steps=steps, rate=rate)
    return sorted(where(seeds, strength="noise", action_scale=1), key=lambda cell: cell["seed"])


def rates_table(cells: list[Cell], steps: int) -> str:
    """Validation success and loss over rates, one seed."""
    rows = []
    for head in distinct(cells, "head"):
        for name in NAMES:
            tried = at(cells, head, name, steps)
            if not tried:
                continue

            shown = []
            for rate in sorted(tried):
                cell = tried[rate]
                shown.append(f"{rate:g}: {cell['validation']:.2f} ({cell['loss']:.3f})")

            is_trusted = max(values(tried.values(), "validation")) >= TRUSTED
            by = "success" if is_trusted else "loss"
            rows.append([head, NAMES[name], "; ".join(shown), by])

    return table(["head", f"{steps} steps", "rate: success (loss)", "chosen by"], rows)


def finals_table(cells: list[Cell], budgets: list[int]) -> str:
    """Success on test scenes at the small and the full budget, seed by seed."""
    rows = []
    for head in distinct(cells, "head"):
        for name in NAMES:
            small, full = (chosen(cells, head, name, steps) for steps in budgets)
            if small or full:
                scores = [rate_of(small), success_of(small), rate_of(full), success_of(full)]
                rows.append([head, NAMES[name], *scores, wrong_of(full) or wrong_of(small)])

    columns = []
    for steps in budgets:
        columns += [f"rate, {steps} steps", f"success, {steps} steps"]
    return table(["head", "contender", *columns, "told wrongly"], rows)


def rate_of(seeds: list[Cell]) -> str:
    return f"{seeds[0]['rate']:g}" if seeds else ""


def success_of(seeds: list[Cell]) -> str:
    """The mean, then seed by seed."""
    tests = values(seeds, "test")
    if tests:
        return f"{mean(tests):.3f} ({listed(tests, '.3g')})"

    return ""


def wrong_of(seeds: list[Cell]) -> str:
    """Success with a wrong instruction, where it was measured."""
    wrong = values(seeds, "wrong")
    return f"{max(wrong):.2f}" if wrong else ""


def behind_table(cells: list[Cell], budgets: dict[int, int]) -> str:
    """How far each contender is behind Muon, in two kinds of standard errors.

    Args:
        cells: of the study.
        budgets: test episodes of a seed, by steps.
    """
    rows = []
    for head in distinct(cells, "head"):
        for steps, episodes in budgets.items():
            muon = values(chosen(cells, head, "muon", steps), "test")
            for name in NAMES:
                own = values(chosen(cells, head, name, steps), "test")
                if name == "muon" or not own or not muon:
                    continue
                row = [head, NAMES[name], f"{steps}", f"{mean(muon):.3f}", f"{mean(own):.3f}"]
                rows.append([*row, f"{mean(muon) - mean(own):.3f}", *errors(muon, own, episodes)])

    columns = ["head", "contender", "steps", "Muon", "own", "behind by"]
    return table([*columns, "error of episodes", "error of seeds"], rows)


def errors(muon: list[float], own: list[float], episodes: int) -> list[str]:
    """Standard errors of a difference of means: over episodes (binomial), and
    from how the seeds differ, where both have two."""
    both = (muon, own)
    of_episodes = sum(mean(x) * (1 - mean(x)) / (len(x) * episodes) for x in both) ** 0.5
    if min(len(muon), len(own)) < 2:
        return [f"{of_episodes:.3f}", ""]

    of_seeds = sum(stdev(x) ** 2 / len(x) for x in both) ** 0.5
    return [f"{of_episodes:.3f}", f"{of_seeds:.3f}"]


def long_table(cells: list[Cell], steps: int) -> str:
    """The best contender after its longer training."""
    rows = []
    for head in distinct(cells, "head"):
        for name in NAMES:
            seeds = chosen(cells, head, name, steps)
            if seeds:
                shown = [rate_of(seeds), success_of(seeds), wrong_of(seeds)]
                rows.append([head, NAMES[name], *shown])
    return table(["head", f"{steps} steps", "rate", "success", "told wrongly"], rows)


def strength_table(cells: list[Cell], steps: int) -> str:
    """Pion's strength on the action module: success, and what half-way through it let pass."""
    head = cells[0]["head"]
    tried = where(cells, head=head, contender="muon_pion", steps=steps, seed=0)
    tried = [cell for cell in tried if cell["half"]]
    tried.sort(key=lambda cell: (cell["action_scale"] != 1, cell["rate"], cell["strength"]))

    rows = []
    for cell in tried:
        half = cell["half"]
        row = [
            cell["strength"],
            f"{cell['rate']:g}",
            f"{cell['action_scale']:g}",
            f"{cell['test']:.2f}",
            f"{cell['loss']:.3f}",
            f"{half['action_to_vision']:.2f}",
            f"{half['passed_rank']:.2f}",
            f"{half['dead_blocks']:.2f}",
        ]
        rows.append(row)

    columns = ["strength", "rate", "factor on the action rate", "success", "loss"]
    return table([*columns, "action step / vision step", "passed", "dead"], rows)


def gradient_table(cells: list[Cell]) -> str:
    """Effective rank, top share and SNR of each part's gradient, early and late."""
    rows = []
    for cell in where(cells, head=cells[0]["head"], action_scale=1):
        if not cell["probes"]:
            continue
        for place, probe in (("2 %", cell["probes"][1]), ("75 %", cell["probes"][-2])):
            shown = [probed(probe, part) for part in PARTS]
            rows.append([NAMES[cell["contender"]], f"{cell['rate']:g}", place, *shown])
    return table(["contender", "rate", "at", *PARTS], rows)


def probed(probe: dict[str, float], part: str) -> str:
    """What was measured of a part's gradient."""
    keys = [f"gradient/{part}/{name}" for name in MEASURES]
    return " / ".join(f"{probe[key]:.2g}" for key in keys if key in probe)


def draw_rates(cells: list[Cell], steps: int, path: Path) -> None:
    """Success on validation scenes above, the loss below, over the rate."""
    plt = open_plots()
    heads = distinct(cells, "head")
    size = (5 * len(heads), 5.6)
    figure, axes = plt.subplots(2, len(heads), figsize=size, sharex="col", squeeze=False)

    for column, head in zip(axes.T, heads, strict=True):
        for axis, key in zip(column, ("validation", "loss"), strict=True):
            for name in NAMES:
                tried = at(cells, head, name, steps)
                if tried:
                    rates = sorted(tried)
                    draw_line(axis, rates, [tried[rate][key] for rate in rates], name)
            axis.set_xscale("log")

        column[0].set_ylim(-0.03, 1.03)
        column[0].set_title(f"{head} head, {steps} steps, one seed")
        column[1].set_xlabel("learning rate of matrices")

    axes[0][0].set_ylabel("success, validation scenes")
    axes[1][0].set_ylabel("training loss")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    save_picture(figure, path, dpi=110)


def draw_line(axis: Any, x: list[float], y: list[float], name: str, **style: Any) -> None:
    """Points and a line in a contender's color."""
    axis.plot(x, y, "o-", color=COLORS[name], label=NAMES[name], **style)


def draw_gradients(cells: list[Cell], path: Path) -> None:
    """Gradient statistics of each part over training, a line for each contender."""
    plt = open_plots()
    best = best_probed(cells)
    shape = (len(MEASURES), len(PARTS))
    figure, axes = plt.subplots(*shape, figsize=(12, 7), sharex=True, sharey="row")

    for row, (key, words) in zip(axes, MEASURES.items(), strict=True):
        row[0].set_ylabel(words)
        for axis, part in zip(row, PARTS, strict=True):
            for name, cell in best.items():
                probes = []
                for p in cell["probes"]:
                    if f"gradient/{part}/{key}" in p:
                        probes.append(p)

                if probes:
                    y = values(probes, f"gradient/{part}/{key}")
                    draw_line(axis, values(probes, "step"), y, name, ms=3)

    for axis, part in zip(axes[0], PARTS, strict=True):
        axis.set_title(part)
    for axis in axes[-1]:
        axis.set_yscale("symlog", linthresh=0.1)
        axis.set_xlabel("step")

    lines = axes[0][0].get_legend_handles_labels()
    figure.legend(*lines, loc="upper center", ncol=len(best), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    save_picture(figure, path, dpi=110)


def best_probed(cells: list[Cell]) -> dict[str, Cell]:
    """The best run of each contender whose gradients were measured, of the first head."""
    best = {}
    for name in NAMES:
        tried = where(cells, head=cells[0]["head"], contender=name, action_scale=1)
        tried = [cell for cell in tried if cell["probes"]]
        if tried:
            best[name] = max(tried, key=preference(tried))
    return best


def draw_learning(cells: list[Cell], steps: int, path: Path) -> None:
    """The training loss of the finalists, first seed."""
    plt = open_plots()
    heads = distinct(cells, "head")
    figure, axes = plt.subplots(1, len(heads), figsize=(5 * len(heads), 3.6), squeeze=False)

    for axis, head in zip(axes[0], heads, strict=True):
        for name in NAMES:
            seeds = chosen(cells, head, name, steps)
            if seeds:
                x, y = zip(*seeds[0]["losses"], strict=True)
                axis.plot(x, y, color=COLORS[name], lw=1, label=NAMES[name])

        axis.set_title(f"{head} head, {steps} steps")
        axis.set_xlabel("step")

    axes[0][0].set_ylabel("training loss")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    save_picture(figure, path, dpi=110)


def open_plots() -> Any:
    """Matplotlib without a window."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


if __name__ == "__main__":
    main()
