"""What a run may spend, what it has spent, and whether the next step still fits.

    with open_budget(plan, began) as budget:   refuses a run that a limit does not allow
        budget.loaded(run)                     everything is loaded; spent.json lies in this folder
        with budget.evaluation(): ...          before training
        budget.start()                         training begins
        budget.step()                          a step has ended
        budget.refusal()                       why the next one must not begin, or None

Dollars are hours times a price. What a machine costs before the command starts is not counted.

spent.json is written before work begins, every second ahead of time, and exactly at the end: a
killed session is counted too, by at most a second more than it took. `Deadline` interrupts whatever
is still running at a limit.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import mean
from typing import Any, Self

from mesotron.config import GPUS, SftConfig, TrainConfig, parse_duration
from mesotron.config.base import to_plain
from mesotron.runs import RunFolder
from mesotron.runs.deadline import Deadline, LimitReached
from mesotron.runs.process import SharedFailure, is_main, num_processes
from mesotron.runs.resume import Plan

# The slowest of these steps predicts the next one, their mean the rest of the run.
RECENT = 20

WRITE_EVERY = 1.0  # seconds
EXIT = 1.0  # what an interrupted process needs to end

MAX_RUNS = 50  # earlier runs that are looked at
# Settings that do not change how long a step takes.
FREE = {
    "recipe",
    "steps",
    "sft",
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
    "final",
    "lr_auto",
    "verdict_after",
    "stop_if",
    "steps_auto",
    "reward",
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a run; None is unlimited, or unknown for the price."""

    dollars: float | None = None  # over all sessions
    price: float | None = None  # dollars per hour of the whole machine
    seconds: float | None = None  # of this session


def limits_of(config: TrainConfig | SftConfig) -> Limits:
    price = config.price
    if price is None and config.gpu:
        price = GPUS[config.gpu].price

    if config.budget is not None and price is None:
        raise ValueError(
            f"--budget {config.budget:g} needs an hourly price: give --price 3.95 or --gpu h100"
        )

    return Limits(
        dollars=config.budget,
        price=None if price is None else price * num_processes(),
        seconds=None if config.time_limit is None else parse_duration(config.time_limit),
    )


@dataclass(frozen=True, kw_only=True)
class Spent:
    """spent.json: what the sessions of a run took so far, and how long its parts take."""

    seconds: float = 0.0
    dollars: float | None = None  # None applies the present price
    start: float = 0.0  # seconds from the start of a process until everything is loaded
    evaluation: float = 0.0  # seconds of one
    step: float = 0.0  # seconds of one, with saving; 0 if unknown


def read_spent(values: Mapping[str, Any], source: object = "spent.json") -> Spent:
    """What spent.json holds; older ones have fewer keys, but none lacks the seconds."""
    known = {}
    for field in fields(Spent):
        value: Any = values.get(field.name)
        if type(value) in (int, float) and 0 <= value < 1e300:
            known[field.name] = float(value)

    if "seconds" not in known:
        raise ValueError(f"{source} has no valid seconds: correct it, or remove it to count from 0")

    return Spent(**known)


