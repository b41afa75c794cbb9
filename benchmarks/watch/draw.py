"""Every failed run of a corpus as a small curve, with its onset and the watch's stop.

    python -m benchmarks.watch.draw held_out

Reads the packed corpus alone; writes a picture of its name beside it.
"""

import argparse
import math

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks._lib.pictures import save_picture
from benchmarks.watch.evaluate import HERE, load, rows_of, watch_alarm
from benchmarks.watch.labels import accuracy, label, smooth

COLUMNS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the failed runs and where they were stopped")
    parser.add_argument("corpus", nargs="?", choices=("tuning", "held_out"), default="held_out")
    given = parser.parse_args()

    failed = []
    for run in load(given.corpus):
        truth = label(run)
        if truth.outcome == "failed":
            failed.append((run, truth.onset))
    failed.sort(key=lambda pair: (pair[0]["kind"], pair[0]["name"]))

    lines = math.ceil(len(failed) / COLUMNS)
    size = (15, 1.6 * lines)
    figure, axes = pyplot.subplots(
        lines, COLUMNS, figsize=size, constrained_layout=True, sharey=True
    )
    for axis in axes.flat[len(failed) :]:
        axis.axis("off")
    for axis, (run, onset) in zip(axes.flat, failed, strict=False):
        draw(axis, run, onset)

    save_picture(figure, HERE / f"{given.corpus}.png", dpi=80)


def draw(axis: Axes, run: dict, onset: int | None) -> None:
    """Right answers in training (black), what decides (grey), onset (dotted), stop (red)."""
    columns = run["columns"]
    training = smooth(columns["step"], columns["facts/correct"], 5)
    axis.plot(*zip(*training, strict=True), color="black", lw=1.2)
    axis.plot(*zip(*accuracy(run), strict=True), color="grey", lw=0.8, marker=".", ms=3)
    if onset is not None:
        axis.axvline(onset, color="tab:blue", ls=":", lw=1)

    words = "NOT STOPPED"
    alarm = watch_alarm(rows_of(run))
    if alarm:
        step, detector = alarm
        axis.axvline(step, color="tab:red", lw=1.2)
        words = detector.replace("_", " ")

    axis.set_title(f"{run['name']}\n{words}", fontsize=7)
    axis.tick_params(labelsize=6)
    axis.set_ylim(0, 0.7)


if __name__ == "__main__":
    main()
