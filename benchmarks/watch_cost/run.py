"""The share of a training step that goes into probes and the watch, and what an SNR probe costs.

    python -m benchmarks.watch_cost.run --out benchmarks/watch_cost/result.json

Real steps of the default recipe (muon, 16 prompts x 8 completions) and of larger rows, on the
shipped tiny model. Every probe that the trainer calls, the reading of the optimizer's statistics
and the callback of the watch, with a full memory, are timed where they are called, in processor
time. Judging facts is the reward's own work; the rest of the step is the trainer's.
"""

import argparse
import json
import platform
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import TrainerCallback

import mesotron
from mesotron.answers.verify import Verifier
from mesotron.config import RolloutConfig, TrainConfig
from mesotron.optim import RoutedOptimizer
from mesotron.recipes import make_recipe
from mesotron.rlvr import grpo
from mesotron.rlvr import trl_trainer as rlvr_trainer
from mesotron.rlvr.callbacks import SnrProbe
from mesotron.rlvr.lifecycle import quiet_libraries
from mesotron.rlvr.parts import build_trainer, load
from mesotron.runs import RunFolder
from mesotron.watch.engine import is_number

# name -> rollouts; the default recipe's, and four times as many completions.
SIZES = {
    "default": make_recipe("arith").rollout,
    "more": RolloutConfig(
        prompts=32,
        generations=16,
        max_tokens=32,
    ),
}
# Functions that are called only for the watch, by the module of the caller.
PROBES: tuple[tuple[Any, str], ...] = (
    (grpo.Scored, "group_metrics"),
    (rlvr_trainer, "repetition"),
    (grpo, "policy_metrics"),
    (RoutedOptimizer, "stats"),
)


class Timer:
    """Processor seconds by name, of one step at a time."""

    def __init__(self) -> None:
        self.now: dict[str, float] = defaultdict(float)
        self.steps: list[dict[str, float]] = []

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            found = function(*args, **kwargs)
            self.now[name] += time.process_time() - began

            return found

        return timed

    def close(self, whole: float) -> None:
        """End a step with its total time."""
        self.steps.append({**self.now, "step": whole})
        self.now = defaultdict(float)


class StepClock(TrainerCallback):
    """Closes the timer's step after all other callbacks; must be added last."""

    def __init__(self, timer: Timer) -> None:
        self.timer = timer
        self.began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.process_time()

    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        if "loss" in (logs or {}):
            self.timer.close(time.process_time() - self.began)


class OldWatch(mesotron.Watch):
    """A watch whose windows are full, as in the middle of a run."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        if not self.monitor.rows:
            draw = random.Random(0)
            row = {key: value for key, value in logs.items() if is_number(value)}
            for _ in range(120):
                self.engine.update({key: x * draw.uniform(0.9, 1.1) for key, x in row.items()})

        super().on_log(args, state, control, logs, **rest)


def measure(rollout: RolloutConfig, steps: int, snr_every: int, verifier: Verifier) -> list[dict]:
    """The timed steps of a run; the first one warms up and is left out."""
    config: TrainConfig = replace(make_recipe("arith"), rollout=rollout, steps=steps)
    timer = Timer()

    kept = [(module, name, getattr(module, name)) for module, name in PROBES]
    for module, name, function in kept:
        setattr(module, name, timer.around("probes", function))

    try:
        with tempfile.TemporaryDirectory() as folder:
            run = RunFolder.create(Path(folder) / "run", config, {})
            trainer = build_trainer(load(config, verifier), run)
            watch = OldWatch("warn", run.path)
            watch.on_log = timer.around("watch", watch.on_log)
            trainer.add_callback(watch)

            if snr_every:
                probe = SnrProbe(snr_every, trainer)
                probe.on_pre_optimizer_step = timer.around("snr", probe.on_pre_optimizer_step)
                trainer.callback_handler.callbacks.insert(0, probe)

            trainer.add_callback(StepClock(timer))
            trainer.train()
    finally:
        for module, name, function in kept:
            setattr(module, name, function)

    return timer.steps[1:]


def shares(steps: list[dict]) -> dict[str, float]:
    """Medians over steps: the watching as a share of the step without SNR, and milliseconds."""
    found = []
    for step in steps:
        plain = step["step"] - step.get("snr", 0.0)
        watching = step.get("probes", 0.0) + step.get("watch", 0.0)
        found.append((watching / plain, plain, step.get("probes", 0.0), step.get("watch", 0.0)))

    share, plain, probes, watch = (median(column) for column in zip(*found, strict=True))
    out = {
        "share": share,
        "step_ms": plain * 1e3,
        "probes_ms": probes * 1e3,
        "watch_ms": watch * 1e3,
    }

    snr = [
        step["snr"] / (step["step"] - step["snr"]) for step in steps if step.get("snr", 0) > 1e-4
    ]
    return out | ({"snr_share_of_its_step": median(snr)} if snr else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    quiet_libraries()

    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, one thread, processor time",
        "torch": torch.__version__,
        "sizes": {},
    }
    with Verifier() as verifier:
        for name in given.sizes:
            steps = measure(SIZES[name], given.steps, 2, verifier)
            result["sizes"][name] = shares(steps) | {"steps": steps}
            print(
                name, {k: v for k, v in result["sizes"][name].items() if k != "steps"}, flush=True
            )

            if given.out:
                given.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
