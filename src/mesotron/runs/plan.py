"""Where a run begins: in a new folder, or at the newest whole checkpoint of a stopped one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from mesotron.config import SftConfig, TrainConfig, VlaTrainConfig
from mesotron.runs.checkpoints import Checkpoint, newest_whole
from mesotron.runs.continuation import continued_settings
from mesotron.runs.environment import describe_environment
from mesotron.runs.folder import RunFolder, check_free
from mesotron.runs.processes import is_main

Config = TypeVar("Config", TrainConfig, SftConfig, VlaTrainConfig)


@dataclass(frozen=True)
class Plan(Generic[Config]):
    """What to do: the settings, where, and from which checkpoint."""

    config: Config
    path: Path
    folder: RunFolder | None = None
    """The run that is continued; None for a new one, whose folder is made when all is loaded."""
    checkpoint: Checkpoint | None = None
    notes: tuple[str, ...] = ()
    """Sentences for the user, such as which checkpoint was damaged."""

    def open_folder(self, device: str, threads: int) -> RunFolder:
        """The folder of the run that is continued, or a new one that tells of its machine.

        Args:
            device: in words, for a new run's env.json.
            threads: of the CPU, for the same.
        """
        if self.folder is not None:
            return self.folder
        found = describe_environment(device, self.config.seed, threads=threads)
        return RunFolder.create(self.path, self.config, found)


def begin(config: Config, path: Path) -> Plan[Config]:
    """The plan of a run from the beginning.

    Of several processes the main one alone looks at the folder: it may have made it by now.
    """
    if is_main():
        check_free(path)
    return Plan(config, path)


def go_on(config: Config, evaluate: str, instead: str) -> Plan[Config]:
    """The plan of a run that was stopped: its own settings, its newest whole checkpoint.

    Args:
        config: as asked for; `resume` names the run.
        evaluate: the command that is proposed where the run has finished.
        instead: what is proposed to who wants other settings.
    """
    resume = config.resume
    assert resume is not None
    path = resume.resolve()  # runs/last may come to mean another run
    folder = RunFolder(path)
    if folder.result is not None:
        raise ValueError(
            f"{resume} has finished its {folder.config['steps']} steps; evaluate it with "
            f"{evaluate} {resume}, or start a new run"
        )
    if is_main():  # the lock is of one process alone
        folder.check_unused()
    settings = continued_settings(config, RunFolder(resume), instead)
    found, damaged = newest_whole(folder.checkpoints)
    notes = [f"damaged checkpoint left out: {wrong}" for wrong in damaged]
    start = f"step {found.step}" if found else "the beginning: there is no whole checkpoint"
    return Plan(settings, path, folder, found, (*notes, f"continuing {path} from {start}"))
