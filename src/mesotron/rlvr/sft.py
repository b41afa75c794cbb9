"""`mesotron sft`: a warm start on solved problems, with the tasks, formats and optimizers of RL.

This file finds the folder and the settings; nothing heavy is imported before they are found
usable. The training itself is in `warm_start`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from mesotron.config import SftConfig, TrainConfig
from mesotron.config.reading import from_plain
from mesotron.rlvr.train import check_least, set_library_variables
from mesotron.runs import Checkpoint, RunFolder, new_run_path, newest_whole


@dataclass(frozen=True)
class SftPlan:
    """What to do: the settings, where, and from which checkpoint."""

    config: SftConfig
    path: Path
    folder: RunFolder | None
    """The run that is continued; None for a new one, whose folder is made when all is loaded."""
    checkpoint: Checkpoint | None
    notes: tuple[str, ...] = ()
    """Sentences for the user, such as which checkpoint was damaged."""


def run(config: SftConfig) -> int:
    """Train on solved problems, or continue such a run.

    Args:
        config: as parsed; `resume` names a run whose own settings are then used.

    Returns:
        The exit code: 0 when finished, and also when stopped by Ctrl-C or SIGTERM and saved.
    """
    plan = continue_run(config) if config.resume else new_run(config)
    set_library_variables(TrainConfig(model=plan.config.model, task=plan.config.task))
    from mesotron.rlvr.warm_start import train

    return train(plan)


def new_run(config: SftConfig) -> SftPlan:
    """The plan of a run from the beginning."""
    check(config)
    path = config.out or new_run_path("sft")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(
            f"{path} is not empty; give --out another name, or continue it with --resume {path}"
        )
    return SftPlan(config, path, None, None)


def continue_run(config: SftConfig) -> SftPlan:
    """The plan of a run that was stopped: its own settings, its newest whole checkpoint."""
    assert config.resume is not None
    path = config.resume.resolve()  # runs/last may come to mean another run
    folder = RunFolder(path)
    saved = from_plain(SftConfig, folder.config, f"{path / 'config.json'}")
    if folder.result is not None:
        raise ValueError(
            f"{config.resume} has finished its {saved.steps} steps; evaluate it with mesotron eval "
            f"{config.resume}, or start a new run"
        )
    found, damaged = newest_whole(folder.checkpoints)
    notes = [f"damaged checkpoint left out: {wrong}" for wrong in damaged]
    begin = f"step {found.step}" if found else "the beginning: there is no whole checkpoint"
    return SftPlan(saved, path, folder, found, (*notes, f"continuing {path} from {begin}"))


def check(config: SftConfig) -> None:
    """Refuse numbers that cannot be meant, before anything is loaded."""
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1":
        raise ValueError(
            f"mesotron sft runs in one process, not in WORLD_SIZE={processes}: start it without a "
            "launcher"
        )
    least = {"steps": 1, "batch": 1, "max_tokens": 2, "save_every": 0, "keep": 1, "seed": 0}
    parts = {"threads": 1, "model.lora": 0, "optim.lr": 0, "optim.warmup": 0}
    check_least(config, least | parts)
    if not 0 <= config.loose <= 1:
        raise ValueError(f"--loose {config.loose:g} is a share: give a number from 0 to 1")
