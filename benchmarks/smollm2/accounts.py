"""Pages on gradient spectra, majority-vote pseudo-labels and the lost answer format."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from benchmarks.smollm2.plan import PROJECTIONS, Cell
from benchmarks.smollm2.tables import column_end, mean_end, names, of, table

FILTERS = ("muon", "k_p=4", "k_p=3", "k_p=2", "k_p=1", "k_p=0", "noise", "measured", "cutoff=0.3",
           "cutoff=0.4", "cutoff=0.5", "aligned")  # fmt: skip
BOUNDS = ("gradient", "best")  # the gradient as it is, and the best number of directions


def spectrum(cells: list[Cell]) -> str:
    """Means over all blocks, then by projection: rank, top share, SNR, edges, filters' cosines."""
    parts = ["## Cosine with other data, means over all blocks", "", all_means(cells)]
    for size in batch_sizes(cells):
        parts += [f"## Gradient of {size} batch{'es' * (size != '1')}", ""]
        rows, worth = [], []
        for cell in cells:
            for projection in PROJECTIONS:
                for view in ("whole", "heads"):
                    blocks = [b for b in cell["blocks"] if b["view"] == view
                              and b["block"].endswith(projection)]  # fmt: skip
                    if blocks:
                        label = [source_of(cell), str(cell["steps"]), f"{projection}, {view}"]
                        rows.append(label + spectrum_row(blocks, size))
                        worth.append(label + cosine_row(blocks, size))
        head = ["source", "step", "block", "shape", "effective rank", "top share", "SNR",
                "noise edge", "noise's own largest", "over the gradient's norm"]  # fmt: skip
        parts += [table(head, rows), "Cosine with other data (directions passed):", ""]
        parts.append(table(["source", "step", "block", *FILTERS, "gradient itself", "best"], worth))
    return "\n".join(parts)


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


def spectrum_row(blocks: list[dict[str, Any]], size: str) -> list[str]:
    mean = {key: fmean(b[size][key] for b in blocks)
            for key in ("effective_rank", "top_share", "noise_top", "noise_over_all")}  # fmt: skip
    m, n = blocks[0]["shape"]
    snr = fmean(block["snr"] for block in blocks)
    return [f"{m}x{n}", f"{mean['effective_rank']:.0f}", f"{mean['top_share']:.2f}", f"{snr:.3f}",
            f"{blocks[0]['edge']:.3f}", f"{mean['noise_top']:.3f}",
            f"{mean['noise_over_all']:.3f}"]  # fmt: skip


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


def horizon(cells: list[Cell]) -> str:
    """Best and last accuracy of each source of labels, as the published table has them."""
    warm = of(cells, stage="warm")
    rows = []
    for name in names([cell for cell in cells if cell["stage"] != "warm"], "stage"):
        for cell in of(cells, stage=name):
            best = max(cell["curve"], key=lambda point: point[1])
            rows.append([
                name, f"{cell['rate']:g}", str(cell["seed"]), str(cell["steps_done"]),
                f"{best[1]:.3f} ({best[0]})", f"{cell['accuracy']:.3f}",
                # Gold answers have no votes.
                mean_end([cell], "votes/label_accuracy"),
                f"{column_end(cell, 'answers/top_share'):.2f}",
                f"{column_end(cell, 'entropy'):.3f}", cell["health"][2],
            ])  # fmt: skip
    head = ["labels", "rate", "seed", "steps", "best (step)", "last", "right labels",
            "commonest answer", "entropy", "watch"]  # fmt: skip
    begun = [
        f"Warm start: {cell['accuracy']:.3f} after {cell['curve'][-1][0]} supervised steps.\n"
        for cell in warm
    ]
    return "\n".join([*begun, table(head, rows)])


def box(cells: list[Cell]) -> str:
    """Format and accuracy under the two rewards, and what the watch says of each."""
    rows, stories = [], []
    for cell in cells:
        formatted = [value for _, value in cell["rows"]["facts/formatted"]]
        result = cell["result"] or {}
        end = result.get("after", {}).get("value")
        begin = result.get("before", {}).get("value")
        rows.append([
            cell["stage"], f"{fmean(formatted[:5]):.2f}", f"{fmean(formatted[-5:]):.2f}",
            "" if begin is None else f"{begin:.3f}", "stopped" if end is None else f"{end:.3f}",
        ])  # fmt: skip
        stories += [f"### {cell['stage']}", "", cell["story"].split("## The watch")[-1].strip(), ""]
    head = ["examples, reward, guard", "in the box at first", "at the end", "accuracy before",
            "after"]  # fmt: skip
    return "\n".join([table(head, rows), "## What the watch says", "", *stories])
