"""Tables of the pages on gradient spectra, step sizes and levers."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from benchmarks.smollm2.plan import Cell, accuracy, died, map_row, map_rows
from benchmarks.smollm2.tables import column_end, mean_end, names, of, table

FILTERS = (
    "muon",
    "k_p=4",
    "k_p=3",
    "k_p=2",
    "k_p=1",
    "k_p=0",
    "noise",
    "measured",
    "cutoff=0.3",
    "cutoff=0.4",
    "cutoff=0.5",
    "aligned",
)
BOUNDS = ("gradient", "best")  # the gradient as it is, and the best number of directions


def spectrum(cells: list[Cell]) -> str:
    """Rank, signal and noise by source, then the filters' cosines; means over blocks."""
    parts = [sources(cells), "Cosine with the gradient of other data (directions passed):", ""]
    return "\n".join([*parts, all_means(cells)])


def sources(cells: list[Cell]) -> str:
    """A row for each source and step: the gradient of one batch, whole matrices."""
    rows = []
    for cell in cells:
        blocks = [block for block in cell["blocks"] if block["view"] == "whole"]
        means = [
            fmean(b["1"][key] for b in blocks)
            for key in ("effective_rank", "top_share", "noise_top")
        ]

        snr, edge = (fmean(block[key] for block in blocks) for key in ("snr", "edge"))
        rows.append(
            [
                source_of(cell),
                str(cell["steps"]),
                f"{means[0]:.0f}",
                f"{means[1]:.2f}",
                f"{snr:.3f}",
                f"{means[2]:.2f}",
                f"{edge:.3f}",
            ]
        )

    head = [
        "source",
        "step",
        "effective rank",
        "top share",
        "SNR",
        "top of the noise",
        "of white noise",
    ]
    return table(head, rows)


def all_means(cells: list[Cell]) -> str:
    """A row for each source, step, view and number of batches."""
    rows = []
    for cell in cells:
        for view in ("whole", "heads"):
            blocks = [block for block in cell["blocks"] if block["view"] == view]
            for size in batch_sizes([cell]):
                label = [source_of(cell), str(cell["steps"]), view, size]
                rows.append(label + cosine_row(blocks, size))

    head = ["source", "step", "view", "batches", *FILTERS, "gradient itself", "best"]
    return table(head, rows)


def source_of(cell: Cell) -> str:
    """Supervised or reinforcement learning, of what if not of sums, of how many if not of 32."""
    prompts = cell.get("prompts", 32)
    few = f"{prompts} prompts" if prompts != 32 else None
    return ", ".join([cell["stage"], *filter(None, [cell.get("task"), few])])


def batch_sizes(cells: list[Cell]) -> list[str]:
    return [key for key in cells[0]["blocks"][0] if key.isdigit()]


def cosine_row(blocks: list[dict[str, Any]], size: str) -> list[str]:
    shown = [
        f"{fmean(b[size]['cosine'][name] for b in blocks):.3f} "
        f"({fmean(b[size]['passed'][name] for b in blocks):.0f})"
        if name in blocks[0][size]["passed"]
        else ""  # an older result has not measured it
        for name in FILTERS
    ]

    plain, best = (f"{fmean(b[size]['cosine'][name] for b in blocks):.3f}" for name in BOUNDS)
    return [*shown, plain, f"{best} ({fmean(b[size]['best_rank'] for b in blocks):.0f})"]


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
        rows.append(
            [
                name,
                f"{mine[0]['rate']:g} (x{mine[0]['gain']:g})",
                on_the_way(mine),
                ", ".join(f"{cell['accuracy']:.3f}{cut_at(cell)}" for cell in mine),
                *(
                    mean_end(mine, metric)
                    for metric in ("groups/zero_signal", "entropy", "completions/mean_length")
                ),
            ]
        )

    head = [
        "change",
        "rate",
        "accuracy (at step), mean of the seeds",
        "last, seed by seed",
        "groups without signal",
        "entropy",
        "tokens",
    ]
    return table(head, rows)


def on_the_way(mine: list[Cell]) -> str:
    """The evaluations that all seeds have; the first is of the untrained model."""
    curves = [dict(cell["curve"][1:]) for cell in mine]
    common = [step for step in curves[0] if all(step in curve for curve in curves)]
    return ", ".join(f"{fmean(curve[step] for curve in curves):.3f} ({step})" for step in common)


def cut_at(cell: Cell) -> str:
    """The step at which time was up, if it was."""
    return f" (step {cell['steps_done']})" if cell["steps_done"] < cell["steps"] else ""
