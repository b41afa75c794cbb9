"""`mesotron train` as typed: a recipe and flags, or `--resume` and nothing else; then its page."""

from dataclasses import replace
from pathlib import Path

from mesotron.config import TrainConfig
from mesotron.recipes import make_recipe
from mesotron.report.command import NAME, write
from mesotron.rlvr import train


def run(config: TrainConfig) -> int:
    """Train a recipe, or continue a run with the settings it has; see `mesotron.rlvr.train.run`."""
    plain = replace(config, resume=None, **dict.fromkeys(train.SPENDING))
    if config.resume and plain != make_recipe(TrainConfig().recipe):
        # To drop a flag in silence would be worse than a no.
        raise ValueError(
            f"--resume {config.resume} continues a run with its own settings; leave the recipe and "
            "the other flags out, but for budget, price and time"
        )
    return train.run(config, then=write_page)


def write_page(path: Path) -> None:
    """The report as a page beside report.md."""
    write([path], path / NAME)
    print(f"page: {path / NAME}")
