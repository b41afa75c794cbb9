"""`mesotron vla demos`: make demonstrations, draw compact ones, export them to LeRobot."""

from mesotron.config.vla import DemosConfig
from mesotron.vla.demos.make import render_demos, write_demos


def run(config: DemosConfig) -> int:
    """Make what the config asks for; returns the exit code."""
    if config.render is not None:
        render_demos(config)
    else:
        write_demos(config)
    return 0
