"""`mesotron plan`: steps, tokens, hours and dollars of a run before it starts.

The hours do not count evaluations and further rounds of dynamic sampling.
"""

import math
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from mesotron.config import PRICES_AS_OF, PlanConfig
from mesotron.rlvr.objectives import first_round_prompts, resolve
from mesotron.rlvr.tasks.load import GENERATED, load_task
from mesotron.rlvr.train import check, check_enough, check_installed, set_library_variables
from mesotron.runs import RunFolder
from mesotron.runs.console import spell_time
from mesotron.runs.process import num_processes
from mesotron.watch.budget import Limits, StepMath, limits_of, step_math

CALIBRATION_STEPS = 3


@dataclass(frozen=True)
class Pace:
    seconds_per_step: float | None  # of one optimizer step; None if unknown
    completion_tokens: float  # of a typical completion
    source: str  # where both come from, in words


@dataclass(frozen=True)
class Estimate:
    num_prompts: int  # training problems
    maths: StepMath  # of a step and of an epoch
    steps: int  # of the run
    tokens: tuple[float, float, float]  # sampled in the run: at least, expected, at most
    pace: Pace
    limits: Limits  # price and budget

    def seconds(self, steps: float) -> float | None:
        pace = self.pace.seconds_per_step
        return None if pace is None else steps * pace

    def dollars(self, steps: float) -> float | None:
        seconds, price = self.seconds(steps), self.limits.price
        return None if seconds is None or price is None else seconds / 3600 * price

    @property
    def affordable_steps(self) -> int | None:
        """Steps within budget and time limit; None without a pace or a limit."""
        limits = self.limits
        pairs = ((limits.dollars, self.dollars(1)), (limits.seconds, self.seconds(1)))
        fits = [limit / step for limit, step in pairs if limit is not None and step]
        return math.floor(min(fits) * (1 + 1e-9)) if fits else None


def run(config: PlanConfig) -> int:
    check(config)
    limits_of(config)
    task, num_prompts = config.task, config.task.num_train
    if task.name == "arith":
        num_prompts = GENERATED if num_prompts is None else num_prompts
    elif task.path is not None or num_prompts is None:
        # A file may have fewer than requested; a hub dataset is not downloaded to find out.
        num_prompts = len(load_task(task).train)
    set_library_variables(task, config.model.name)
    pace = find_pace(config, num_prompts)
    show(estimate(config, num_prompts, pace), config, Console(highlight=False))
    return 0


def find_pace(config: PlanConfig, num_prompts: int) -> Pace:
    length = config.completion_tokens or config.rollout.max_tokens / 2
    if config.calibrate:
        check_installed()
        return calibrate(config)
    if config.tokens_per_second:
        per_step = completions_per_update(config, num_prompts) * length / config.tokens_per_second
        return Pace(per_step, length, f"{config.tokens_per_second:g} tokens per second, as given")
    if config.seconds_per_step:
        return Pace(config.seconds_per_step, length, "as given")
    return Pace(None, length, "unknown: add --calibrate or --seconds-per-step")


def calibrate(config: PlanConfig) -> Pace:
    """Time a few whole rollouts on this machine; the first, a warm-up, is not counted."""
    from transformers import TrainerCallback

    from mesotron.rlvr.answers.verify import Verifier
    from mesotron.rlvr.session import build_trainer, load, quiet_libraries

    moments: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            moments.append(time.monotonic())

        def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
            if "loss" in (logs or {}):
                moments.append(time.monotonic())

    quiet_libraries()
    updates = config.rollout.updates
    steps = CALIBRATION_STEPS * updates
    short = replace(config, steps=steps, save_every=0, guard="off", report_to=())
    with tempfile.TemporaryDirectory() as folder, Verifier(config.reward.timeout) as verifier:
        run = RunFolder.create(Path(folder) / "run", short, {})
        trainer = build_trainer(load(short, verifier), run)
        trainer.add_callback(Clock())
        trainer.train()
    key = "completions/mean_length"
    lengths = [row[key] for row in trainer.state.log_history if key in row]
    seconds = (moments[-1] - moments[updates]) / (steps - updates)
    length = config.completion_tokens or mean(lengths)
    source = f"{steps} steps on this machine, {length:.3g} tokens per completion"
    return Pace(seconds, length, source)


