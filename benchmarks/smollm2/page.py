"""The study's results as one page for each question, with its tables and plots.

    python benchmarks/smollm2/page.py results.json

Writes NAME.md and NAME.png beside this file for each part that has cells. What the numbers mean is
written by hand in findings/NAME.md and put under the page's title.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from draw import draw_box, draw_horizon, draw_map, draw_spectrum, draw_tournament
from plan import PROJECTIONS, Cell, accuracy

from mesotron.compare.inference import Difference, bootstrap, holm, paired_test
from mesotron.compare.kind import is_for_choosing

HERE = Path(__file__).parent
FILTERS = ("muon", "k_p=4", "k_p=3", "k_p=2", "k_p=1", "k_p=0", "noise")
BOUNDS = ("gradient", "best")  # the gradient as it is, and the best number of directions


def main() -> None:
    found = json.loads(Path(sys.argv[1]).read_text())
    (HERE / "results.json").write_text(json.dumps(found))
    for name, (title, part, write, draw) in PAGES.items():
        cells = [cell for cell in found["cells"] if cell["part"] == part]
        if not cells:
            continue
        draw(cells, HERE / f"{name}.png")
        findings = HERE / "findings" / f"{name}.md"
        said = [findings.read_text().strip(), ""] if findings.exists() else []
        page = [f"# {title}", "", circumstances(found), "", *said, write(cells)]
        page += ["", f"![{title}]({name}.png)", ""]
        (HERE / f"{name}.md").write_text("\n".join(page))
        print(HERE / f"{name}.md")


def circumstances(found: dict[str, Any]) -> str:
    """How the numbers came about, the same on every page."""
    settings, machine = found["settings"], found["machine"]
    own = f" with `--set {' '.join(settings['set'])}`" if settings["set"] else ""
    return (
        f"`benchmarks/smollm2/study.py --workers {settings['workers']}`{own}; {machine['device']}, "
        f"torch {machine['torch']}, Transformers {machine['transformers']}; everything as data: "
        "[results.json](results.json). Sums of three digits (recipe `arith_smollm2`), greedy "
        "accuracy on 512 held-out questions; float32 weights, bfloat16 autocast (float32 alone in "
        "the lost box, which is `mesotron train` itself)."
    )


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def of(cells: list[Cell], **wanted: Any) -> list[Cell]:
    """Cells with these values."""
    return [cell for cell in cells if all(cell.get(k) == value for k, value in wanted.items())]


def names(cells: list[Cell], key: str = "optim") -> list[str]:
    return list(dict.fromkeys(cell[key] for cell in cells))


# The tournament.


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
    dead = cell["diverged"] or cell["health"][0] in ("dead", "diverged")
    return f"{accuracy(cell, choosing=True):.3f}{'†' * dead}"


def judged(cells: list[Cell]) -> np.ndarray:
    """[seeds, problems] of the half that judges."""
    kept = [k for k in range(len(cells[0]["solved"])) if not is_for_choosing(f"sums-eval-{k}")]
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
    head = [f"{finals[0]['steps']} steps", "rate", "judging half", "all 512, seed by seed",
            "behind the first", "p (Holm)", "entropy at the end", "dead blocks"]  # fmt: skip
    return table(head, rows)


def paired_tests(
    by_name: dict[str, list[Cell]], order: list[str]
) -> dict[tuple[str, str], tuple[Difference, float]]:
    """Every pair by seeds that both have, corrected for all pairs."""
    found = {}
    for first, second in combinations(order, 2):
        pairs = [{cell["seed"]: cell for cell in by_name[name]} for name in (first, second)]
        seeds = sorted(pairs[0].keys() & pairs[1].keys())
        if seeds:
            better, worse = (judged([cells[seed] for seed in seeds]) for cells in pairs)
            found[first, second] = paired_test(better - worse)
    corrected = holm([difference.p for difference in found.values()])
    return {pair: (value, p) for (pair, value), p in zip(found.items(), corrected, strict=True)}


def column_end(cell: Cell, name: str) -> float:
    """The mean of a metric's last five values; NaN if it was not logged."""
    values = [value for _, value in cell["rows"].get(name, [])][-5:]
    return fmean(values) if values else float("nan")