class Budget:
    """The time and money of a run, counted on a clock from the start of the command.

    Args:
        limits: what may be spent.
        earlier: what earlier sessions of the run spent.
        known: how long the parts take, as earlier sessions or runs measured them.
        began: when the command started, on the clock.
        clock: seconds.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        earlier: Spent | None = None,
        known: Spent | None = None,
        began: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.earlier = earlier or Spent()
        self.clock = clock
        self.began = clock() if began is None else began
        self.now = self.began  # when the clock was last looked at
        self.run: RunFolder | None = None  # where spent.json lies
        self.deadline = Deadline()  # of this session
        self._writing = threading.Lock()  # one draft at a time

        # How long the parts take: as known, and then as measured.
        known = known or Spent()
        self.start_seconds = known.start
        self.slowest_evaluation = known.evaluation
        self.slowest_save = 0.0
        self._step_estimate = known.step
        self._recent: deque[float] = deque(maxlen=RECENT)  # seconds of the latest steps
        self._plain: deque[float] = deque(maxlen=RECENT)  # the same without evaluations
        self._evaluating = 0.0  # seconds of evaluation in the present step
        self._last_step: float | None = None  # when it ended

    # What happens during a session

    def look(self) -> None:
        self.now = self.clock()

    def loaded(self, run: RunFolder) -> None:
        """Everything is loaded: from now on what is spent is written to the run."""
        self.look()
        self.start_seconds = self.now - self.began
        self.run = run

        if is_main():
            self.write(ahead=WRITE_EVERY)

    def calibrate(self, seconds: float) -> None:
        """A step takes at least so long, until steps are measured."""
        if not self._step_estimate:
            self._step_estimate = seconds

    def start(self) -> None:
        """Training begins: the first step is timed from here."""
        self.look()
        self._last_step = self.now
        self._evaluating = 0.0  # what was evaluated before is no part of the first step

    def step(self) -> None:
        """A step has ended; saving after the previous one counts toward it."""
        self.look()
        if self._last_step is not None:
            seconds = self.now - self._last_step
            self._recent.append(seconds)
            self._plain.append(seconds - self._evaluating)

        self._last_step = self.now
        self._evaluating = 0.0

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Time an evaluation; they are rare, so the slowest is kept separately."""
        began = self.clock()
        yield
        self.look()
        self._evaluating = self.now - began
        self.slowest_evaluation = max(self.slowest_evaluation, self._evaluating)

    def saved(self) -> None:
        """A checkpoint was written since the step ended."""
        self.slowest_save = max(self.slowest_save, self.clock() - self.now)

    # What is known

    @property
    def is_training(self) -> bool:
        return self._last_step is not None

    @property
    def session(self) -> float:
        """Seconds of this session, up to the last look."""
        return self.now - self.began

    @property
    def spent(self) -> float:
        """Seconds up to the last look, earlier sessions included."""
        return self.earlier.seconds + self.now - self.began

    @property
    def slowest_step(self) -> float:
        """Seconds of the slowest recent step with saving; before the first an estimate, or 0."""
        if not self._plain:
            return self._step_estimate

        return max(self._plain) + self.slowest_save

    def projected(self, steps_left: int) -> float | None:
        """Seconds of the whole run at the present pace; None before the first step."""
        if not self._recent:
            return None

        return self.spent + mean(self._recent) * steps_left

    def dollars(self, seconds: float) -> float | None:
        """Cost of the run's first seconds, earlier sessions at their own price, if known."""
        price = self.limits.price
        if price is None:
            return None

        paid = self.earlier.dollars
        if paid is None or not self.earlier.seconds:
            return seconds / 3600 * price

        return paid + (seconds - self.earlier.seconds) / 3600 * price

    def refusal(
        self, evaluations: int = 0, steps: int = 1, starts: bool = False, reserve: float = 0.0
    ) -> str | None:
        """Why the next step (0 if only evaluations are left) must not begin; None if it fits.
        `starts`: everything must be loaded first; `reserve`: seconds for what comes after."""
        need = self.slowest_step * steps + self.slowest_evaluation * evaluations + reserve
        if starts:
            need += max(self.start_seconds - self.session, 0.0)

        limits = self.limits
        after = f"{self.session:.3g} s have passed"
        if need:
            after += f" and what comes next takes about {need:.3g} s"

        if limits.seconds is not None and self.session + need > limits.seconds:
            return f"the time limit of {limits.seconds:g} s is too short: {after}"

        cost = self.dollars(self.spent + need)
        if limits.dollars is not None and cost is not None and cost > limits.dollars:
            spent = f"{self.dollars(self.spent):.3g} are spent"
            return f"the budget of {limits.dollars:g} dollars is too small: {spent}, {after}"

        return None

    def seconds_left(self) -> float | None:
        """Seconds from now to the first limit; None without one."""
        self.look()
        limits = self.limits
        left = []
        if limits.seconds is not None:
            left.append(limits.seconds - self.session)

        cost = self.dollars(self.spent)
        if limits.dollars is not None and limits.price and cost is not None:
            left.append((limits.dollars - cost) / limits.price * 3600)

        return min(left) if left else None

    # spent.json

    def record(self, ahead: float = 0.0) -> Spent:
        """Everything up to now and so many seconds ahead."""
        seconds = self.earlier.seconds + self.clock() - self.began + ahead

        return Spent(
            seconds=seconds,
            dollars=self.dollars(seconds),
            start=self.start_seconds,
            evaluation=self.slowest_evaluation,
            step=self.slowest_step,
        )

    def write(self, ahead: float = 0.0) -> None:
        if self.run is None:
            return

        with self._writing:
            self.run.save("spent", asdict(self.record(ahead)))


# A session: from the start of the command to its exit


