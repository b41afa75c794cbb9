"""One run against the clock: training time without evaluations, until the target or the limit."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.speedrun.children import Row
from benchmarks.speedrun.contenders import Contestant, make_config

SETTLED = 5  # steps after the first that may still choose or record kernels


class Clock(TrainerCallback):
    """Training time without evaluations, the curve of accuracies, and the end.

    Args:
        contestant: who is measured.
        every: seconds of training between two evaluations.
        target: the accuracy that ends the run.
        seconds: of training, after which the run ends anyway.
        deadline: on `time.perf_counter`, evaluations included.
        pace: seconds of the first step and of a later one where the contestant is alone; given,
            steps are counted and the time is theirs, since others share the GPU.
        consecutive: evaluations in a row that must reach the target; the first one's time counts.
    """

    def __init__(
        self,
        contestant: Contestant,
        every: float,
        target: float,
        seconds: float,
        deadline: float,
        pace: tuple[float, float] | None = None,
        consecutive: int = 1,
    ) -> None:
        self.contestant = contestant
        self.every = every
        self.target = target
        self.seconds = seconds
        self.deadline = deadline
        self.pace = pace
        self.consecutive = consecutive
        self.began = 0.0
        self.paused = 0.0
        self.looked = 0.0
        self.cut_short = False
        self.curve: list[Row] = []
        self.steps: list[float] = []

    def now(self, step: int) -> float:
        """Seconds of training until the end of a step."""
        if self.pace is not None:
            first, other = self.pace
            return first + (step - 1) * other

        if torch.cuda.is_available():
            torch.cuda.synchronize()

        return time.perf_counter() - self.began - self.paused

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.look(0)
        self.began = time.perf_counter()
        self.paused = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = self.now(state.global_step)
        self.steps.append(now)
        self.cut_short = time.perf_counter() > self.deadline

        over = now > self.seconds or self.cut_short
        if over or now - self.looked >= self.every:
            self.looked = now
            self.look(state.global_step, now)

        if over or self.reached():
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step > self.curve[-1]["step"]:  # a schedule has come to its end
            self.look(state.global_step, self.steps[-1])

    def look(self, step: int, now: float = 0.0) -> None:
        """Evaluate with the clock stopped."""
        began = time.perf_counter()
        accuracy = self.contestant.accuracy()
        self.paused += time.perf_counter() - began
        self.curve.append({"step": step, "seconds": now, "accuracy": accuracy})

    def reached(self) -> bool:
        last = self.curve[-self.consecutive :]
        enough = len(last) == self.consecutive
        return enough and all(point["accuracy"] >= self.target for point in last)

    def row(self) -> Row:
        """The time to the target, None if it was not reached, and how it went."""
        last = self.curve[-1]
        reached = self.reached()
        times = [after - before for before, after in pairwise(self.steps)]
        settled = times[SETTLED:] or times or [0.0]

        return {
            "seconds_to_target": self.curve[-self.consecutive]["seconds"] if reached else None,
            "steps": last["step"],
            "best": max(point["accuracy"] for point in self.curve),
            "last": last["accuracy"],
            "cut_short": self.cut_short and not reached,
            "first_step_s": self.steps[0],
            "step_s": sum(times) / max(len(times), 1),
            "settled_step_s": median(settled),
            "curve": self.curve,
        }


def race(name: str, seed: int, folder: Path, seconds: float, given: Row) -> Row:
    """One contender, one seed."""
    deadline = time.perf_counter() + seconds
    config = make_config(name, seed, given["model"], given["small"], given["common"])
    contestant = Contestant(name, config, folder / "run")
    clock = Clock(
        contestant,
        every=given["every"],
        target=given["target"],
        seconds=given["limit"],
        deadline=deadline,
        pace=given.get("pace"),
        consecutive=given.get("consecutive", 1),
    )

    contestant.trainer.add_callback(clock)
    contestant.trainer.train()
    return clock.row() | {"name": name, "seed": seed}
