"""The account of a run: time and dollars from the start of the process to its exit.

spent.json is written before work begins, every second ahead of time, and exactly at the end: a
killed session is counted too, by at most a second more than it took. Before the first step the
same thread interrupts whatever crosses a limit, be it an import or an evaluation.
"""

import signal
import threading
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any, Self

from mesotron.config import SftConfig, TrainConfig
from mesotron.config.base import to_plain
from mesotron.runs import RunFolder
from mesotron.runs.process import is_main
from mesotron.runs.resume import Plan
from mesotron.watch.budget import Meter, Spent, limits_of, read_spent

WRITE_EVERY = 1.0  # seconds
LOOK_EVERY = 0.2
EXIT = 1.0  # what an interrupted process needs to end
MAX_RUNS = 50  # earlier runs that are looked at
# Settings that do not change how long a step takes.
FREE = {
    "recipe",
    "steps",
    "seed",
    "out",
    "resume",
    "trust",
    "save_every",
    "keep",
    "guard",
    "watch",
    "budget",
    "price",
    "gpu",
    "time_limit",
    "report_to",
    "eval_every",
    "reward",
}


class Account:
    """Keeps spent.json during one session, and refuses to begin what a limit does not allow."""

    def __init__(self, plan: Plan[Any], began: float) -> None:
        self.plan = plan
        self.run = plan.folder

        spent = Spent()
        if self.run is not None and (values := self.run.load("spent")) is not None:
            spent = read_spent(values, self.run.path / "spent.json")

        known = spent if spent.step else earlier_run(plan.config, plan.path)
        paid = spent.dollars if spent.seconds else None
        limits = limits_of(plan.config)

        self.meter = Meter(
            limits,
            before=spent.seconds,
            paid=paid,
            known=known,
            began=began,
        )

        self._crossed: str | None = None
        self._over = threading.Event()
        self._writing = threading.Lock()
        self._is_main_thread = threading.current_thread() is threading.main_thread()
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> Self:
        done = self.plan.checkpoint.step if self.plan.checkpoint else 0
        steps = int(done < self.plan.config.steps)
        evaluates = isinstance(self.plan.config, TrainConfig)
        first = self.run is None or self.run.load("before") is None
        self.meter.now = self.meter.clock()
        evaluations = evaluates * (first or not steps)
        self._refuse(self.meter.refusal(evaluations, steps, starts=True, reserve=EXIT))

        if self._is_main_thread:
            # Not SIGINT, which programs in the background ignore.
            self._handler = signal.signal(signal.SIGALRM, signal.default_int_handler)

        if is_main():
            self._write(WRITE_EVERY)
            self._thread.start()

        return self

    def loaded(self, run: RunFolder) -> None:
        """Everything is loaded: from now on what is spent is written to the run."""
        self.meter.loaded()
        self.run = run

        if is_main():
            self._write(WRITE_EVERY)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        if is_main():
            self._thread.join()
            self._write()

        if self._is_main_thread:
            signal.signal(signal.SIGALRM, self._handler)

        if kind is KeyboardInterrupt:
            self._refuse(self._crossed)

    def _refuse(self, reason: str | None) -> None:
        if reason is not None and is_main():
            how = "" if self.run is None else f" and continue with --resume {self.run.path}"
            raise ValueError(f"{reason}: raise it{how}")

    def _write(self, ahead: float = 0.0) -> None:
        if self.run is not None:
            with self._writing:  # one draft at a time
                self.run.save("spent", asdict(self.meter.record(ahead)))

    def _keep(self) -> None:
        """In a thread: write ahead, and interrupt what crosses a limit before the first step."""
        for look in count(1):
            if self._over.wait(LOOK_EVERY):
                return

            if look % round(WRITE_EVERY / LOOK_EVERY) == 0:
                with suppress(OSError):  # such as a full disk, which the run itself will report
                    self._write(WRITE_EVERY)

            if self._crossed is None and not self.meter.is_training:
                self.meter.now = self.meter.clock()
                self._crossed = self.meter.refusal(steps=0, reserve=EXIT)

            # Again until it ends: callbacks of the garbage collector swallow an interrupt.
            while self._crossed is not None and self._is_main_thread:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
                if self._over.wait(EXIT):
                    return


def earlier_run(config: TrainConfig | SftConfig, path: Path) -> Spent:
    """How long the parts of a run take, by the newest run beside it with the same settings."""

    def what_costs(values: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in values.items() if key not in FREE}

    own = what_costs(to_plain(config))
    with suppress(OSError):
        files = [file for file in path.absolute().parent.glob("*/spent.json") if file.is_file()]
        newest = sorted(files, key=lambda file: -file.stat().st_mtime)[:MAX_RUNS]
        for file in newest:
            with suppress(ValueError):  # another program's
                run = RunFolder(file.parent)
                if what_costs(run.config) == own:
                    return replace(read_spent(run.load("spent") or {}), seconds=0.0, dollars=None)

    return Spent()


def sampling_time(seconds: float, problems: int, completions: int) -> float:
    """The least that sampling a batch takes, by an evaluation of so many problems: fewer at once
    take a share of it, more take at least as long."""
    return seconds * min(1.0, completions / max(problems, 1))
