"""The loop of a tournament and of a sweep: commands side by side until none is left."""

from collections.abc import Callable
from pathlib import Path

from mesotron.runs.process import StopRequest
from mesotron.runs.workers import CommandPool, Job, default_num_workers, list_gpus


def make_pool(workers: int | None, threads: int, on_gpus: bool) -> CommandPool:
    gpus = list_gpus() if on_gpus else []
    return CommandPool(workers or default_num_workers(threads, gpus), gpus)


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
                    end(job, stop.requested)
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