@contextmanager
def open_budget(plan: Plan[Any], began: float) -> Iterator[Budget]:
    """Keep spent.json during a session, and refuse to begin what a limit does not allow."""
    budget = resumed_budget(plan, began)

    budget.look()
    to_do = work_ahead(plan)
    refuse(budget, budget.refusal(*to_do, starts=True, reserve=EXIT))

    budget.deadline = make_deadline(budget, plan.path)
    with Account(budget), interrupted(budget):
        yield budget


@contextmanager
def open_limits(config: TrainConfig | SftConfig, began: float) -> Iterator[None]:
    """Interrupt at the limits of a new run while its inputs are read and tried."""
    budget = Budget(limits_of(config), began=began)
    budget.deadline = make_deadline(budget, Path(os.devnull))
    with interrupted(budget):
        yield


@contextmanager
def interrupted(budget: Budget) -> Iterator[None]:
    """Interrupt the block at the budget's deadline, and say so."""
    if budget.deadline.seconds == 0.0:  # nothing is begun that would have to be interrupted
        raise SharedFailure(advise(budget, why_over(budget)))

    try:
        with budget.deadline:
            yield
    except LimitReached:
        raise SharedFailure(advise(budget, why_over(budget))) from None


def make_deadline(budget: Budget, path: Path) -> Deadline:
    left = budget.seconds_left()
    if left is None:
        return Deadline()

    spent = budget.record(ahead=left)
    values = {"seconds": spent.seconds, "dollars": spent.dollars}
    return Deadline(max(left - EXIT, 0.0), budget.write, (path / "spent.json", values))


def why_over(budget: Budget) -> str:
    """The limit that was reached, in words."""
    limits = budget.limits
    budget.look()
    if limits.seconds is not None and budget.session + EXIT >= limits.seconds:
        return f"the time limit of {limits.seconds:g} s is reached"

    return f"the budget of {limits.dollars:g} dollars is reached"


def resumed_budget(plan: Plan[Any], began: float) -> Budget:
    """A budget that counts from what earlier sessions of the run spent."""
    earlier = Spent()
    if plan.folder is not None and (values := plan.folder.load("spent")) is not None:
        earlier = read_spent(values, plan.folder.path / "spent.json")

    known = earlier if earlier.step else earlier_run(plan.config, plan.path)
    budget = Budget(limits_of(plan.config), earlier=earlier, known=known, began=began)
    budget.run = plan.folder
    return budget


def work_ahead(plan: Plan[Any]) -> tuple[int, int]:
    """How many evaluations and steps come at least before the first result: none or one each."""
    done = plan.checkpoint.step if plan.checkpoint else 0
    steps = int(done < plan.config.steps)

    evaluates = isinstance(plan.config, TrainConfig)
    is_first = plan.folder is None or plan.folder.load("before") is None
    evaluations = int(evaluates and (is_first or not steps))

    return evaluations, steps


def refuse(budget: Budget, reason: str | None) -> None:
    if reason is not None and is_main():
        raise ValueError(advise(budget, reason))


def advise(budget: Budget, reason: str) -> str:
    run = budget.run
    how = "" if run is None else f" and continue with --resume {run.path}"
    return f"{reason}: raise it{how}"


class Account:
    """A thread that writes spent.json every second, so that a killed session is counted too."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> Self:
        if is_main():
            self.budget.write(ahead=WRITE_EVERY)
            self._thread.start()

        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if is_main():
            self._thread.join()
            self.budget.write()

    def _keep(self) -> None:
        while not self._over.wait(WRITE_EVERY):
            with suppress(OSError):  # such as a full disk, which the run itself will report
                self.budget.write(ahead=WRITE_EVERY)


# How long the parts of a run take, before they are measured


def earlier_run(config: TrainConfig | SftConfig, path: Path) -> Spent:
    """How long the parts of a run take, by the newest run beside it with the same settings."""
    own = what_costs(to_plain(config))
    with suppress(OSError):
        files = [file for file in path.absolute().parent.glob("*/spent.json") if file.is_file()]
        files.sort(key=lambda file: -file.stat().st_mtime)
        for file in files[:MAX_RUNS]:
            with suppress(ValueError):  # another program's
                run = RunFolder(file.parent)
                if what_costs(run.config) == own:
                    spent = read_spent(run.load("spent") or {})
                    return replace(spent, seconds=0.0, dollars=None)

    return Spent()


def what_costs(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that change how long the parts of a run take."""
    return {key: value for key, value in config.items() if key not in FREE}


def sampling_time(seconds: float, problems: int, completions: int) -> float:
    """The least that sampling a batch takes, by an evaluation of so many problems: fewer at once
    take a share of it, more take at least as long."""
    return seconds * min(1.0, completions / max(problems, 1))
