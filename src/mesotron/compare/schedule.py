"""Processes side by side: one for each cell, on its own GPU or core; it knows no tournament."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

GPUS = Path("/proc/driver/nvidia/gpus")
LOG_TAIL = 4096


def list_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; loads no library."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    return [str(k) for k in range(len(list(GPUS.iterdir())) if GPUS.is_dir() else 0)]


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def num_workers(asked: int | None, threads: int, gpus: Sequence[str]) -> int:
    """How many processes run at once: as asked, else one for each GPU, else for each core.

    Example:
        >>> num_workers(None, threads=1, gpus=["0", "1"])
        2
    """
    return asked or len(gpus) or max(1, num_cores() // threads)


@dataclass
class Job:
    """A running process.

    Args:
        key: who asked for it.
        process: the process itself.
        slot: its place among those that run at once.
        log: where it writes.
        began: on the monotonic clock.
    """

    key: str
    process: subprocess.Popen[bytes]
    slot: int
    log: Path
    began: float


class Pool:
    """At most so many processes at once.

    Args:
        workers: how many.
        gpus: dealt to the processes in turn; none leaves the devices as they are.
    """

    def __init__(self, workers: int, gpus: Sequence[str] = ()) -> None:
        self.workers = workers
        self.gpus = tuple(gpus)
        self.jobs: list[Job] = []
        self._asked = False

    @property
    def has_room(self) -> bool:
        """Whether another process may start."""
        return len(self.jobs) < self.workers

    def start(
        self,
        key: str,
        words: Sequence[str],
        log: Path,
        variables: Mapping[str, str],
        keep_open: Sequence[int] = (),
    ) -> Job:
        """Start a process; its output goes to the end of the log.

        Args:
            key: what the job is called.
            words: its command line.
            log: a file.
            variables: beside those of this process.
            keep_open: files that it inherits, such as a lock that is to last as long as it does.
        """
        taken = {job.slot for job in self.jobs}
        slot = next(k for k in range(self.workers) if k not in taken)
        environment = {**os.environ, **variables}
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
        with log.open("ab") as output:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=keep_open,
            )
        self.jobs.append(Job(key, process, slot, log, monotonic()))
        return self.jobs[-1]

    def take_ended(self) -> list[Job]:
        """The processes that have ended since the last look."""
        ended = [job for job in self.jobs if job.process.poll() is not None]
        self.jobs = [job for job in self.jobs if job not in ended]
        return ended

    def ask_to_stop(self) -> None:
        """Ask every process to save and leave, once: a second signal would end it unsaved."""
        for job in [] if self._asked else self.jobs:
            job.process.terminate()
        self._asked = True

    def kill(self) -> None:
        """End what is left at once."""
        for job in self.jobs:
            job.process.kill()
        for job in self.jobs:
            job.process.wait()
        self.jobs = []


def last_words(log: Path, code: int) -> str:
    """Why a process failed: the last line that it wrote, or how it ended if it wrote none."""
    ending = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return ending if code < 0 else last_line(log) or ending


def last_line(log: Path) -> str:
    """The last line of a log; empty if there is none."""
    if not log.is_file():
        return ""
    lines = log.read_bytes()[-LOG_TAIL:].decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
