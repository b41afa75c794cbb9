"""`mesotron train` as typed: a recipe and flags, or `--resume` and nothing else."""

from dataclasses import replace

from mesotron.config import TrainConfig
from mesotron.recipes import make_recipe
from mesotron.rlvr import train


def run(config: TrainConfig) -> int:
    """Train a recipe, or continue a run with the settings it has; see `mesotron.rlvr.train.run`."""
    if config.resume and replace(config, resume=None) != make_recipe(TrainConfig().recipe):
        # To drop a flag in silence would be worse than a no.
        raise ValueError(
            f"--resume {config.resume} continues a run with its own settings; leave the recipe and "
            "the other flags out"
        )
    return train.run(config)
