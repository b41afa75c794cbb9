"""Pictures of PPO runs: a game as a GIF, and curves of fruit against steps and seconds.

Every plot has the two random baselines and the most fruit that the board can hold: the mask alone
is worth forty times random play, so a curve without them says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from mesotron.config import SnakeConfig

_PIXELS = 24
_MOST_FRAMES = 800
_BOARD, _FRUIT, _HEAD = (24, 28, 34), (214, 69, 65), (250, 220, 120)
_TAIL_TO_NECK = np.array([(44, 86, 74), (92, 196, 150)], float)


class Curve(NamedTuple):
    """Fruit of one kind of training over its seeds.

    Args:
        steps: [n] environment steps of each seed.
        seconds: [n] since the first update began.
        fruit: [seeds, n].
    """

    steps: np.ndarray
    seconds: np.ndarray
    fruit: np.ndarray


def draw_game(cells: np.ndarray, config: SnakeConfig, path: Path) -> None:
    """Write a game as an animated GIF.

    Args:
        cells: [frames, T, F], from `record_game`.
        config: the board.
        path: ends in .gif.
    """
    stride = -(-len(cells) // _MOST_FRAMES)
    shown = [*cells[:-1:stride], *[cells[-1]] * 8]  # rest on the last picture
    frames = [Image.fromarray(draw_board(frame, config)) for frame in shown]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=80, loop=0)


def draw_board(cells: np.ndarray, config: SnakeConfig) -> np.ndarray:
    """One position as pixels, [height, width, 3]; the body is darker toward its tail."""
    body, head, _, fruit, order = (cells[:, k] for k in range(5))
    colours = np.tile(np.array(_BOARD, float), (len(cells), 1))
    shade = order[:, None]
    snake = _TAIL_TO_NECK[0] * (1 - shade) + _TAIL_TO_NECK[1] * shade
    colours = np.where(body[:, None] > 0, snake, colours)
    colours[fruit > 0] = np.where(body[fruit > 0][:, None] > 0, colours[fruit > 0], _FRUIT)
    colours[head > 0] = _HEAD
    board = colours.reshape(config.height, config.width, 3).astype(np.uint8)
    large = board.repeat(_PIXELS, 0).repeat(_PIXELS, 1)
    large[::_PIXELS] = large[:, ::_PIXELS] = _BOARD  # a line between cells
    return large


def draw_curves(
    curves: Mapping[str, Curve], baselines: Mapping[str, float], path: Path, title: str
) -> None:
    """Mean fruit over seeds with a 95 % bootstrap band, against steps and against seconds.

    Args:
        curves: name -> curve.
        baselines: from `measure_baselines`.
        path: .png, .svg or .pdf.
        title: over both panels.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels: Sequence[Any] = figure.subplots(1, 2, sharey=True)
    for panel, axis in zip(panels, ("steps", "seconds")):
        for name, curve in curves.items():
            x = getattr(curve, axis)
            low, high = bootstrap_band(curve.fruit)
            (line,) = panel.plot(x, curve.fruit.mean(0), label=name)
            panel.fill_between(x, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
        for name, value in baselines.items():
            panel.axhline(value, color="grey", linestyle="--", linewidth=0.8)
            place = (0.99, value)
            across = panel.get_yaxis_transform()
            words = name.replace("_", " ")
            panel.text(*place, words, transform=across, fontsize=7, ha="right", va="bottom")
        panel.set_xlabel({"steps": "environment steps", "seconds": "seconds"}[axis])
    panels[0].set_ylabel("fruit per game")
    panels[0].legend(loc="upper left", fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def bootstrap_band(values: np.ndarray, draws: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """95 % interval of the mean over the first axis: [seeds, n] -> two of [n].

    Example:
        >>> low, high = bootstrap_band(np.array([[1.0], [1.0]]))
        >>> float(low[0]), float(high[0])
        (1.0, 1.0)
    """
    chosen = np.random.default_rng(0).integers(0, len(values), (draws, len(values)))
    means = values[chosen].mean(1)
    low, high = np.quantile(means, [0.025, 0.975], axis=0)
    return low, high
