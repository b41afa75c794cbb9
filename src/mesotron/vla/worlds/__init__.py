"""Simulated worlds with language behind one protocol, `mesotron.vla.interface.World`.

Ours need the package mujoco and no OpenGL; Meta-World needs the extra `metaworld`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib import import_module

from mesotron.config import WorldConfig
from mesotron.vla.interface import World

NAMES = ("blocks", "object10", "blocks_state", "object10_state", "metaworld")
# The rays need no window system, and importing MuJoCo with one that is half there fails.
os.environ.setdefault("MUJOCO_GL", "disable")


def build_world(config: WorldConfig) -> World:
    """Build the world that a config names.

    Args:
        config: `name` is one of NAMES, or `module:Class` of your own, which is called with it.

    Raises:
        ValueError: there is no such world or task, or a package is missing.

    Example:
        >>> build_world(WorldConfig(name="object10")).tasks[:2]
        ('red-cube', 'blue-cube')
    """
    if ":" in config.name:
        return own_world(config)
    if config.name not in NAMES:
        raise ValueError(
            f"there is no world {config.name!r}; there are {', '.join(NAMES)}, "
            "and MODULE:CLASS names one of your own"
        )
    require("mujoco", "vla")
    if config.name == "metaworld":
        require("metaworld", "metaworld")
        from mesotron.vla.worlds.metaworld import MetaWorld

        return MetaWorld(config)
    from mesotron.vla.worlds.blocks import BlocksWorld

    return BlocksWorld(config)


def own_world(config: WorldConfig) -> World:
    """A world that is not ours, by `module:Class`; the module may lie in the working folder."""
    module, name = config.name.split(":", 1)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a file here must not hide an installed module
    try:
        make = getattr(import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"the world {config.name} cannot be imported: {error}") from error
    return make(config)


def require(package: str, extra: str) -> None:
    """Say in a sentence what is missing."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"this needs the package {package}, which is not installed: "
            f'pip install "mesotron[{extra}]"'
        )
