"""The arguments that TRL's trainer gets from a run's config, and the batch sizes they imply.

TRL's options can be combined into objectives that were never published: dr_grpo with scaled
rewards, or cispo whose cap falls back to a clip width of 0.2. Here a name is the whole objective.
"""

import logging
from dataclasses import MISSING, fields
from typing import Any

from mesotron.config import (
    ObjectiveConfig,
    ObjectiveName,
    OptimConfig,
    RolloutConfig,
    TrainConfig,
)
from mesotron.rlvr import objectives
from mesotron.rlvr.objectives import resolve, trained_generations
from mesotron.runs.process import num_processes

log = logging.getLogger("mesotron")

# Cap of an entropy bonus whose target is out of reach: TRL would raise it to 1, which is noise.
MAX_ENTROPY_COEF = 0.1


def loss_arguments(objective: ObjectiveConfig) -> dict[str, Any]:
    """The part of `GRPOConfig` that selects the loss, for a resolved objective."""
    published = objectives.get(objective.name)
    adaptive = objective.entropy_target is not None

    arguments = {
        "loss_type": published.trl_loss,
        "importance_sampling_level": published.level,
        "beta": objective.beta,
        "scale_rewards": objective.scale_rewards,
        "epsilon": objective.epsilon,
        "epsilon_high": objective.epsilon_high,
        "entropy_coef": objective.entropy_bonus or None,
        "use_adaptive_entropy": adaptive or None,
        "entropy_target": objective.entropy_target,
        "entropy_coef_max": max(MAX_ENTROPY_COEF, objective.entropy_bonus) if adaptive else None,
    }

    return {key: value for key, value in arguments.items() if value is not None}


def trl_arguments(
    objective: ObjectiveConfig, rollout: RolloutConfig, optim: OptimConfig, num_processes: int = 1
) -> dict[str, Any]:
    resolved = resolve(objective, rollout.generations)
    generations = trained_generations(resolved, rollout.generations)
    constant = "constant_with_warmup" if optim.warmup else "constant"

    arguments = {
        **loss_arguments(resolved),
        "learning_rate": optim.lr,
        "weight_decay": optim.weight_decay,
        "lr_scheduler_type": constant if optim.schedule == "constant" else optim.schedule,
        "warmup_steps": optim.warmup,
        "max_grad_norm": optim.max_grad_norm,
        **_batch_sizes(rollout, generations, num_processes),
        "num_generations": generations,
        "max_completion_length": rollout.max_tokens,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
    }
    return arguments | sampler_arguments(rollout, objective.name)


def sampler_arguments(rollout: RolloutConfig, objective: ObjectiveName) -> dict[str, Any]:
    if rollout.max_staleness:
        return {"vllm_importance_sampling_mode": "token_truncate"}
    if rollout.vllm not in ("colocate", "server"):  # auto is resolved when the model is loaded
        return {}

    arguments = {"use_vllm": True, "vllm_mode": rollout.vllm}
    if objectives.get(objective).weighs_sequences:
        arguments["vllm_importance_sampling_mode"] = "token_truncate"

    return arguments


def _batch_sizes(rollout: RolloutConfig, generations: int, num_processes: int) -> dict[str, int]:
    # A rollout batch is split into `updates` steps, a step into micro-batches on each process.
    share, left = divmod(rollout.prompts * generations, rollout.updates * num_processes)
    if left or not share:
        raise ValueError(
            f"{rollout.prompts} prompts x {generations} completions do not divide into "
            f"{rollout.updates} updates on {num_processes} processes: change rollout.prompts"
        )

    micro = min(rollout.micro_batch or share, share)
    if share % micro:
        raise ValueError(
            f"--rollout.micro-batch {micro} does not divide the {share} rows of one update: use "
            f"{max(size for size in range(1, micro) if share % size == 0)} or another divisor"
        )

    steps = share // micro
    return {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": steps,
        "steps_per_generation": steps * rollout.updates,
    }


def check_updates(objective: ObjectiveConfig, updates: int) -> None:
    """Refuse, or warn of, an objective whose own part is void with one update per rollout."""
    loss = objectives.get_loss(objective)
    if updates > 1 or not loss.one_update:
        return

    if loss.one_update == "has no effect":
        raise ValueError(
            f"--objective.name {loss.name} has no effect with one update per rollout: raise "
            "--rollout.updates to 4 or 8, or use clip_cov"
        )

    message = "%s equals grpo with one update per rollout: raise rollout.updates to 4 or 8"
    log.warning(message, loss.name)


def first_round_rows(rows: int, generations: int, oversample: float) -> int:
    """Rows that one process samples in the first round; oversampling adds at least one prompt."""
    if oversample == 1:
        return rows
    if rows % generations:
        raise ValueError(
            f"objective.dynamic_oversample = {oversample:g} needs whole groups on each process, "
            f"which has {rows} completions in groups of {generations}: change rollout.prompts"
        )

    own = rows // generations
    return (own + max(1, round((oversample - 1) * own))) * generations


def first_round_prompts(
    objective: ObjectiveConfig, rollout: RolloutConfig, num_processes: int = 1
) -> int:
    G = trained_generations(resolve(objective, rollout.generations), rollout.generations)
    share = rollout.prompts * G // num_processes
    return first_round_rows(share, G, objective.dynamic_oversample) * num_processes // G


def resolve_objective(args: Any, objective: str | ObjectiveConfig | None) -> ObjectiveConfig:
    """The objective of a trainer, whose `num_generations` are the completions that train."""
    if objective is None:
        return ObjectiveConfig()

    given = objectives.as_config(objective)
    trained = args.num_generations or 0
    by_anchor = given.momentum_generations

    if not objectives.get(given.name).shares_group or given.loss_on_momentum:
        by_anchor = 0
    elif by_anchor is None:
        by_anchor = max(1, trained // 3)  # a quarter of all

    return resolve(given, trained + by_anchor)


def set_loss(args: Any, objective: ObjectiveConfig) -> None:
    defaults = {f.name: None if f.default is MISSING else f.default for f in fields(args)}
    for key, value in loss_arguments(objective).items():
        given = getattr(args, key)
        if given not in (value, defaults[key]):
            raise ValueError(
                f"args.{key} = {given!r}, but objective {objective.name!r} has {value!r}: leave "
                "it out of args, or set it in ObjectiveConfig"
            )

        setattr(args, key, value)


def check_enough(num_problems: float, config: TrainConfig) -> None:
    """Refuse fewer problems than one batch samples: TRL would silently train on none."""
    first = first_round_prompts(config.objective, config.rollout, num_processes())
    if num_problems < max(config.rollout.prompts, first):
        more = config.objective.dynamic_oversample

        if more > 1:
            oversampled = f" with --objective.dynamic-oversample {more:g}"
        else:
            oversampled = ""

        raise ValueError(
            f"{num_problems} training problems are fewer than the {first} prompts of one rollout "
            f"batch{oversampled}: give more problems or a smaller --batch"
        )
