"""The page's table, held-out accuracy over training time of the reported runs, at one machine's
pace or by the clock, and the median time to lower accuracies.

python -m benchmarks.speedrun.draw
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from benchmarks._lib.pictures import save_picture
from benchmarks._lib.results import read_json
from benchmarks._lib.rows import Row, by_key, where
from benchmarks.speedrun.protocol import CONSECUTIVE, TARGET, key_of, report, seconds_at, shape_of

HERE = Path(__file__).parent
LEVELS = (0.5, 0.75)
PACE = "32 prompts of 16 completions"  # the row of paces.json that the page quotes
SHOWN = {
    "ours_16": ("arith_smollm2_fast", "C0", "ours"),
    "stock_4e-05_650": ("plain TRL, AdamW 4e-5", "C1", "trl"),
}


Curve = tuple[list[float], list[float]]  # seconds and accuracies


def main() -> None:
    runs = read_json(HERE / "report.json.gz")
    (pace,) = where(read_json(HERE / "paces.json"), code=PACE)
    paces = {shape_of(name): pace[arm] for name, (_, _, arm) in SHOWN.items()}
    print(report(by_key(where(runs, alone=None), key_of), paces))

    figure, axis = pyplot.subplots(figsize=(9, 4), layout="constrained")
    for name, (label, color, arm) in SHOWN.items():
        reported = where(runs, name=name, use="reporting")
        alone = where(reported, alone=True)
        others = where(reported, alone=None)

        at_pace = [curve_at(run, pace[arm]) for run in others]
        note = f"{label}, {len(others)} fresh seeds"
        draw(axis, at_pace, color, "-", note)
        print_times(label, at_pace)

        by_clock = [curve_by_clock(run) for run in alone]
        draw(axis, by_clock, color, "--", f"{label}, again by the clock")
        print_times(label, by_clock)

    axis.axhline(TARGET, color="gray", lw=1, ls=":")
    axis.set(xlabel="seconds of training on one H200", ylabel="greedy accuracy, 512 problems")
    axis.set(xlim=(0, None), ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    save_picture(figure, HERE / "report.png", dpi=100)


def curve_at(run: Row, pace: Sequence[float]) -> Curve:
    """Accuracies at the seconds that the steps take at a pace."""
    steps = [point[0] for point in run["curve"]]
    seconds = [seconds_at(step, pace) if step else 0.0 for step in steps]
    return seconds, [point[1] for point in run["curve"]]


def curve_by_clock(run: Row) -> Curve:
    seconds = [point[2] for point in run["curve"]]
    return seconds, [point[1] for point in run["curve"]]


def draw(axis: Any, curves: list[Curve], color: str, style: str, label: str) -> None:
    """A line for each run with a dot at its end; the first has the label."""
    for k, (seconds, scores) in enumerate(curves):
        axis.plot(seconds, scores, color, ls=style, lw=1, label=None if k else label)
        axis.plot(seconds[-1], scores[-1], "o", color=color, ms=3)


def print_times(label: str, curves: list[Curve]) -> None:
    """The median time to lower accuracies."""
    for level in LEVELS if curves else ():
        times = [seconds_to(level, *curve) for curve in curves]
        print(f"{label}, {len(curves)} runs: {level:g} after {median(times):.0f} s")


def seconds_to(level: float, seconds: Sequence[float], scores: Sequence[float]) -> float:
    """The first of `CONSECUTIVE` evaluations at or above a level, as for the target."""
    for k in range(len(scores) - CONSECUTIVE + 1):
        if min(scores[k : k + CONSECUTIVE]) >= level:
            return seconds[k]
    return math.inf


if __name__ == "__main__":
    main()
