"""Simulated worlds with language that implement `mesotron.vla.interface.World`."""

import os

from mesotron.config import WorldConfig
from mesotron.runs.extras import require
from mesotron.runs.trust import import_named
from mesotron.vla.interface import World

NAMES = ("blocks", "object10", "blocks_state", "object10_state", "metaworld")
# Rays need no OpenGL, and importing MuJoCo fails on a broken OpenGL installation.
os.environ.setdefault("MUJOCO_GL", "disable")


def build_world(config: WorldConfig) -> World:
    """Build the world that a config names: one of NAMES, or `module:Class` of your own."""
    if ":" in config.name:
        return import_named(config.name, "world")(config)
    if config.name not in NAMES:
        raise ValueError(f"unknown world {config.name!r}: use {', '.join(NAMES)} or MODULE:CLASS")

    require("vla", ["mujoco"], f"the world {config.name}")
    if config.name == "metaworld":
        require("metaworld", ["metaworld"], "the world metaworld")
        from mesotron.vla.worlds.metaworld import MetaWorld

        return MetaWorld(config)
    from mesotron.vla.worlds.blocks import BlocksWorld

    return BlocksWorld(config)
