"""Cost during a run: time and dollars in every row, and a stop before a limit is crossed.

The run's spent.json lets a resumed run keep counting, including steps lost when it was killed.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback

from mesotron.config import SftConfig, TrainConfig
from mesotron.runs import RunFolder
from mesotron.runs.process import is_main
from mesotron.watch.budget import Meter, limits_of
from mesotron.watch.callback import broadcast

WRITE_EVERY = 10.0  # seconds between writes of spent.json


@contextmanager
def metered(
    config: TrainConfig | SftConfig, run: RunFolder, began: float | None
) -> Iterator[Meter]:
    """The meter of one session; what was spent is written when the session ends."""
    earlier = run.load("spent") or {"seconds": 0.0, "dollars": None}
    step = earlier.get("step") or 0.0
    meter = Meter(
        limits_of(config), before=earlier["seconds"], paid=earlier["dollars"], began=began
    )
    if config.budget is not None:
        # This session has not timed a step yet, so only this check can stop the first one.
        spent = meter.dollars(meter.before) or 0.0
        after_step = meter.dollars(meter.before + step) or 0.0
        if spent >= config.budget or after_step > config.budget:
            left = f", too little for a step of {step:.3g} s" if spent < config.budget else ""
            raise ValueError(
                f"{run.path} has spent {spent:.2f} of its budget of {config.budget:g} dollars"
                f"{left}: raise --budget"
            )
    try:
        yield meter
    finally:
        write_spent(meter, run, step)


def write_spent(meter: Meter, run: RunFolder, earlier_step: float | None = None) -> None:
    if is_main():
        meter.now = meter.clock()
        spent = {"seconds": meter.spent, "dollars": meter.dollars(meter.spent)}
        run.save("spent", spent | {"step": meter.slowest_step or earlier_step})


class Spending(TrainerCallback):
    """Logs time and cost in each row and stops training before a limit is crossed."""

    def __init__(self, meter: Meter, run: RunFolder, trainer: Any, eval_every: int = 0) -> None:
        self.meter, self.run, self.trainer = meter, run, trainer
        self.eval_every = eval_every
        self.stopped_by: str | None = None
        self._written = time.monotonic()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.meter.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.step()
        left = state.max_steps - state.global_step
        times = {"spent": self.meter.spent, "projected": self.meter.projected(left)}
        for name, seconds in times.items():
            dollars = None if seconds is None else self.meter.dollars(seconds)
            for key, value in ((f"time/{name}", seconds), (f"cost/{name}", dollars)):
                if value is not None:
                    self.trainer._metrics["train"][key].append(value)
        evaluates = self.eval_every > 0 and (state.global_step + 1) % self.eval_every == 0
        reason = broadcast(self.meter.refusal(evaluates)) if left else None
        if reason is not None:
            self.stopped_by = reason
            control.should_save = control.should_training_stop = True
        if time.monotonic() - self._written > WRITE_EVERY:
            self._written = time.monotonic()
            write_spent(self.meter, self.run)

    def on_save(self, *_: Any, **__: Any) -> None:
        self.meter.saved()
