"""`mesotron vla demos`: make demonstrations, draw compact ones, export them to LeRobot."""

from mesotron.config import DemosConfig
from mesotron.vla.demos.lerobot_export import export_lerobot
from mesotron.vla.demos.make import render_demos, write_demos
from mesotron.vla.demos.shards import load_shards


def run(config: DemosConfig) -> int:
    """Make what the config asks for; returns the exit code."""
    if config.render is not None:
        render_demos(config)
    else:
        write_demos(config)
    if config.lerobot is not None:
        left = export_lerobot(load_shards(config.out), config.lerobot)
        print(f"{config.lerobot}: a LeRobotDataset v3.0; {left:,} single frames are not in it")
    return 0
