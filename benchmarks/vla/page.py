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
from benchmarks.vla.plan import TRUSTED, of, preference

Cell = dict[str, Any]
NAMES = {
    "adamw": "AdamW",
    "muon": "Muon",
    "muon_pion": "Muon, Pion on action",
    "pion": "Pion everywhere",
    "muon_low_rank": "Muon, low rank on action",
}
COLOURS = {
    "adamw": "#888888",
    "muon": "#1f77b4",
    "muon_pion": "#d62728",
    "pion": "#9467bd",
    "muon_low_rank": "#2ca02c",
}
PARTS = ("vision", "language", "fusion", "action")


def main() -> None:
    write(Path(sys.argv[1]))


def write(path: Path) -> None:
    """Print the tables and draw the pictures of a result."""
    found = read_json(path)
    cells = found["cells"]
    settings = found["settings"]
    small = settings["small"]
    full = settings["full"]
    print(rates_table(cells, small))
    print(finals_table(cells, [small, full]))
    episodes = settings["test"] * len(found["facts"]["expert"]["tasks"])
    print(behind_table(cells, {small: episodes // 2, full: episodes}))
    print(long_table(cells, settings["long"]))
    print(strength_table(cells, full))
    print(gradient_table(cells))
    draw_rates(cells, small, beside(path, "_rates.png"))

    if any(cell["probes"] for cell in cells):
        draw_gradients(cells, beside(path, "_gradients.png"))

    if any(cell["steps"] == full for cell in cells):
        draw_learning(cells, full, beside(path, "_learning.png"))


def table(head: list[str], rows: list[list[str]]) -> str:
    """In Markdown; nothing where there are no rows."""
    lines = [head, ["---"] * len(head), *rows] if rows else []
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def heads(cells: list[Cell]) -> list[str]:
    return list(dict.fromkeys(cell["head"] for cell in cells))


def at(cells: list[Cell], head: str, name: str, steps: int, seed: int = 0) -> dict[float, Cell]:
    """Cells with the default strength, by rate."""
    return of(
        {str(k): cell for k, cell in enumerate(cells)},
        head,
        name,
        steps,
        seed,
    )


def chosen(cells: list[Cell], head: str, name: str, steps: int) -> list[Cell]:
    """The seeds of the rate that validation or loss preferred on the first seed."""
    first = list(at(cells, head, name, steps).values())
    if not first:
        return []

    rate = max(first, key=preference(first))["rate"]
    mine = [c for c in cells if c["rate"] == rate and c["strength"] == "noise"]
    mine = [c for c in mine if (c["head"], c["contender"], c["steps"]) == (head, name, steps)]

    return sorted((c for c in mine if c["action_scale"] == 1), key=lambda cell: cell["seed"])


def rates_table(cells: list[Cell], steps: int) -> str:
    """Validation success and loss over rates, one seed."""
    rows = []
    for head in heads(cells):
        for name in NAMES:
            tried = at(cells, head, name, steps)
            shown = [
                f"{rate:g}: {tried[rate]['validation']:.2f} ({tried[rate]['loss']:.3f})"
                for rate in sorted(tried)
            ]
            if shown:
                trusted = max(cell["validation"] for cell in tried.values()) >= TRUSTED
                by = "success" if trusted else "loss"
                rows.append([head, NAMES[name], "; ".join(shown), by])

    return table(["head", f"{steps} steps", "rate: success (loss)", "chosen by"], rows)


def finals_table(cells: list[Cell], budgets: list[int]) -> str:
    """Success on test scenes at each budget, seed by seed."""
    rows = []
    for head in heads(cells):
        for name in NAMES:
            found = [chosen(cells, head, name, steps) for steps in budgets]
            if any(found):
                rows.append([head, NAMES[name], *(text for f in found for text in tell(f))])

    columns = [f"{what} {steps} steps" for steps in budgets for what in ("rate,", "success,")]
    return table(["head", "contender", *columns, "told wrongly"], [widen(row) for row in rows])


def tell(found: list[Cell]) -> list[str]:
    """Rate, success by seed, and success with a wrong instruction."""
    if not found:
        return ["", "", ""]

    tests = [cell["test"] for cell in found]
    wrong = [cell["wrong"] for cell in found if cell["wrong"] is not None]
    spelled = ", ".join(f"{t:.3g}" for t in tests)
    shown = [f"{found[0]['rate']:g}", f"{mean(tests):.3f} ({spelled})"]

    return [*shown, f"{max(wrong):.2f}" if wrong else ""]


def widen(row: list[str]) -> list[str]:
    """One column for the wrong instruction: of the longer budget, or else of the shorter."""
    head, name, small_rate, small, small_wrong, full_rate, full, full_wrong = row
    return [head, name, small_rate, small, full_rate, full, full_wrong or small_wrong]


def behind_table(cells: list[Cell], budgets: dict[int, int]) -> str:
    """How far each contender is behind Muon, in two kinds of standard errors.

    Args:
        budgets: test episodes of a seed, by steps.
    """
    rows = []
    for head in heads(cells):
        for steps, episodes in budgets.items():
            muon = [cell["test"] for cell in chosen(cells, head, "muon", steps)]
            for name in NAMES:
                own = [cell["test"] for cell in chosen(cells, head, name, steps)]
                if name != "muon" and own and muon:
                    shown = [
                        f"{mean(muon):.3f}",
                        f"{mean(own):.3f}",
                        f"{mean(muon) - mean(own):.3f}",
                    ]

                    rows.append(
                        [head, NAMES[name], f"{steps}", *shown, *errors(muon, own, episodes)]
                    )

    columns = ["head", "contender", "steps", "Muon", "own", "behind by"]
    return table([*columns, "error of episodes", "error of seeds"], rows)


def errors(muon: list[float], own: list[float], episodes: int) -> list[str]:
    """Standard errors of a difference of means: over episodes (binomial), and
    from how the seeds differ, where both have two."""
    drawn = sum(mean(x) * (1 - mean(x)) / (len(x) * episodes) for x in (muon, own))
    if min(len(muon), len(own)) < 2:
        return [f"{drawn**0.5:.3f}", ""]
    return [f"{drawn**0.5:.3f}", f"{sum(stdev(x) ** 2 / len(x) for x in (muon, own)) ** 0.5:.3f}"]


def long_table(cells: list[Cell], steps: int) -> str:
    """The best contender after its longer training."""
    rows = []
    for head in heads(cells):
        for name in NAMES:
            found = chosen(cells, head, name, steps)
            if found:
                rows.append([head, NAMES[name], *tell(found)])

    return table(["head", f"{steps} steps", "rate", "success", "told wrongly"], rows)


def strength_table(cells: list[Cell], steps: int) -> str:
    """Pion's strength on the action module: success, and what half-way through it let pass."""
    rows = []
    tried = [c for c in cells if (c["contender"], c["steps"], c["seed"]) == ("muon_pion", steps, 0)]

    tried = [c for c in tried if c["half"] and c["head"] == cells[0]["head"]]
    for cell in sorted(tried, key=lambda c: (c["action_scale"] != 1, c["rate"], c["strength"])):
        half = cell["half"]
        row = [cell["strength"], f"{cell['rate']:g}", f"{cell['action_scale']:g}"]
        row += [f"{cell['test']:.2f}", f"{cell['loss']:.3f}", f"{half['action_to_vision']:.2f}"]
        row += [f"{half[key]:.2f}" for key in ("passed_rank", "dead_blocks")]
        rows.append(row)

    columns = ["strength", "rate", "factor on the action rate", "success", "loss"]
    return table([*columns, "action step / vision step", "passed", "dead"], rows)


def gradient_table(cells: list[Cell]) -> str:
    """Effective rank, top share and SNR of each part's gradient, early and late."""
    rows = []
    for cell in cells:
        if not cell["probes"] or cell["head"] != cells[0]["head"] or cell["action_scale"] != 1:
            continue

        for place, probe in (("2 %", cell["probes"][1]), ("75 %", cell["probes"][-2])):
            row = [NAMES[cell["contender"]], f"{cell['rate']:g}", place]
            for part in PARTS:
                keys = [
                    f"gradient/{part}/{name}" for name in ("effective_rank", "top_share", "snr")
                ]
                row.append(" / ".join(f"{probe[key]:.2g}" for key in keys if key in probe))

            rows.append(row)

    return table(["contender", "rate", "at", *PARTS], rows)


def draw_rates(cells: list[Cell], steps: int, path: Path) -> None:
    """Success on validation scenes above, the loss below, over the rate."""
    plt = open_plots()
    names = heads(cells)

    figure, axes = plt.subplots(
        2, len(names), figsize=(5 * len(names), 5.6), sharex="col", squeeze=False
    )
    for column, head in zip(axes.T, names, strict=True):
        for axis, key in zip(column, ("validation", "loss"), strict=True):
            for name in NAMES:
                mine = at(cells, head, name, steps)
                if mine:
                    rates = sorted(mine)
                    axis.plot(
                        rates,
                        [mine[r][key] for r in rates],
                        "o-",
                        color=COLOURS[name],
                        label=NAMES[name],
                    )

            axis.set_xscale("log")

        column[0].set_ylim(-0.03, 1.03)
        column[0].set_title(f"{head} head, {steps} steps, one seed")
        column[1].set_xlabel("learning rate of matrices")

    axes[0][0].set_ylabel("success, validation scenes")
    axes[1][0].set_ylabel("training loss")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    save_picture(figure, path, dpi=110)


def draw_gradients(cells: list[Cell], path: Path) -> None:
    """Gradient statistics of each part over training, a line for each contender."""
    plt = open_plots()
    head = heads(cells)[0]

    best: dict[str, Cell] = {}
    for name in NAMES:
        mine = [c for c in cells if (c["head"], c["contender"]) == (head, name) and c["probes"]]
        mine = [c for c in mine if c["action_scale"] == 1]
        if mine:
            best[name] = max(mine, key=preference(mine))

    measures = {
        "effective_rank": "effective rank",
        "top_share": "top share",
        "snr": "SNR",
    }

    figure, axes = plt.subplots(
        len(measures), len(PARTS), figsize=(12, 7), sharex=True, sharey="row"
    )
    for row, (key, words) in zip(axes, measures.items(), strict=True):
        for axis, part in zip(row, PARTS, strict=True):
            for name, cell in best.items():
                points = [(p["step"], p.get(f"gradient/{part}/{key}")) for p in cell["probes"]]
                points = [point for point in points if point[1] is not None]
                if points:
                    axis.plot(
                        *zip(*points, strict=True),
                        "o-",
                        ms=3,
                        color=COLOURS[name],
                        label=NAMES[name],
                    )

            if key == "effective_rank":
                axis.set_title(part)

        row[0].set_ylabel(words)

    for axis in axes[-1]:
        axis.set_yscale("symlog", linthresh=0.1)
        axis.set_xlabel("step")

    named = axes[0][0].get_legend_handles_labels()
    figure.legend(
        *named,
        loc="upper center",
        ncol=len(best),
        frameon=False,
    )

    figure.tight_layout(rect=(0, 0, 1, 0.96))
    save_picture(figure, path, dpi=110)


def draw_learning(cells: list[Cell], steps: int, path: Path) -> None:
    """The training loss of the finalists, first seed."""
    plt = open_plots()
    names = heads(cells)

    figure, axes = plt.subplots(1, len(names), figsize=(5 * len(names), 3.6), squeeze=False)
    for axis, head in zip(axes[0], names, strict=True):
        for name in NAMES:
            found = chosen(cells, head, name, steps)
            if found:
                axis.plot(
                    *zip(*found[0]["losses"], strict=True),
                    color=COLOURS[name],
                    lw=1,
                    label=NAMES[name],
                )

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
