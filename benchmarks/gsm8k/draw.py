"""The page's picture: accuracy and reward of the search and the headline, by step and by time.

python -m benchmarks.gsm8k.draw
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from benchmarks._lib.pictures import save_picture
from benchmarks._lib.results import read_json

HERE = Path(__file__).parent
BLOCK = 10  # steps in a mean of rewards or seconds
PARTS = ("search", "headline")
USES = {"search": "held-out training problems", "headline": "test problems, a seed a line"}
NAMES = {
    "muon": "Muon",
    "adamw": "AdamW",
    "lora_adamw": "LoRA + AdamW",
    "pion": "Pion",
    "trl": "plain TRL's defaults",
}


def main() -> None:
    runs = read_json(HERE / "cells.json.gz") + read_json(HERE / "unfinished.json.gz")
    runs = [run for run in runs if run["part"] in PARTS]
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), sharey="row", layout="constrained")

    colors: dict[str, str] = {}
    for run in sorted(runs, key=lambda run: (-PARTS.index(run["part"]), run["rate"])):
        label = f"{NAMES[run['arm']]} {run['rate']:.2g}, {USES[run['part']]}"
        is_new = label not in colors
        color = colors.setdefault(label, f"C{len(colors)}")
        draw(axes, run, color, label if is_new else None)

    axes[0, 0].set_ylabel("greedy accuracy")
    axes[1, 0].set_ylabel("mean reward")
    axes[1, 0].set_xlabel("step")
    axes[1, 1].set_xlabel("minutes of training steps, three runs at a time")
    axes[1, 1].legend(*axes[0, 0].get_legend_handles_labels(), fontsize=8)
    for axis in axes.flat:
        axis.set(xlim=(0, None), ylim=(0, None))
        axis.grid(alpha=0.3)

    save_picture(figure, HERE / "headline.png", dpi=100)


def draw(axes: Any, cell: dict[str, Any], color: str, label: str | None) -> None:
    """One run: accuracies above, rewards below; by step on the left, by time on the right."""
    minutes = minutes_at(cell)
    (_, before), *later = cell["curve"]  # the row of step 1 has the evaluation before it
    steps = [0, *(step for step, _ in later)]
    scores = [before, *(score for _, score in later)]
    axes[0, 0].plot(steps, scores, "o-", color=color, ms=3, lw=1, label=label)
    axes[0, 1].plot([at(minutes, step) for step in steps], scores, "o-", color=color, ms=3, lw=1)

    middles = [BLOCK * (k + 0.5) for k in range(len(cell["rewards"]))]
    axes[1, 0].plot(middles, cell["rewards"], color=color, lw=1)
    axes[1, 1].plot([at(minutes, step) for step in middles], cell["rewards"], color=color, lw=1)


def minutes_at(cell: dict[str, Any]) -> list[float]:
    """Minutes that the steps took, at the ends of blocks; 0 first."""
    seconds = [BLOCK * mean for mean in cell["step_seconds"]]
    return [total / 60 for total in accumulate(seconds, initial=0.0)]


def at(minutes: list[float], step: float) -> float:
    """The minute of a step, by straight lines between the blocks' ends."""
    block = min(int(step // BLOCK), len(minutes) - 2)
    share = step / BLOCK - block
    return minutes[block] + share * (minutes[block + 1] - minutes[block])


if __name__ == "__main__":
    main()
