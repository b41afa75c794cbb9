"""Demonstrations: made by scripted experts, kept as npz, exchanged with LeRobot."""

from pathlib import Path

from mesotron.vla.demos.lerobot import is_lerobot, load_lerobot
from mesotron.vla.demos.make import make_demos
from mesotron.vla.demos.shards import MANIFEST, load_shards
from mesotron.vla.interface import Demos

__all__ = ["load_demos", "make_demos"]


def load_demos(path: Path, pixels: int | None = None) -> Demos:
    """Load demonstrations into memory.

    Args:
        path: a folder of `mesotron vla demos`, or a LeRobotDataset (v3.0).
        pixels: a LeRobotDataset's images that are larger are shrunk to this width and height; ours
            have their size.

    Raises:
        ValueError: it is neither, not finished, or needs a package that is missing.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is not there; make it with: mesotron vla demos --out {path}")
    if (path / MANIFEST).is_file():
        return load_shards(path)
    if is_lerobot(path):
        return load_lerobot(path, pixels)
    raise ValueError(f"{path} holds no demonstrations: neither {MANIFEST} nor meta/info.json")