def single_table(cells: list[Cell]) -> str:
    rows = [
        [cell["optim"], f"{cell['rate']:g}", str(cell["steps"]), f"{accuracy(cell):.3f}",
         f"{column_end(cell, 'entropy'):.2f}", cell["health"][2]]
        for cell in cells
    ]  # fmt: skip
    return table(["optimizer", "rate", "steps", "accuracy", "entropy at the end", "watch"], rows)


def step_map(cells: list[Cell]) -> str:
    """One table for each optimizer and objective: shapes of a rollout by rate."""
    parts = []
    for objective in names(cells, "objective"):
        for name in names(of(cells, objective=objective)):
            mine = of(cells, objective=objective, optim=name)
            rates = sorted({cell["rate"] for cell in mine})
            rows = []
            for shape in dict.fromkeys(tuple(cell["set"]) for cell in mine):
                here = {cell["rate"]: cell for cell in mine if tuple(cell["set"]) == shape}
                prompts, updates = (word.split("=")[1] for word in shape)
                rows.append([f"{prompts} prompts, {updates} updates",
                             *(map_entry(here.get(rate)) for rate in rates)])  # fmt: skip
            parts += [f"## {name}, {objective}", ""]
            parts.append(table(["rollout", *(f"{rate:g}" for rate in rates)], rows))
    return "\n".join(["Accuracy, entropy at the end, median SNR; † died by the watch.", "", *parts])


def map_entry(cell: Cell | None) -> str:
    if cell is None:
        return ""
    ratios = [value for _, value in cell["rows"].get("gradient/snr", [])]
    snr = f", {median(ratios):.2g}" if ratios else ""
    dead = cell["diverged"] or cell["health"][0] in ("dead", "diverged")
    return f"{accuracy(cell):.3f}{'†' * dead}, {column_end(cell, 'entropy'):.2f}{snr}"


# The other pages.


def spectrum(cells: list[Cell]) -> str:
    """By projection, mean over layers: rank, top share, SNR, edges, then the filters' cosines."""
    parts = []
    for size in batch_sizes(cells):
        parts += [f"## Gradient of {size} batch{'es' * (size != '1')} of 32 prompts", ""]
        rows, worth = [], []
        for cell in cells:
            for projection in PROJECTIONS:
                for view in ("whole", "heads"):
                    blocks = [b for b in cell["blocks"] if b["view"] == view
                              and b["block"].endswith(projection)]  # fmt: skip
                    if blocks:
                        label = [cell["stage"], str(cell["steps"]), f"{projection}, {view}"]
                        rows.append(label + spectrum_row(blocks, size))
                        worth.append(label + cosine_row(blocks, size))
        head = ["source", "step", "block", "shape", "effective rank", "top share", "SNR",
                "noise edge", "noise's own largest", "over the gradient's norm"]  # fmt: skip
        parts += [table(head, rows), "Cosine with other data (directions passed):", ""]
        parts.append(table(["source", "step", "block", *FILTERS, "gradient itself", "best"], worth))
    return "\n".join(parts)


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
                name, str(cell["seed"]), str(cell["steps_done"]), f"{best[1]:.3f} ({best[0]})",
                f"{cell['accuracy']:.3f}",
                f"{column_end(cell, 'votes/label_accuracy'):.2f}",
                f"{column_end(cell, 'answers/top_share'):.2f}",
                f"{column_end(cell, 'entropy'):.3f}", cell["health"][2],
            ])  # fmt: skip
    head = ["labels", "seed", "steps", "best (step)", "last", "right labels", "commonest answer",
            "entropy", "watch"]  # fmt: skip
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


Page = tuple[str, str, Callable[[list[Cell]], str], Callable[[list[Cell], Path], None]]
PAGES: dict[str, Page] = {
    "tournament": ("The tournament on SmolLM2", "tournament", tournament, draw_tournament),
    "map": ("Step size, batch size and updates per rollout", "map", step_map, draw_map),
    "spectrum": ("What the gradients are made of", "spectrum", spectrum, draw_spectrum),
    "horizon": ("Labels by vote, over a long horizon", "horizon", horizon, draw_horizon),
    "box": ("The lost box", "box", box, draw_box),
}


if __name__ == "__main__":
    main()
