"""The page's table, held-out accuracy over training time of the reported runs, at one machine's
pace or by the clock, and the median time to lower accuracies.

python -m benchmarks.speedrun.draw
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from benchmarks._lib.pictures import save_picture
from benchmarks._lib.results import read_json
from benchmarks.speedrun.protocol import CONSECUTIVE, TARGET, key_of, shape_of, table

HERE = Path(__file__).parent
LEVELS = (0.5, 0.75)
PACE = "32 prompts of 16 completions"  # the row of paces.json that the page quotes
SHOWN = {
    "ours_16": ("arith_smollm2_fast", "C0", "ours"),
    "stock_4e-05_650": ("plain TRL, AdamW 4e-5", "C1", "trl"),
}


def seconds_to(level: float, seconds: Sequence[float], scores: Sequence[float]) -> float:
    """The first of `CONSECUTIVE` evaluations at or above a level, as for the target."""
    ends = range(len(scores) - CONSECUTIVE + 1)
    reached = (k for k in ends if min(scores[k : k + CONSECUTIVE]) >= level)
    return next((seconds[k] for k in reached), math.inf)


def main() -> None:
    runs = read_json(HERE / "report.json.gz")
    [pace] = [row for row in read_json(HERE / "paces.json") if row["code"] == PACE]
    paces = {shape_of(name): pace[arm] for name, (_, _, arm) in SHOWN.items()}
    print(table({key_of(run): run for run in runs if not run.get("alone")}, paces))

    figure, axis = pyplot.subplots(figsize=(9, 4), layout="constrained")
    for name, (label, color, arm) in SHOWN.items():
        first, later = pace[arm]
        reported = [run for run in runs if run["name"] == name and run["use"] == "reporting"]
        for repeat in (False, True):
            chosen = [run for run in reported if run.get("alone", False) == repeat]
            curves = []
            for k, run in enumerate(chosen):
                steps, scores = zip(*(row[:2] for row in run["curve"]))
                seconds = [first + (step - 1) * later if step else 0.0 for step in steps]
                if repeat:
                    seconds = [row[2] for row in run["curve"]]

                curves.append((seconds, scores))
                note = ", again by the clock" if repeat else f", {len(chosen)} fresh seeds"
                axis.plot(
                    seconds,
                    scores,
                    color,
                    ls="--" if repeat else "-",
                    lw=1,
                    label=None if k else label + note,
                )

                axis.plot(
                    seconds[-1],
                    scores[-1],
                    "o",
                    color=color,
                    ms=3,
                )

            for level in LEVELS if curves else ():
                times = [seconds_to(level, *curve) for curve in curves]
                print(f"{label}, {len(chosen)} runs: {level:g} after {median(times):.0f} s")

    axis.axhline(TARGET, color="gray", lw=1, ls=":")
    axis.set(
        xlabel="seconds of training on one H200",
        ylabel="greedy accuracy, 512 problems",
        xlim=(0, None),
        ylim=(0, 1),
    )

    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    save_picture(figure, HERE / "report.png", dpi=100)


if __name__ == "__main__":
    main()
