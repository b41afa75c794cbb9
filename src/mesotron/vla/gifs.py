"""Recorded episodes as GIF files, named by how they ended; needs pillow."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mesotron.vla.interface import EvalResult
from mesotron.vla.worlds import require

MILLISECONDS = 80  # of a frame
LAST = 12  # times as long


def write_gifs(result: EvalResult, folder: Path) -> list[Path]:
    """Write one GIF for each recorded episode.

    Args:
        result: of an evaluation with `frames`.
        folder: made if need be.

    Returns:
        The files: `red-cube-1000000-success.gif`.
    """
    require("PIL", "vla")
    folder.mkdir(parents=True, exist_ok=True)
    ended = {(episode.task, episode.seed): episode.success for episode in result.episodes}
    return [
        write_gif(frames, folder / f"{task}-{seed}-{'success' if ended[task, seed] else 'failure'}")
        for (task, seed), frames in result.frames.items()
    ]


def write_gif(frames: np.ndarray, stem: Path) -> Path:
    """Write uint8 frames (T, H, W, 3) and return the file's path."""
    from PIL import Image

    path = stem.with_name(f"{stem.name}.gif")
    first, *rest = [Image.fromarray(frame) for frame in frames]
    times = [MILLISECONDS] * len(rest) + [MILLISECONDS * LAST]
    first.save(path, save_all=True, append_images=rest, duration=times, loop=0)
    return path
