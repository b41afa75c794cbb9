"""The share of a training step that goes into probes and the watch, and what an SNR probe costs.

    python -m benchmarks.watch_cost.run --out benchmarks/watch_cost/result.json

Real steps of the default recipe (muon, 16 prompts x 8 completions) and of larger rows, on the
shipped tiny model. Every probe that the trainer calls, the reading of the optimizer's statistics
and the callback of the watch, with a full memory, are timed where they are called, in processor
time. Judging facts is the reward's own work; the rest of the step is the trainer's.
"""

import argparse
import platform
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import TrainerCallback

import mesotron
from benchmarks._lib.results import write_json
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
    "more": RolloutConfig(prompts=32, generations=16, max_tokens=32),
}
# Functions that are called only for the watch, by the module of the caller.
PROBES: tuple[tuple[Any, str], ...] = (
    (grpo.Scored, "group_metrics"),
    (rlvr_trainer, "repetition"),
    (grpo, "policy_metrics"),
    (RoutedOptimizer, "stats"),
)


Step = dict[str, float]  # processor seconds by name


class Timer:
    """Processor seconds by name, of one step at a time."""

    def __init__(self) -> None:
        self.now: dict[str, float] = defaultdict(float)
        self.steps: list[Step] = []

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


def measure(rollout: RolloutConfig, steps: int, snr_every: int, verifier: Verifier) -> list[Step]:
    """The timed steps of a run; the first one warms up and is left out."""
    config: TrainConfig = replace(make_recipe("arith"), rollout=rollout, steps=steps)
    timer = Timer()
    with timed_probes(timer), tempfile.TemporaryDirectory() as folder:
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
    return timer.steps[1:]


@contextmanager
def timed_probes(timer: Timer) -> Iterator[None]:
    """Inside, the functions that are called only for the watch are timed."""
    kept = [(module, name, getattr(module, name)) for module, name in PROBES]
    try:
        for module, name, function in kept:
            setattr(module, name, timer.around("probes", function))
        yield
    finally:
        for module, name, function in kept:
            setattr(module, name, function)


def shares(steps: list[Step]) -> dict[str, float]:
    """Medians over steps: the watching as a share of the step without SNR, and milliseconds."""
    plain = [step["step"] - step.get("snr", 0.0) for step in steps]
    probes = [step.get("probes", 0.0) for step in steps]
    watch = [step.get("watch", 0.0) for step in steps]
    columns = zip(plain, probes, watch, strict=True)
    found = {
        "share": median((probed + watched) / whole for whole, probed, watched in columns),
        "step_ms": median(plain) * 1e3,
        "probes_ms": median(probes) * 1e3,
        "watch_ms": median(watch) * 1e3,
    }

    with_snr = [step for step in steps if step.get("snr", 0.0) > 1e-4]
    if with_snr:
        ratios = [step["snr"] / (step["step"] - step["snr"]) for step in with_snr]
        found["snr_share_of_its_step"] = median(ratios)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()

    torch.set_num_threads(1)
    quiet_libraries()
    sizes: dict[str, Any] = {}
    machine = f"{platform.machine()}, one thread, processor time"
    result = {"machine": machine, "torch": torch.__version__, "sizes": sizes}
    with Verifier() as verifier:
        for name in given.sizes:
            steps = measure(SIZES[name], given.steps, 2, verifier)
            found = shares(steps)
            print(name, found, flush=True)

            sizes[name] = found | {"steps": steps}
            if given.out:
                write_json(result, given.out, indent=1)


if __name__ == "__main__":
    main()
