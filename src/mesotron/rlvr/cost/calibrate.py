"""Three steps of a run on this machine, to know its pace; nothing of them is kept."""

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from transformers import TrainerCallback

from mesotron.config import PlanConfig, TrainConfig
from mesotron.config.base import from_plain
from mesotron.rlvr.answers.verify import Verifier
from mesotron.rlvr.cost.pace import Pace
from mesotron.rlvr.session import build_trainer, load, quiet_libraries
from mesotron.runs import RunFolder
from mesotron.runs.folder import plain

STEPS = 3


class Clock(TrainerCallback):
    """The moment at which each step's row was logged."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """The first step counts from here."""
        self.moments.append(time.monotonic())

    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        """A step's row is its end."""
        if "loss" in (logs or {}):
            self.moments.append(time.monotonic())


def calibrate(config: PlanConfig) -> Pace:
    """Make three steps; the first one warms up and is not counted.

    Rollouts that serve several updates are counted whole: as many steps are made as three of them
    need.

    Args:
        config: of the run.
    """
    quiet_libraries()
    updates = config.rollout.updates
    steps = STEPS * updates
    short = replace(training_part(config), steps=steps, save_every=0, guard="off", report_to=())
    clock = Clock()
    with (
        tempfile.TemporaryDirectory() as folder,
        Verifier(config.reward.timeout) as verifier,
    ):
        run = RunFolder.create(Path(folder) / "run", short, {})
        trainer = build_trainer(load(short, verifier), run)
        trainer.add_callback(clock)
        trainer.train()
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history
               if "completions/mean_length" in row]  # fmt: skip
    seconds = (clock.moments[-1] - clock.moments[updates]) / (steps - updates)
    length = config.completion_tokens or mean(lengths)
    return Pace(seconds, length, f"{steps} steps on this machine, {length:.3g} tokens a completion")


def training_part(config: PlanConfig) -> TrainConfig:
    """The run that a plan is of."""
    values = plain(config)
    extra = values.keys() - plain(TrainConfig()).keys()
    return from_plain(TrainConfig, {key: x for key, x in values.items() if key not in extra})
