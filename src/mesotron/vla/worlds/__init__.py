"""Simulated worlds with language behind one protocol, `mesotron.vla.interface.World`.

Ours need the package mujoco and no OpenGL; Meta-World needs the extra `metaworld`.
"""

from __future__ import annotations

import importlib.util
import os

from mesotron.config.vla import WorldConfig
from mesotron.vla.interface import World

# The rays need no window system, and importing MuJoCo with one that is half there fails.
os.environ.setdefault("MUJOCO_GL", "disable")


def build_world(config: WorldConfig) -> World:
    """Build the world that a config names.

    Raises:
        ValueError: a package is missing, or there is no such task.

    Example:
        >>> build_world(WorldConfig(name="object10")).tasks[:2]
        ('red-cube', 'blue-cube')
    """
    require("mujoco", "vla")
    if config.name == "metaworld":
        require("metaworld", "metaworld")
        from mesotron.vla.worlds.metaworld import MetaWorld

        return MetaWorld(config)
    from mesotron.vla.worlds.blocks import BlocksWorld

    return BlocksWorld(config)


def require(package: str, extra: str) -> None:
    """Say in a sentence what is missing."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"this needs the package {package}, which is not installed: "
            f'pip install "mesotron[{extra}]"'
        )
