"""How many prompts, completions and tokens a step, an epoch and a run take."""

import math
from typing import NamedTuple

from mesotron.config import PlanConfig
from mesotron.rlvr.plan.setup import generations_beside
from mesotron.rlvr.trl_arguments import check_enough, first_round_prompts
from mesotron.runs.process import num_processes


class StepMath(NamedTuple):
    prompts_per_update: float
    completions_per_update: float
    updates_per_epoch: int
    completions_per_epoch: int


def step_math(config: PlanConfig, num_prompts: int) -> StepMath:
    check_enough(num_prompts, config)
    rollout = config.rollout
    completions = rollout.prompts * (rollout.generations + generations_beside(config))
    rollouts = num_prompts // rollout.prompts  # an incomplete batch is dropped, as in TRL

    return StepMath(
        prompts_per_update=rollout.prompts / rollout.updates,
        completions_per_update=completions / rollout.updates,
        updates_per_epoch=rollouts * rollout.updates,
        completions_per_epoch=rollouts * completions,
    )


def sampled_per_update(config: PlanConfig, step: StepMath) -> float:
    """Completions sampled per update, without further rounds of dynamic sampling."""
    first_round = first_round_prompts(config.objective, config.rollout, num_processes())
    return step.completions_per_update * first_round / config.rollout.prompts


class TokenCounts(NamedTuple):
    """Tokens sampled in a run."""

    least: float
    expected: float
    most: float


def tokens_of_run(config: PlanConfig, step: StepMath, completion_tokens: float) -> TokenCounts:
    rollout = config.rollout
    objective = config.objective

    # The last rollout is sampled whole, though the run may end within its updates.
    updates = rollout.updates * math.ceil(config.steps / rollout.updates)
    first = sampled_per_update(config, step) * updates

    resamples = objective.dynamic_sampling == "resample"
    further_rounds = objective.dynamic_max_rounds - 1 if resamples else 0
    further = step.completions_per_update * updates * further_rounds

    return TokenCounts(
        least=first,
        expected=first * completion_tokens,
        most=(first + further) * rollout.max_tokens,
    )
