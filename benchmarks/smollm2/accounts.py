"""Tables on gradient spectra, step sizes and levers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks._lib.rows import distinct, mean_of, table, where
from benchmarks.smollm2.plan import Cell, accuracy, died, map_row, map_rows
from benchmarks.smollm2.tables import column_end, mean_ends

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

Block = dict[str, Any]


def spectrum(cells: list[Cell]) -> str:
    """Rank, signal and noise by source, then the filters' cosines; means over blocks."""
    between = "Cosine with the gradient of other data (directions passed):\n"
    return "\n".join([sources(cells), between, all_means(cells)])


def sources(cells: list[Cell]) -> str:
    """A row for each source and step: the gradient of one batch, whole matrices."""
    rows = []
    for cell in cells:
        blocks = where(cell["blocks"], view="whole")
        of_one_batch = [block["1"] for block in blocks]
        row = [
            source_of(cell),
            str(cell["steps"]),
            f"{mean_of(of_one_batch, 'effective_rank'):.0f}",
            f"{mean_of(of_one_batch, 'top_share'):.2f}",
            f"{mean_of(blocks, 'snr'):.3f}",
            f"{mean_of(of_one_batch, 'noise_top'):.2f}",
            f"{mean_of(blocks, 'edge'):.3f}",
        ]
        rows.append(row)

    head = ["source", "step", "effective rank", "top share", "SNR"]
    return table([*head, "top of the noise", "of white noise"], rows)


def all_means(cells: list[Cell]) -> str:
    """A row for each source, step, view and number of batches."""
    rows = []
    for cell in cells:
        for view in ("whole", "heads"):
            blocks = where(cell["blocks"], view=view)
            for size in batch_sizes(cell):
                label = [source_of(cell), str(cell["steps"]), view, size]
                rows.append(label + cosine_row([block[size] for block in blocks]))

    head = ["source", "step", "view", "batches", *FILTERS, "gradient itself", "best"]
    return table(head, rows)


def source_of(cell: Cell) -> str:
    """Supervised or reinforcement learning, of what if not of sums, of how many if not of 32."""
    words = [cell["stage"]]
    if cell.get("task"):
        words.append(cell["task"])

    prompts = cell.get("prompts", 32)
    if prompts != 32:
        words.append(f"{prompts} prompts")
    return ", ".join(words)


def batch_sizes(cell: Cell) -> list[str]:
    return [key for key in cell["blocks"][0] if key.isdigit()]


def cosine_row(blocks: Sequence[Block]) -> list[str]:
    """Of each filter the mean cosine and the directions that it passes."""
    row = []
    for name in FILTERS:
        if name not in blocks[0]["passed"]:  # an older result has not measured it
            row.append("")
            continue
        cosine = mean_in(blocks, "cosine", name)
        passed = mean_in(blocks, "passed", name)
        row.append(f"{cosine:.3f} ({passed:.0f})")

    plain, best = (mean_in(blocks, "cosine", name) for name in BOUNDS)
    return [*row, f"{plain:.3f}", f"{best:.3f} ({mean_of(blocks, 'best_rank'):.0f})"]


def mean_in(blocks: Sequence[Block], group: str, name: str) -> float:
    return fmean(block[group][name] for block in blocks)


def step_map(cells: list[Cell]) -> str:
    """A row for each optimizer and shape of a rollout, a column for each factor of the rate."""
    factors = sorted(distinct(cells, "stage"), key=lambda stage: float(stage[1:]))
    rows = []
    for name in distinct(cells, "optim"):
        for row, own in map_rows(where(cells, optim=name)).items():
            entries = []
            for stage in factors:
                entries += map(map_entry, where(own, stage=stage))
            rows.append([name, map_row(*row), *entries])

    head = ["optimizer", "rollout", *(f"{stage[1:]} times its best rate" for stage in factors)]
    return f"Accuracy, entropy at the end; † dead by the watch.\n\n{table(head, rows)}"


def map_entry(cell: Cell) -> str:
    return f"{accuracy(cell):.3f}{'†' * died(cell)}, {column_end(cell, 'entropy'):.2f}"


def levers(cells: list[Cell]) -> str:
    """Each change next to the unchanged recipe, by accuracy after equally many steps."""
    best_first = sorted(cells, key=lambda cell: -cell["accuracy"])
    rows = []
    for name in distinct(best_first, "stage"):
        own = sorted(where(cells, stage=name), key=lambda cell: cell["seed"])
        ends = [f"{cell['accuracy']:.3f}{cut_at(cell)}" for cell in own]
        row = [
            name,
            f"{own[0]['rate']:g} (x{own[0]['gain']:g})",
            on_the_way(own),
            ", ".join(ends),
            *mean_ends(own, ["groups/zero_signal", "entropy", "completions/mean_length"]),
        ]
        rows.append(row)

    head = ["change", "rate", "accuracy (at step), mean of the seeds", "last, seed by seed"]
    return table([*head, "groups without signal", "entropy", "tokens"], rows)


def on_the_way(cells: list[Cell]) -> str:
    """The evaluations that all seeds have; the first is of the untrained model."""
    curves = [dict(cell["curve"][1:]) for cell in cells]
    points = []
    for step in curves[0]:
        if all(step in curve for curve in curves):
            mean = fmean(curve[step] for curve in curves)
            points.append(f"{mean:.3f} ({step})")
    return ", ".join(points)


def cut_at(cell: Cell) -> str:
    """The step at which time was up, if it was."""
    if cell["steps_done"] < cell["steps"]:
        return f" (step {cell['steps_done']})"

    return ""
