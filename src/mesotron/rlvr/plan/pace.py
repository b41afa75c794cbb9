"""How long a step takes: as given, as timed on this machine, or as estimated."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from mesotron.config import PlanConfig
from mesotron.rlvr.plan.estimate import LENGTH, StepEstimate
from mesotron.rlvr.plan.problems import lengths_of
from mesotron.rlvr.plan.sizes import sampled_per_update, step_math
from mesotron.runs import RunFolder
from mesotron.runs.files import Row

CALIBRATION_STEPS = 3


class Pace(NamedTuple):
    seconds_per_step: float | None  # of one optimizer step; None if unknown
    completion_tokens: float  # of a typical completion
    source: str  # where both come from, in words


def find_pace(config: PlanConfig, num_prompts: int, step: StepEstimate) -> Pace:
    if config.calibrate:
        return calibrate(config)

    length = lengths_of(config, 0, config.completion_tokens).completion
    if config.tokens_per_second:
        sampled = sampled_per_update(config, step_math(config, num_prompts))
        source = f"{config.tokens_per_second:g} tokens per second, as given"
        return Pace(sampled * length / config.tokens_per_second, length, source)

    if config.seconds_per_step:
        return Pace(config.seconds_per_step, length, "as given")

    if step.prediction is None:
        source = f"unknown: {step.problem}; or add --calibrate or --seconds-per-step"
        return Pace(None, length, source)

    source = f"estimate for {step.gpu or 'one CPU core'}"
    if step.runs:
        source += f" times {step.factor:.2g}, measured in {spell_runs(step.runs)}"

    return Pace(step.prediction.step * step.factor, length, source)


def spell_runs(runs: Sequence[str]) -> str:
    shown = ", ".join(runs[:2])
    if len(runs) > 2:
        return f"{shown} and {len(runs) - 2} more"

    return shown


def calibrate(config: PlanConfig) -> Pace:
    """Time a few whole rollouts on this machine; the first, a warm-up, is not counted."""
    steps = CALIBRATION_STEPS * config.rollout.updates
    rows = train_briefly(replace(config, steps=steps, save_every=0, guard="off", report_to=()))

    times = [row["time/step"] for row in rows if "time/step" in row]
    counted = times[config.rollout.updates :]
    length = config.completion_tokens or mean(row[LENGTH] for row in rows if LENGTH in row)

    source = f"{steps} steps on this machine, {length:.3g} tokens per completion"
    return Pace(mean(counted), length, source)


def train_briefly(config: PlanConfig) -> list[Row]:
    """The logged rows of a training run that leaves nothing behind."""
    from mesotron.answers.verify import Verifier
    from mesotron.rlvr.lifecycle import quiet_libraries
    from mesotron.rlvr.parts import build_trainer, load

    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder, Verifier(config.reward.timeout) as verifier:
        run = RunFolder.create(Path(folder) / "run", config, {})
        trainer = build_trainer(load(config, verifier), run)
        trainer.train()

    return trainer.state.log_history
