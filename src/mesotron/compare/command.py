"""`mesotron compare RECIPE`: runs the cells that are due, side by side, and shows who won."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live

from mesotron.compare.cell import write_settings
from mesotron.compare.fairness import check_problems
from mesotron.compare.kinds import make_kind
from mesotron.compare.page import ended_line, markdown, progress_view, show
from mesotron.compare.record import NAME, Cell, read_tournament
from mesotron.compare.tournament import Progress
from mesotron.compare.words import count
from mesotron.config import CompareConfig
from mesotron.report.command import write as write_report
from mesotron.runs.files import write_whole
from mesotron.runs.process import StopRequest
from mesotron.runs.workers import CommandPool, Job, default_num_workers, list_gpus

LOOK_EVERY = 0.2  # seconds between two looks at the processes


def run(config: CompareConfig) -> int:
    """Run a tournament, or the rest of one.

    Returns:
        0 when every cell has a score; 1 if some crashed, and the rest is shown.

    Raises:
        KeyboardInterrupt: somebody stopped it; it says how to go on.
    """
    kind = make_kind(config.recipe, config.set)
    check_problems(kind)
    folder = config.out or Path("runs") / f"compare-{config.recipe}"
    for one in kind.contenders(config.optims or kind.usual, config.objectives):
        kind.check(kind.settings(one, kind.base_rate, config.seed, folder))  # before it is made
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    console = Console()
    with locked(folder) as lock:
        old = read_tournament(folder) if (folder / NAME).exists() else None
        progress = Progress(kind, config, folder, old)
        Match(progress, console, lock).play()
        finish(progress, console)
    return 1 if any(cell.state == "failed" for cell in progress.record.cells) else 0


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Hold a folder alone. Yields the lock's file number: cells keep it open, so that the folder is
    in use until the last of them has ended, however this process ends."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{folder} is in use by another process, or by a cell that one has left; wait for "
                "it or stop it first"
            ) from None
        yield lock.fileno()


class Match:
    """The cells of a tournament in their processes, watched until the last has ended.

    Args:
        progress: what is due.
        console: where it is shown.
        lock: file number of the folder's lock, see `locked`.
    """

    def __init__(self, progress: Progress, console: Console, lock: int) -> None:
        self.progress = progress
        self.lock = lock
        self.console = console
        config = progress.config
        gpus = list_gpus() if progress.kind.uses_gpu() else []
        workers = config.workers or default_num_workers(config.threads, gpus)
        self.pool = CommandPool(workers, gpus)
        progress.record.workers = workers
        self.live = Live(console=console, auto_refresh=False, transient=True)
        self.walls: list[float] = []

    def play(self) -> None:
        """Run whatever is due until nothing is."""
        how = f"the same command goes on with {self.progress.folder}"
        done, total, _ = self._clock()
        who = count(len(self.progress.contenders), "contender")
        self.say(
            f"{who}, at least {count(total, 'run')} ({done} done), "
            f"{self.pool.num_workers} at once, in {self.progress.folder}"
        )
        if self.console.is_terminal:
            self.live.start()
        try:
            with StopRequest(self.say, how) as stop:
                self._loop(stop)
        finally:
            self.pool.kill()
            self.live.stop()
        if stop.requested:
            raise KeyboardInterrupt(how)

    def _loop(self, stop: StopRequest) -> None:
        while True:
            for job in self.pool.take_ended():
                self._end(job, stop.requested)
            if stop.requested:
                self.pool.terminate()
            if not stop.requested:
                self.progress.plan()
                self._fill()
            if not self.pool.jobs:
                break
            self._refresh()
            time.sleep(LOOK_EVERY)
        self.progress.write()

    def _fill(self) -> None:
        """Start cells while there is room; one that an earlier call has finished is read alone."""
        for cell in self.progress.waiting():
            if not self.pool.has_free_slot:
                return
            if self.progress.take_outcome(cell):
                self.progress.plan()
            else:
                self._start(cell)
            self.progress.write()

    def _start(self, cell: Cell) -> None:
        progress = self.progress
        place = progress.folder / cell.run
        words = write_settings(
            place.with_name(f"{cell.id}.json"), progress.kind.name, progress.settings(cell)
        )
        log = place.with_name(f"{cell.id}.log")
        variables = progress.kind.environment(progress.config.threads)
        self.pool.start(cell.id, words, log, variables, keep_open=(self.lock,))
        cell.state = "running"

    def _end(self, job: Job, stopping: bool) -> None:
        """Read what came of a process; one that was asked to stop waits for the next call."""
        cell = next(one for one in self.progress.record.cells if one.id == job.key)
        cell.wall = time.monotonic() - job.start
        if not self.progress.take_outcome(cell):
            cell.state = "waiting" if stopping else "failed"
            cell.why = "" if stopping else job.failure
        if cell.state != "waiting":
            self.walls.append(cell.wall)
            self.progress.plan()
            if cell.stage == "final":
                self.progress.judge()
            self.say(ended_line(cell, *self._clock()))
        self.progress.write()

    def _clock(self) -> tuple[int, int, float | None]:
        """Cells that have ended, cells in all, and the time that the rest will take."""
        total, left = self.progress.expected(), self.progress.cells_left()
        if not self.walls:
            return total - left, total, None
        pace = sum(self.walls) / len(self.walls) / self.pool.num_workers
        running = (
            sum(time.monotonic() - job.start for job in self.pool.jobs) / self.pool.num_workers
        )
        return total - left, total, max(left * pace - running, 0.0)

    def say(self, sentence: str) -> None:
        """A sentence above the view, or a line of its own."""
        self.console.print(sentence, soft_wrap=True, highlight=False, markup=False)

    def _refresh(self) -> None:
        if self.console.is_terminal:
            view = progress_view(self.progress.record, *self._clock())
            self.live.update(view, refresh=True)


def finish(progress: Progress, console: Console) -> None:
    """The standings: to the record, as pages of Markdown and HTML, and on the terminal."""
    progress.judge()
    progress.write()
    words, page = (progress.folder / name for name in ("standings.md", "report.html"))
    write_whole(words, markdown(progress.record))
    write_report([progress.folder], page)
    show(progress.record, console)
    console.print(f"{words}\n{page}", soft_wrap=True, highlight=False, markup=False)
