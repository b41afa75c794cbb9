"""`mesotron train`: train a recipe or resume a run, then write its page."""

from pathlib import Path

from mesotron.config import TrainConfig
from mesotron.report.command import NAME, write
from mesotron.rlvr import train
from mesotron.runs.folder import warn_of_failure


def run(config: TrainConfig) -> int:
    return train.run(config, then=write_page)


def write_page(run: Path) -> None:
    with warn_of_failure(NAME, run):
        write([run], run / NAME)
        print(f"page: {run / NAME}")
