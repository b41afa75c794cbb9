"""Held-out accuracy of every run of the study, one panel for each rate.

python -m benchmarks.self_labelled.draw
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

HERE = Path(__file__).parent
COLOURS = {"vote": "tab:red", "mgrpo": "tab:blue", "grpo": "tab:green"}
WORDS = {"vote": "plain vote", "mgrpo": "M-GRPO, as published", "grpo": "gold answers (GRPO)"}


def main() -> None:
    runs = json.loads((HERE / "result.json").read_text())
    rates = sorted({run["lr"] for run in runs})
    figure, axes = pyplot.subplots(
        1, len(rates), figsize=(10, 3.4), constrained_layout=True, sharey=True
    )
    for axis, rate in zip(axes, rates):
        for run in (run for run in runs if run["lr"] == rate):
            name = run["contender"]
            label = WORDS[name] if run["seed"] == 0 else None
            axis.plot(*zip(*run["greedy"]), color=COLOURS[name], lw=1, label=label)
        axis.set(title=f"constant rate {rate:g}", xlabel="step", ylim=(0, 0.65))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("greedy accuracy, 200 held-out problems")
    axes[0].legend(fontsize=8)
    figure.savefig(HERE / "curves.png", dpi=100)


if __name__ == "__main__":
    main()
