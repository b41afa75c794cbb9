"""Draws singular_values.png: the singular values of one momentum before and after each filter.

Run from the root of a clone: python docs/assets/singular_values.py
"""

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from mesotron.spectral import high_pass, muon, pion, response

SHAPE, STRONG = (64, 256), (90.0, 65.0, 45.0)


def main() -> None:
    rng = np.random.default_rng(0)
    U, V = (np.linalg.qr(rng.standard_normal((size, len(STRONG))))[0] for size in SHAPE)
    X = U * STRONG @ V.T + rng.standard_normal(SHAPE)
    sigma = np.linalg.svd(X, compute_uv=False)
    by_norm, by_largest = sigma / np.linalg.norm(sigma), sigma / sigma[0]
    panels = {
        "the momentum": by_largest,
        "Muon": response(muon(), by_norm),
        'Pion, cutoff="aligned"': response(high_pass("aligned"), by_largest),
        "Pion, promote=0": response(pion(promote=0), by_norm),
    }
    mpl.rcParams["font.size"] = 9
    figure = Figure(figsize=(9, 2.4), layout="constrained")
    colors = ["#d55e00"] * len(STRONG) + ["#999999"] * (len(sigma) - len(STRONG))
    for axes, (title, values) in zip(figure.subplots(1, 4, sharey=True), panels.items()):
        axes.bar(range(1, len(sigma) + 1), values, width=1.0, color=colors)
        axes.set(title=title, xlabel="direction", ylim=(0, 1.25))
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("size (orange: signal)")
    path = Path(__file__).with_suffix(".png")
    figure.savefig(path, dpi=110)
    for title, values in panels.items():
        print(f"{title:24s} {np.round(values[:5], 2)} ... {values[-1]:.2f}")


if __name__ == "__main__":
    main()
