"""Held-out accuracy of the runs of a result: the tuning seed on the left, reporting seeds on the
right.

python -m benchmarks.self_labelled.draw [RESULT.json.gz PICTURE.png]
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from benchmarks._lib.pictures import save_picture
from benchmarks._lib.results import read_json
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
    uses = [use for use in ("tuning", "reporting") if any(run["use"] == use for run in runs)]
    figure, (axes,) = pyplot.subplots(
        1, len(uses), figsize=(11, 4), layout="constrained", sharex=True, sharey=True, squeeze=False
    )
    shown = {run["contender"] for run in runs}

    colors = {name: f"C{k}" for k, name in enumerate(x for x in CONTENDERS if x in shown)}
    for axis, use in zip(axes, uses):
        chosen = [run for run in runs if run["use"] == use]
        for run in chosen:
            axis.plot(*zip(*run["greedy"]), color=colors[run["contender"]], lw=1)
            axis.plot(*run["greedy"][-1], "o", color=colors[run["contender"]], ms=4)

        seeds = ", ".join(map(str, sorted({run["seed"] for run in chosen})))
        axis.set(
            title=f"{use}: seed {seeds}",
            xlabel="step",
            ylim=(0, 1.02),
        )

        axis.grid(alpha=0.3)

    for name in colors:
        axes[0].plot([], [], color=colors[name], label=WORDS[name])

    axes[0].set_ylabel("greedy accuracy on held-out problems")
    figure.legend(
        loc="outside lower center",
        ncols=4,
        fontsize=8,
    )

    save_picture(figure, Path(picture), dpi=100)


if __name__ == "__main__":
    main()
