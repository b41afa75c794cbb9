"""`mesotron train` as typed: a recipe and flags, or a run to continue; then its page."""

from pathlib import Path

from mesotron.config import TrainConfig
from mesotron.report.command import NAME, write
from mesotron.rlvr import train


def run(config: TrainConfig) -> int:
    """Train a recipe, or continue a run with the settings it has; see `mesotron.rlvr.train.run`."""
    return train.run(config, then=write_page)


def write_page(path: Path) -> None:
    """The report as a page beside report.md."""
    write([path], path / NAME)
    print(f"page: {path / NAME}")
