"""Simulated worlds with language that implement `mesotron.vla.interface.World`.

Ours need the package mujoco and no OpenGL; Meta-World needs the extra `metaworld`.
"""

import importlib.util
import os
import sys
from importlib import import_module

from mesotron.config import WorldConfig
from mesotron.vla.interface import World

NAMES = ("blocks", "object10", "blocks_state", "object10_state", "metaworld")
# Rays need no OpenGL, and importing MuJoCo fails on a broken OpenGL installation.
os.environ.setdefault("MUJOCO_GL", "disable")


def build_world(config: WorldConfig) -> World:
    """Build the world that a config names: one of NAMES, or `module:Class` of your own."""
    if ":" in config.name:
        module, name = config.name.split(":", 1)
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # last: a file here must not hide an installed module
        try:
            world = getattr(import_module(module), name)
        except (ModuleNotFoundError, AttributeError) as error:
            raise ValueError(f"cannot import the world {config.name}: {error}") from error
        return world(config)
    if config.name not in NAMES:
        raise ValueError(f"unknown world {config.name!r}: use {', '.join(NAMES)} or MODULE:CLASS")
    require("mujoco", "vla")
    if config.name == "metaworld":
        require("metaworld", "metaworld")
        from mesotron.vla.worlds.metaworld import MetaWorld

        return MetaWorld(config)
    from mesotron.vla.worlds.blocks import BlocksWorld

    return BlocksWorld(config)


def require(package: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{package} is not installed: pip install 'mesotron[{extra}]'")
