"""The loop of a tournament and of a sweep: commands side by side until none is left."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from mesotron.config import ManyRunsConfig
from mesotron.runs.extras import require
from mesotron.runs.process import StopRequest
from mesotron.runs.workers import CommandPool, Job, list_gpus, num_cores


def make_pool(config: ManyRunsConfig, on_gpus: bool) -> CommandPool:
    if config.on is not None:
        require("ray", what=f"--on {config.on}")
        from mesotron.runs.cluster import RayPool

        address = config.on.partition(":")[2] or None
        return RayPool(address, config.workers, config.threads, config.gpus if on_gpus else 0.0)

    gpus = list_gpus() if on_gpus else []
    fit = len(gpus) or max(1, num_cores() // config.threads)

    return CommandPool(config.workers or fit, gpus)


class JobOwner(Protocol):
    """What decides which jobs run: a tournament or a sweep."""

    def start(self) -> None:
        """Start jobs while the pool has a free slot."""

    def end(self, job: Job, stopping: bool) -> None:
        """Take the result of an ended job."""

    def wait(self) -> None:
        """Pass the time until the next look at the pool."""


def run_jobs(pool: CommandPool, folder: Path, say: Callable[[str], None], owner: JobOwner) -> None:
    """Start, wait for and end the owner's jobs until none is left."""
    how_to_continue = f"the same command continues {folder}"
    try:
        with StopRequest(say, how_to_continue) as stop:
            while True:
                for job in pool.take_ended():
                    if job.lost:
                        say(f"{job.key}: lost with its machine, to be continued on another")
                    owner.end(job, stop.requested or job.lost)

                stop.announce()
                if stop.requested:
                    pool.terminate()
                else:
                    owner.start()

                if not pool.jobs:
                    break

                owner.wait()
    finally:
        pool.kill()

    if stop.requested:
        raise KeyboardInterrupt(how_to_continue)
