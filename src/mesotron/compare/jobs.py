"""The loop of a tournament and of a sweep: commands side by side until none is left."""

from collections.abc import Callable
from pathlib import Path

from mesotron.config import CompareConfig, SweepConfig
from mesotron.runs.extras import require
from mesotron.runs.process import StopRequest
from mesotron.runs.workers import CommandPool, Job, list_gpus, num_cores


def make_pool(config: CompareConfig | SweepConfig, on_gpus: bool) -> CommandPool:
    if config.on is not None:
        require("ray", what=f"--on {config.on}")
        from mesotron.runs.cluster import RayPool

        address = config.on.partition(":")[2] or None
        return RayPool(address, config.workers, config.threads, config.gpus if on_gpus else 0.0)

    gpus = list_gpus() if on_gpus else []
    return CommandPool(config.workers or len(gpus) or max(1, num_cores() // config.threads), gpus)


def run_jobs(
    pool: CommandPool,
    folder: Path,
    say: Callable[[str], None],
    start: Callable[[], None],
    end: Callable[[Job, bool], None],
    wait: Callable[[], None],
) -> None:
    """Call `start` to fill the pool, `wait`, and `end(job, stopping)`, until no job is left."""
    how_to_continue = f"the same command continues {folder}"
    try:
        with StopRequest(say, how_to_continue) as stop:
            while True:
                for job in pool.take_ended():
                    if job.lost:
                        say(f"{job.key}: lost with its machine, to be continued on another")
                    end(job, stop.requested or job.lost)

                stop.announce()
                if stop.requested:
                    pool.terminate()
                else:
                    start()

                if not pool.jobs:
                    break

                wait()
    finally:
        pool.kill()

    if stop.requested:
        raise KeyboardInterrupt(how_to_continue)
