"""Pictures of the pages, small enough to be kept in git."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

COLORS = 256  # of a palette


def save_picture(figure: Any, path: Path, dpi: int) -> None:
    """Save a matplotlib figure; a PNG gets a palette, which takes a third of the space."""
    if path.suffix != ".png":
        figure.savefig(path, dpi=dpi)
        return

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=dpi, format="png")
    shrink(drawn, path)


def shrink(source: Any, path: Path) -> None:
    """Write a picture as a PNG whose palette has its most frequent colors.

    Lines and areas keep their colors; the rest, smooth edges, get the nearest ones.

    Args:
        source: a file that Pillow can open.
        path: of the PNG.
    """
    import numpy as np
    from PIL import Image

    with Image.open(source) as image:
        pixels = np.array(image.convert("RGB"))

    shape = pixels.shape[:2]

    colors, place, count = np.unique(
        pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True
    )
    palette = colors[np.argsort(-count, kind="stable")[:COLORS]].astype(int)

    nearest = [np.square(palette - color).sum(1).argmin() for color in colors.astype(int)]
    indices = np.array(nearest, np.uint8)[place].reshape(shape)

    small = Image.fromarray(indices, "P")
    small.putpalette(palette.astype(np.uint8).tobytes())
    small.save(path, optimize=True)