def completions_per_update(config: PlanConfig, num_prompts: int) -> float:
    """Completions sampled per optimizer step, without further rounds of dynamic sampling."""
    first = first_round_prompts(config.objective, config.rollout, num_processes())
    return maths_of(config, num_prompts).completions_per_update * first / config.rollout.prompts


def maths_of(config: PlanConfig, num_prompts: int) -> StepMath:
    check_enough(num_prompts, config)
    rollout, objective = config.rollout, resolve(config.objective, config.rollout.generations)
    # A corewarding anchor samples beside the policy.
    beside = (objective.momentum_generations or 0) if objective.name == "corewarding" else 0
    return step_math(num_prompts, rollout.prompts, rollout.generations + beside, rollout.updates)


def estimate(config: PlanConfig, num_prompts: int, pace: Pace) -> Estimate:
    maths = maths_of(config, num_prompts)
    # The last rollout is sampled whole, though the run may end within its updates.
    updates = config.rollout.updates * math.ceil(config.steps / config.rollout.updates)
    first = completions_per_update(config, num_prompts) * updates
    resamples = config.objective.dynamic_sampling == "resample"
    rounds = config.objective.dynamic_max_rounds - 1 if resamples else 0
    further = maths.completions_per_update * updates * rounds
    tokens = (first, first * pace.completion_tokens, (first + further) * config.rollout.max_tokens)
    return Estimate(num_prompts, maths, config.steps, tokens, pace, limits_of(config))


def show(result: Estimate, config: PlanConfig, console: Console) -> None:
    maths, steps, pace = result.maths, result.steps, result.pace
    sampled = completions_per_update(config, result.num_prompts)
    trained = maths.completions_per_update
    completions = f"{trained:,g}"
    if sampled != trained:
        further = " or more" if config.objective.dynamic_max_rounds > 1 else ""
        completions += f", chosen from {sampled:,g}{further}"
    tokens = " / ".join(f"{count:,.0f}" for count in result.tokens)
    speed = pace.source
    if pace.seconds_per_step is not None:
        speed = f"{pace.seconds_per_step:.3g} s per step ({speed})"
    table = Table(title=f"{config.recipe}: {steps:,} steps", show_header=False)
    rows = [
        ("training problems", f"{result.num_prompts:,}"),
        ("prompts per update", f"{maths.prompts_per_update:,g}"),
        ("completions per update", completions),
        ("updates per epoch", f"{maths.updates_per_epoch:,}"),
        ("completions per epoch", f"{maths.completions_per_epoch:,}"),
        ("epochs of this run", f"{steps / maths.updates_per_epoch:.3g}"),
        ("tokens sampled, at least / expected / at most", tokens),
        ("pace", speed),
        *_time_and_money(result, config),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if config.gpu and config.price is None:
        console.print(f"price of {config.gpu} as of {PRICES_AS_OF}; --price sets your own")
    console.print("evaluations and start-up are not in the hours")


def _time_and_money(result: Estimate, config: PlanConfig) -> list[tuple[str, str]]:
    rows = []
    for what, steps in (("this run", result.steps), ("one epoch", result.maths.updates_per_epoch)):
        seconds, dollars = result.seconds(steps), result.dollars(steps)
        if seconds is not None:
            cost = "" if dollars is None else f", {dollars:,.2f} dollars"
            rows.append((f"time of {what}", f"{spell_time(seconds)}{cost}"))
    affordable = result.affordable_steps
    if affordable is not None:
        limits = [] if config.budget is None else [f"{config.budget:g} dollars"]
        limits += [] if config.time_limit is None else [config.time_limit]
        share = affordable / result.maths.updates_per_epoch
        enough = "all of this run" if affordable >= result.steps else f"{affordable:,} steps of it"
        rows.append((f"{' and '.join(limits)} buy", f"{enough}; {share:.3g} epochs"))
    return rows
