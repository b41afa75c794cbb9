"""Money and time: what a run has spent, what it will spend, and whether the next step fits.

Plain arithmetic on a clock. Dollars are hours times a price; what a machine costs before the
command starts is not counted.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any

from mesotron.config import PRICES, SftConfig, TrainConfig, parse_duration
from mesotron.runs.process import num_processes

# The slowest of these steps predicts the next one, their mean the rest of the run.
RECENT = 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a run; None is unlimited, or unknown for the price."""

    dollars: float | None = None  # over all sessions
    price: float | None = None  # dollars per hour of the whole machine
    seconds: float | None = None  # of this session


def limits_of(config: TrainConfig | SftConfig) -> Limits:
    price = config.price if config.price is not None or not config.gpu else PRICES[config.gpu]
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
    known = {
        key: float(value)
        for key, value in values.items()
        if key in asdict(Spent()) and type(value) in (int, float) and 0 <= value < 1e300
    }

    if "seconds" not in known:
        raise ValueError(f"{source} has no valid seconds: correct it, or remove it to count from 0")

    return Spent(**known)


class Meter:
    """Counts the time and money of a run from the start of the command; `known` is what earlier
    sessions or runs measured."""

    def __init__(
        self,
        limits: Limits,
        *,
        before: float = 0.0,  # seconds of earlier sessions
        paid: float | None = None,  # dollars that they cost; None applies this session's price
        known: Spent | None = None,
        began: float | None = None,  # on the clock
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.before = before
        self.paid = paid
        self.clock = clock
        self.known = known or Spent()
        self.began = clock() if began is None else began
        self.now = self.began
        self.slowest_save = 0.0
        self.slowest_evaluation = self.known.evaluation
        self.start_seconds = 0.0
        self._evaluating = 0.0  # seconds of evaluation in the present step
        self._last: float | None = None
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._plain: deque[float] = deque(maxlen=RECENT)  # the same without evaluations

    @property
    def is_training(self) -> bool:
        return self._last is not None

    def loaded(self) -> None:
        self.now = self.clock()
        self.start_seconds = self.now - self.began

    def calibrate(self, seconds: float) -> None:
        """A step takes at least so long, until steps are measured."""
        if not self.known.step:
            self.known = replace(self.known, step=seconds)

    def start(self) -> None:
        """Training begins: the first step is timed from here."""
        self._last = self.now = self.clock()
        self._evaluating = 0.0  # what was evaluated before is no part of the first step

    def step(self) -> None:
        """A step has ended; saving after the previous one counts toward it."""
        self.now = self.clock()
        if self._last is not None:
            self._recent.append(self.now - self._last)
            self._plain.append(self.now - self._last - self._evaluating)

        self._last = self.now
        self._evaluating = 0.0

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Time an evaluation; they are rare, so the slowest is kept separately."""
        began = self.clock()
        yield
        self.now = self.clock()
        self._evaluating = self.now - began
        self.slowest_evaluation = max(self.slowest_evaluation, self._evaluating)

    def saved(self) -> None:
        """A checkpoint was written since the step ended."""
        self.slowest_save = max(self.slowest_save, self.clock() - self.now)

    @property
    def slowest_step(self) -> float:
        """Seconds of the slowest recent step with saving; before the first an estimate, or 0."""
        return max(self._plain) + self.slowest_save if self._plain else self.known.step

    def record(self, ahead: float = 0.0) -> Spent:
        """Everything up to now and so many seconds ahead."""
        seconds = self.before + self.clock() - self.began + ahead
        start = self.start_seconds or self.known.start

        return Spent(
            seconds=seconds,
            dollars=self.dollars(seconds),
            start=start,
            evaluation=self.slowest_evaluation,
            step=self.slowest_step,
        )

    @property
    def spent(self) -> float:
        """Seconds up to the last step, earlier sessions included."""
        return self.before + self.now - self.began

    def projected(self, steps_left: int) -> float | None:
        """Seconds of the whole run at the present pace; None before the first step."""
        return self.spent + mean(self._recent) * steps_left if self._recent else None

    def dollars(self, seconds: float) -> float | None:
        """Cost of the run's first seconds, earlier sessions at their own price, if known."""
        price = self.limits.price
        paid = self.paid
        if price is None or paid is None:
            return None if price is None else seconds / 3600 * price

        return paid + (seconds - self.before) / 3600 * price

    def refusal(
        self, evaluations: int = 0, steps: int = 1, starts: bool = False, reserve: float = 0.0
    ) -> str | None:
        """Why the next step (0 if only evaluations are left) must not begin; None if it fits.
        `starts`: everything must be loaded first; `reserve`: seconds for what comes after."""
        need = self.slowest_step * steps + self.slowest_evaluation * evaluations + reserve
        limits = self.limits
        session = self.now - self.began
        need += max(self.known.start - session, 0.0) * starts
        after = f"{session:.3g} s have passed"
        after += f" and what comes next takes about {need:.3g} s" if need else ""
        if limits.seconds is not None and session + need > limits.seconds:
            return f"the time limit of {limits.seconds:g} s is too short: {after}"

        cost = self.dollars(self.spent + need)
        if limits.dollars is not None and cost is not None and cost > limits.dollars:
            spent = f"{self.dollars(self.spent):.3g} are spent"
            return f"the budget of {limits.dollars:g} dollars is too small: {spent}, {after}"

        return None
