"""Held-out accuracy of the runs of a result: the tuning seed on the left, reporting seeds on the
right.

python -m benchmarks.self_labelled.draw [RESULT.json.gz PICTURE.png]
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks._lib.pictures import save_picture
from benchmarks._lib.results import read_json
from benchmarks._lib.rows import Row, distinct, where
from benchmarks.self_labelled.run import CONTENDERS

HERE = Path(__file__).parent
WORDS = {
    "vote": "plain vote",
    "mgrpo": "M-GRPO",
    "mgrpo_slow": "M-GRPO, momentum 0.999",
    "corewarding": "Co-rewarding-II",
    "slow": "Co-rewarding-II, momentum 0.999",
    "sure": "unanimous labels",
    "sure_slow": "unanimous labels, momentum 0.999",
    "sure_open": "unanimous labels, entropy kept",
    "mgrpo_skip": "M-GRPO, no step without a signal",
    "sure_open_skip": "entropy kept, no step without a signal",
    "grpo": "gold labels",
}


def main() -> None:
    source, picture = sys.argv[1:] or (HERE / "result.json.gz", HERE / "curves.png")
    runs = read_json(Path(source))
    uses = sorted(distinct(runs, "use"), reverse=True)  # tuning first
    figure, (axes,) = pyplot.subplots(
        1, len(uses), figsize=(11, 4), layout="constrained", sharex=True, sharey=True, squeeze=False
    )

    names = [name for name in CONTENDERS if where(runs, contender=name)]
    colors = {name: f"C{k}" for k, name in enumerate(names)}
    for axis, use in zip(axes, uses, strict=True):
        draw(axis, where(runs, use=use), colors)

    for name, color in colors.items():
        axes[0].plot([], [], color=color, label=WORDS[name])
    axes[0].set_ylabel("greedy accuracy on held-out problems")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    save_picture(figure, Path(picture), dpi=100)


def draw(axis: Axes, runs: list[Row], colors: dict[str, str]) -> None:
    """The runs of one use: a line for each with a dot at its end."""
    for run in runs:
        color = colors[run["contender"]]
        axis.plot(*zip(*run["greedy"], strict=True), color=color, lw=1)
        axis.plot(*run["greedy"][-1], "o", color=color, ms=4)

    seeds = ", ".join(map(str, sorted(distinct(runs, "seed"))))
    axis.set(title=f"{runs[0]['use']}: seed {seeds}", xlabel="step", ylim=(0, 1.02))
    axis.grid(alpha=0.3)


if __name__ == "__main__":
    main()
