"""Money and time: what a run has spent, what it will spend, and whether the next step fits.

Plain arithmetic on a clock; knows no trainer. Dollars are hours times a price: nothing is asked
of a provider, and what a machine costs before the command starts is not seen.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean

from mesotron.config import PRICES, SftConfig, TrainConfig, parse_duration
from mesotron.runs.processes import num_processes

# Steps whose slowest stands for the next one, and whose mean for those to come.
RECENT = 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a run may take.

    Args:
        dollars: over all of its sessions; None is no limit.
        price: dollars for an hour of the whole machine; None is unknown.
        seconds: of this session alone; None is no limit.
    """

    dollars: float | None = None
    price: float | None = None
    seconds: float | None = None


def limits_of(config: TrainConfig | SftConfig) -> Limits:
    """The limits that a config sets; refuses a budget without a price.

    Example:
        >>> from mesotron.config import TrainConfig
        >>> limits_of(TrainConfig(budget=45, gpu="h100", time_limit="3h"))
        Limits(dollars=45, price=3.95, seconds=10800.0)
    """
    price = config.price if config.price is not None or not config.gpu else PRICES[config.gpu]
    if config.budget is not None and price is None:
        raise ValueError(
            f"--budget {config.budget:g} needs the price of an hour: give --price 3.95, or "
            "--gpu h100"
        )
    return Limits(
        dollars=config.budget,
        price=None if price is None else price * num_processes(),
        seconds=None if config.time_limit is None else parse_duration(config.time_limit),
    )


class Meter:
    """Counts a run's time and money from the start of the command.

    Args:
        limits: what it may take.
        before: seconds that earlier sessions of the run have taken.
        paid: dollars that those have cost; None takes this session's price for them.
        began: when this session began, on the clock.
        clock: gives seconds.

    Example:
        >>> now = iter([10.0, 20.0, 32.0, 40.0])
        >>> meter = Meter(Limits(seconds=50.0), began=0.0, clock=lambda: next(now))
        >>> meter.start()
        >>> meter.step(), meter.step(), meter.step()
        (None, None, None)
        >>> meter.refusal()
        'the time limit of 50 s leaves no room for a step of up to 12 s and for saving'
    """

    def __init__(
        self,
        limits: Limits,
        *,
        before: float = 0.0,
        paid: float | None = None,
        began: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits, self.before, self.paid, self.clock = limits, before, paid, clock
        self.began = clock() if began is None else began
        self.now = self.began
        self.slowest_save = self.slowest_evaluation = 0.0
        self._evaluating = 0.0  # seconds of the step that is under way
        self._last: float | None = None
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._plain: deque[float] = deque(maxlen=RECENT)  # the same without evaluations

    def step(self) -> None:
        """A step has ended; what was saved after the one before counts for it."""
        self.now = self.clock()
        if self._last is not None:
            self._recent.append(self.now - self._last)
            self._plain.append(self.now - self._last - self._evaluating)
        self._last, self._evaluating = self.now, 0.0

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Times an evaluation; they are rare, so that the slowest is remembered by itself."""
        began = self.clock()
        yield
        self._evaluating = self.clock() - began
        self.slowest_evaluation = max(self.slowest_evaluation, self._evaluating)

    def saved(self) -> None:
        """A checkpoint has been written since the step ended."""
        self.slowest_save = max(self.slowest_save, self.clock() - self.now)

    def start(self) -> None:
        """Training begins: the first step is timed from here."""
        self._last = self.now = self.clock()

    @property
    def slowest_step(self) -> float | None:
        """Seconds of the slowest recent step and of saving; None before a step was timed."""
        return max(self._plain) + self.slowest_save if self._plain else None

    @property
    def spent(self) -> float:
        """Seconds up to the last step, those of earlier sessions included."""
        return self.before + self.now - self.began

    def projected(self, steps_left: int) -> float | None:
        """Seconds of the whole run at its present pace; None before a step was timed."""
        return self.spent + mean(self._recent) * steps_left if self._recent else None

    def dollars(self, seconds: float) -> float | None:
        """What the run's first so many seconds cost, those of earlier sessions at the price of
        then; None if the price is unknown."""
        price = self.limits.price
        if price is None:
            return None
        if self.paid is None:
            return seconds / 3600 * price
        return self.paid + (seconds - self.before) / 3600 * price

    def refusal(self, evaluates: bool = False) -> str | None:
        """Why the next step must not be begun, one sentence; None if it fits.

        Args:
            evaluates: whether an evaluation follows that step.
        """
        if not self._recent:
            return None
        step = max(self._plain) + self.slowest_evaluation * evaluates
        need, limits = step + self.slowest_save, self.limits
        room = f"leaves no room for a step of up to {step:.3g} s and for saving"
        if limits.seconds is not None and self.now - self.began + need > limits.seconds:
            return f"the time limit of {limits.seconds:g} s {room}"
        cost = self.dollars(self.spent + need)
        if limits.dollars is not None and cost is not None and cost > limits.dollars:
            return f"the budget of {limits.dollars:g} dollars {room}"
        return None


@dataclass(frozen=True)
class StepMath:
    """How prompts become optimizer steps.

    Args:
        prompts_per_update: prompts whose completions one optimizer step trains on.
        completions_per_update: completions sampled for it.
        updates_per_epoch: optimizer steps until each prompt was asked once.
        completions_per_epoch: completions sampled by then.
    """

    prompts_per_update: float
    completions_per_update: float
    updates_per_epoch: int
    completions_per_epoch: int


def step_math(num_prompts: int, prompts: int, generations: int, updates: int = 1) -> StepMath:
    """The step math of group-relative training.

    Args:
        num_prompts: of the whole data.
        prompts: of one rollout batch: what one pass of the model holds, times accumulation.
        generations: completions of each prompt, those of an anchor included.
        updates: optimizer steps made with each rollout batch.

    Example:
        Batches of 1 prompt, accumulated 4 times:

        >>> found = step_math(5000, prompts=1 * 4, generations=4)
        >>> found.updates_per_epoch, found.completions_per_epoch
        (1250, 20000)
    """
    rollouts = num_prompts // prompts  # a batch that would not be full is left out, as TRL does
    return StepMath(
        prompts_per_update=prompts / updates,
        completions_per_update=prompts * generations / updates,
        updates_per_epoch=rollouts * updates,
        completions_per_epoch=rollouts * prompts * generations,
    )
