"""`--steps auto`: a run that ends when more steps are not worth their cost.

At a held-out evaluation the run ends if both hold:

    none of the last three evaluations was better than the kept checkpoint (`runs.best`), and
    the forecast (`watch.forecast`) gives the reward a chance below one in four to rise over half as
    many steps again

The first alone would end a run whose reward rises before its evaluations do, the second alone one
whose reward is noisy. A budget or a time limit ends it too, and at the latest ten times the steps
of the recipe. The end is not known before, so the rate does not fall (`rlvr.train.resolve_steps`).
"""

from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback

from mesotron.runs import RunFolder
from mesotron.runs.best import BestCheckpoint
from mesotron.watch.callback import Watch, broadcast
from mesotron.watch.forecast import forecast
from mesotron.watch.metrics import Row

PATIENCE = 3  # evaluations without a better checkpoint
LOOK_AHEAD = 1.5  # times the steps so far
LEAST_CHANCE = 0.25  # of a higher reward by then


def why_end(best: BestCheckpoint, rows: Sequence[Row], step: int) -> str | None:
    """Why more steps are not worth their cost; None if they may be."""
    if best.since < PATIENCE:
        return None

    ahead = forecast(rows, LOOK_AHEAD * step)
    chance = ahead.probabilities.get("learn", 1.0)  # none is given where it is unknown
    if chance >= LEAST_CHANCE:
        return None

    return (
        f"none of the last {best.since} evaluations is better than {best.name}, and a higher "
        f"reward by step {ahead.steps:.0f} has a chance of {chance:.2f}"
    )


class OwnEnd(TrainerCallback):
    """Ends a run by `why_end`, as if this had been its last step. Must come after the watch, whose
    rows it reads, and after the evaluations."""

    def __init__(self, every: int, trainer: Any, watch: Watch, run: RunFolder) -> None:
        self.every = every
        self.trainer = trainer
        self.watch = watch
        self.run = run
        self.reason: str | None = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        step = state.global_step
        is_due = step % self.every == 0 and step < state.max_steps and "loss" in (logs or {})
        is_ending = control.should_training_stop or self._was_undone(step)
        if not is_due or is_ending:
            return

        why = None
        if self.trainer.best is not None:
            why = why_end(self.trainer.best, self.watch.monitor.rows, step)

        why = broadcast(why)
        if why is None:
            return

        self.reason = why
        # First the plan, then the checkpoint: a run killed in between makes this step its last.
        if state.is_world_process_zero:
            self.run.save("config", {**self.run.config, "steps": step})

        state.max_steps = step
        self.trainer.end_with_average()
        control.should_save = control.should_training_stop = True

    def _was_undone(self, step: int) -> bool:
        """Whether the guard has just gone back to earlier weights."""
        return any(action.step == step for action in self.watch.actions)
