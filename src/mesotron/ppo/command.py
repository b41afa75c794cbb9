"""The command `mesotron ppo snake`; a sentence where the extra `ppo` is missing."""

from mesotron.config import SnakeConfig


def run(config: SnakeConfig) -> int:
    """Train, or go on training; returns the exit code."""
    try:
        from mesotron.ppo.training import train_snake
    except ModuleNotFoundError as error:
        raise ValueError(
            f"mesotron ppo needs the package {error.name}: pip install 'mesotron[ppo]'"
        ) from error
    return train_snake(config)
