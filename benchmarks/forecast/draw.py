"""Draws how the forecasts of result.json.gz compare with what came.

python -m benchmarks.forecast.draw
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks._lib.pictures import save_picture
from benchmarks._lib.results import read_json
from mesotron.watch.detectors import wilson

HERE = Path(__file__).parent
BINS = (0.0, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
SHARE = 0.2
LEAST_CASES = 5  # of a bin
COLORS = {"learn": "tab:green", "plateau": "tab:blue", "collapse": "tab:red"}


def main() -> None:
    cases = read_json(HERE / "result.json.gz")["cases"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)

    left.plot([0, 1], [0, 1], color="grey", lw=0.8)
    for outcome in COLORS:
        draw_chances(left, cases, outcome)
    left.set(xlabel="probability that was stated", ylabel="share that came")
    left.set_title("outcomes, asked at 10, 20 and 50%")
    left.legend()

    draw_intervals(right, [case for case in cases if case["share"] == SHARE])
    save_picture(figure, HERE / "calibration.png", dpi=80)


def draw_chances(axis: Axes, cases: Sequence[dict[str, Any]], outcome: str) -> None:
    """Of each bin of stated probabilities the mean, and how often the outcome came."""
    stated = []
    came = []
    for low, high in pairwise(BINS):
        inside = [case for case in cases if low <= case["chances"][outcome] < high]
        if len(inside) < LEAST_CASES:
            continue

        right = sum(case["outcome"] == outcome for case in inside)
        stated.append(sum(case["chances"][outcome] for case in inside) / len(inside))
        came.append(right / len(inside))
        axis.vlines(stated[-1], *wilson(right, len(inside) - right), color=COLORS[outcome], lw=1)

    axis.plot(stated, came, "o-", color=COLORS[outcome], label=outcome)


def draw_intervals(axis: Axes, cases: Sequence[dict[str, Any]]) -> None:
    """The end of every run in units of its reward's range, from the middle of its forecast."""
    ordered = sorted(cases, key=lambda case: (case["end"] - case["interval"][0]) / case["scale"])
    for k, case in enumerate(ordered):
        middle, low, high = case["interval"]
        ends = [(x - middle) / case["scale"] for x in (low, high)]
        end = (case["end"] - middle) / case["scale"]
        is_inside = ends[0] <= end <= ends[1]
        axis.vlines(k, *ends, color="lightsteelblue", lw=2)
        axis.plot(k, end, ".", ms=4, color="black" if is_inside else "tab:red")

    axis.set(ylim=(-1.2, 1.5), xlabel="runs not used for fitting", ylabel="end less forecast")
    axis.set_title(f"80% intervals, asked at {SHARE:.0%}; red: outside")


if __name__ == "__main__":
    main()
