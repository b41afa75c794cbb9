"""Times the phases of a trainer's step by wrapping its methods; nothing else changes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.speedrun.children import Row
from benchmarks.speedrun.contenders import Contestant, make_config
from mesotron.rlvr.trl_trainer import GRPOTrainer

# Phase -> where the method lives under the trainer. What is called inside another is not counted
# there.
PHASES = {
    "tokenize": "_tokenize_prompts",
    "sample": "_generate_single_turn",
    "score": "_calculate_rewards",  # ours has `_score`
    "rollout, rest": "_generate_and_score_completions",
    "forward": "_get_per_token_logps_and_entropies",
    "loss, rest": "_compute_loss",
    "backward": "accelerator.backward",
    "clip": "_clip_grad_norm",
    "optimizer": "optimizer.step",
    "log": "log",
    "callbacks": "callback_handler.call_event",
}
OURS = {"score": "_score"}  # whose rewards are not called through TRL's method


class Stopwatch:
    """Exclusive seconds of nested phases."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.inside: list[float] = []
        self.wrapped: list[tuple[Any, str, Any]] = []

    def around(self, phase: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed with a GPU synchronization at both ends."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            synchronize()
            began = time.perf_counter()
            self.inside.append(0.0)

            try:
                return work(*args, **kwargs)
            finally:
                synchronize()
                whole = time.perf_counter() - began
                self.spent[phase] += whole - self.inside.pop()

                if self.inside:
                    self.inside[-1] += whole

        return timed

    def attach(self, trainer: Any) -> None:
        """Time every phase of a trainer from now on."""
        is_ours = isinstance(trainer, GRPOTrainer)
        phases = PHASES | OURS if is_ours else PHASES

        for phase, path in phases.items():
            *where, name = path.split(".")
            owner = trainer
            for step in where:
                owner = getattr(owner, step)
            if phase == "score" and isinstance(trainer, GRPOTrainer):
                name = "_score"

            self.wrapped.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, self.around(phase, getattr(owner, name)))

    def detach(self) -> None:
        """Restore the trainer."""
        for owner, name, own in self.wrapped:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

    def milliseconds(self, steps: Sequence[float]) -> dict[str, float]:
        """Of a step by phase, what is in none of them last.

        Args:
            steps: milliseconds of the steps that were timed.
        """
        phases = {name: 1e3 * seconds / len(steps) for name, seconds in self.spent.items()}
        rest = sum(steps) / len(steps) - sum(phases.values())
        return phases | {"the loop's rest": rest}


class Measured(TrainerCallback):
    """Ends after `warm` + `count` plain steps and `count` with the stopwatch; the first has one
    too: it is mostly compiling and recording, and waiting for the GPU adds little."""

    def __init__(self, trainer: Any, warm: int, count: int, seconds: float) -> None:
        self.trainer = trainer
        self.warm = warm
        self.count = count
        self.limit = time.perf_counter() + seconds
        self.ends: list[float] = []
        self.first = Stopwatch()
        self.watch = Stopwatch()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.first.attach(self.trainer)
        self.ends.append(time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        synchronize()
        self.ends.append(time.perf_counter())

        if state.global_step == 1:
            self.first.detach()

        if state.global_step == self.warm + self.count:
            self.watch.attach(self.trainer)

        late = self.ends[-1] > self.limit
        control.should_training_stop = late or state.global_step >= self.warm + 2 * self.count

        if control.should_training_stop:  # what follows is in no step
            self.watch.detach()

    def row(self) -> Row:
        """Milliseconds of a step."""
        steps = [1e3 * (after - before) for before, after in pairwise(self.ends)]
        plain = steps[self.warm : self.warm + self.count]
        timed = steps[self.warm + self.count :]
        found: Row = {"first_ms": steps[0], "step_ms": sum(plain) / max(len(plain), 1)}
        found["first_phases_ms"] = self.first.milliseconds(steps[:1])
        found["second_ms"] = steps[1] if len(steps) > 1 else None
        if timed:
            found["phases_ms"] = self.watch.milliseconds(timed)
        return found


def measure(name: str, folder: Path, seconds: float, given: Row) -> Row:
    """One contender."""
    config = make_config(name, 0, given["model"], given["small"], given["common"])
    contestant = Contestant(name, config, folder / "run")
    measured = Measured(contestant.trainer, given["warm"], given["count"], seconds)
    contestant.trainer.add_callback(measured)
    contestant.trainer.train()

    return measured.row()


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
