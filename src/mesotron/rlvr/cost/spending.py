"""Cost during a run: a metric in every row, and a stop before the step that would cross a limit.

What was spent is kept in the run's spent.json, so that a resumed run goes on counting, the steps
that were lost with a kill included.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mesotron.config import SftConfig, TrainConfig
from mesotron.runs import RunFolder
from mesotron.runs.processes import is_main
from mesotron.watch.budget import Meter, limits_of
from mesotron.watch.callback import broadcast

# Seconds between two writings of spent.json: each waits for the disk.
WRITE_EVERY = 10.0


@contextmanager
def metered(
    config: TrainConfig | SftConfig, run: RunFolder, began: float | None
) -> Iterator[Meter]:
    """The meter of a run for one session; what was spent is written down however it ends.

    Args:
        config: with the limits; a run whose budget has no room for a step is refused.
        run: whose spent.json says what earlier sessions took.
        began: when the command began, on `time.monotonic`; now if None.
    """
    earlier = run.load("spent") or {"seconds": 0.0, "dollars": None}
    before, paid, step = earlier["seconds"], earlier["dollars"], earlier.get("step") or 0.0
    meter = Meter(limits_of(config), before=before, paid=paid, began=began)
    if config.budget is not None:
        refuse_without_room(meter, run, config.budget, step)
    try:
        yield meter
    finally:
        write_spent(meter, run, step)


def refuse_without_room(meter: Meter, run: RunFolder, budget: float, step: float) -> None:
    """Refuse a run whose budget is spent but for less than a step.

    A session has timed no step of its own yet, so that nothing else would keep it from the first.

    Args:
        meter: of the run; its price is known where there is a budget.
        run: for the sentence.
        budget: in dollars.
        step: seconds of a step in the session before; 0 if it made none.
    """
    spent, then = meter.dollars(meter.before) or 0.0, meter.dollars(meter.before + step) or 0.0
    if spent < budget and then <= budget:
        return
    room = f", which leaves no room for a step of {step:.3g} s" if spent < budget else ""
    raise ValueError(
        f"{run.path} has spent {spent:.2f} of its budget of {budget:g} dollars{room}: give a "
        "larger --budget"
    )


def write_spent(meter: Meter, run: RunFolder, earlier_step: float | None = None) -> None:
    """Write down what was spent up to now; of several processes the main one does.

    Args:
        meter: of the run.
        run: whose spent.json is written.
        earlier_step: seconds of a step in the session before, for one that made none.
    """
    if is_main():
        meter.now = meter.clock()
        spent = {"seconds": meter.spent, "dollars": meter.dollars(meter.spent)}
        run.save("spent", spent | {"step": meter.slowest_step or earlier_step})


class Spending(TrainerCallback):
    """Puts time and cost into each row, and ends training before a limit is crossed.

    Args:
        meter: of the run.
        run: its folder.
        trainer: whose rows; TRL collects a row's metrics in `_metrics`.
        eval_every: steps between two evaluations; 0 for none.

    Attributes:
        stopped_by: why training was ended, or None.
    """

    def __init__(self, meter: Meter, run: RunFolder, trainer: Any, eval_every: int = 0) -> None:
        self.meter, self.run, self.trainer = meter, run, trainer
        self.eval_every = eval_every
        self.stopped_by: str | None = None
        self._written = time.monotonic()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Time the first step from here."""
        self.meter.start()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Measure; ask for a checkpoint and the end if the next step would not fit."""
        self.meter.step()
        left = state.max_steps - state.global_step
        for name, value in spending_row(self.meter, left).items():
            self.trainer._metrics["train"][name].append(value)
        evaluates = self.eval_every > 0 and (state.global_step + 1) % self.eval_every == 0
        why = broadcast(self.meter.refusal(evaluates)) if left else None
        if why is not None:
            self.stopped_by = why
            control.should_save = control.should_training_stop = True
        if time.monotonic() - self._written > WRITE_EVERY:
            self._written = time.monotonic()
            write_spent(self.meter, self.run)

    def on_save(self, *_: Any, **__: Any) -> None:
        """Saving takes time too."""
        self.meter.saved()


def spending_row(meter: Meter, steps_left: int) -> dict[str, float]:
    """time/* in seconds and, where the price is known, cost/* in dollars.

    Example:
        >>> from mesotron.watch.budget import Limits
        >>> times = iter([0.0, 1800.0, 3600.0])
        >>> meter = Meter(Limits(price=4.0), began=0.0, clock=lambda: next(times))
        >>> meter.start(), meter.step(), meter.step()
        (None, None, None)
        >>> spending_row(meter, steps_left=2)["cost/projected"]
        8.0
    """
    projected = meter.projected(steps_left)
    seconds = {"spent": meter.spent} | ({} if projected is None else {"projected": projected})
    found = {f"time/{name}": value for name, value in seconds.items()}
    for name, value in seconds.items():
        cost = meter.dollars(value)
        if cost is not None:
            found[f"cost/{name}"] = cost
    return found
