"""From configs to TRL's `GRPOConfig`: published values as one table, and traps refused.

TRL's options can be combined into objectives that nobody published: dr_grpo with scaled rewards, or
cispo whose cap falls back to a clip width of 0.2 (TRL 1.16). Here a name is the whole objective.
"""

import logging
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal

from mesotron.config.training import ObjectiveConfig, ObjectiveName, OptimConfig, RolloutConfig
from mesotron.rlvr.objectives.limits import refuse_numbers

log = logging.getLogger("mesotron")

SELF_LABELLED = ("vote", "mgrpo", "corewarding")
ANCHORED = ("mgrpo", "corewarding")
# Of an entropy bonus with a target that is out of reach: TRL would go on to 1, which is noise.
MOST_ENTROPY_WEIGHT = 0.1


@dataclass(frozen=True)
class Published:
    """The values an objective was published with.

    Args:
        loss_type: TRL's name of the loss.
        epsilon: clip width; None where the loss has no lower clip.
        epsilon_high: upper clip width; cispo's is the largest ratio itself.
        beta: weight of the KL term.
        scale_rewards: what advantages are divided by.
        level: a ratio for each token or for the whole sequence.
        momentum_schedule: of the anchor.
        source: where the values come from.
    """

    loss_type: str
    epsilon: float | None
    epsilon_high: float | None
    beta: float
    source: str
    scale_rewards: Literal["group", "batch", "none"] = "group"
    level: Literal["token", "sequence"] = "token"
    momentum_schedule: Literal["constant", "cosine"] = "constant"


PUBLISHED: dict[ObjectiveName, Published] = {
    "grpo": Published("grpo", 0.2, 0.2, 0.04, "arXiv 2402.03300 (DeepSeekMath)"),
    "dr_grpo": Published("dr_grpo", 0.2, 0.2, 0.0, "arXiv 2503.20783", scale_rewards="none"),
    "dapo": Published("dapo", 0.2, 0.28, 0.0, "arXiv 2503.14476"),
    "bnpo": Published("bnpo", 0.2, 0.2, 0.0, "TRL: the token mean of each micro-batch"),
    "cispo": Published("cispo", None, 5.0, 0.0, "arXiv 2506.13585; cap of arXiv 2510.13786"),
    "gspo": Published("grpo", 3e-4, 4e-4, 0.0, "arXiv 2507.18071", level="sequence"),
    "sapo": Published("sapo", None, None, 0.0, "arXiv 2511.20347"),
    "gmpo": Published("grpo", 0.4, 0.4, 0.0, "arXiv 2507.20673; clip widths in log space"),
    "vote": Published("grpo", 0.2, 0.2, 0.001, "arXiv 2504.16084 (TTRL), 2505.21444 (SRT)"),
    "mgrpo": Published("grpo", 0.2, 0.2, 0.005, "arXiv 2512.13070"),
    "corewarding": Published(
        "grpo", 0.2, 0.2, 0.001, "arXiv 2508.00410, version II", momentum_schedule="cosine"
    ),
}


def resolve(objective: str | ObjectiveConfig, generations: int) -> ObjectiveConfig:
    """Fill in what was left open with the published values, and refuse what contradicts the name.

    Args:
        objective: a name or a config.
        generations: completions of each prompt, the anchor's share of them included.

    Returns:
        A config without None in the fields that the objective reads.

    Example:
        >>> found = resolve("mgrpo", generations=8)
        >>> found.beta, found.momentum_generations
        (0.005, 2)
    """
    given = ObjectiveConfig(name=objective) if isinstance(objective, str) else objective  # type: ignore
    if given.name not in PUBLISHED:
        raise ValueError(f"objective {given.name!r} must be one of {', '.join(PUBLISHED)}")
    published = PUBLISHED[given.name]
    if given.name in SELF_LABELLED and given.loss == "gmpo":
        clip = PUBLISHED["gmpo"]
        published = replace(published, epsilon=clip.epsilon, epsilon_high=clip.epsilon_high)
    epsilon = published.epsilon if given.epsilon is None else given.epsilon
    high = published.epsilon_high if given.epsilon is None else given.epsilon
    found = replace(
        given,
        epsilon=epsilon,
        epsilon_high=high if given.epsilon_high is None else given.epsilon_high,
        beta=published.beta if given.beta is None else given.beta,
        scale_rewards=given.scale_rewards or published.scale_rewards,
        momentum_schedule=given.momentum_schedule or published.momentum_schedule,
        momentum_generations=_momentum_generations(given, generations),
    )
    _refuse_traps(given, found, generations)
    return found


def _momentum_generations(given: ObjectiveConfig, generations: int) -> int:
    if given.name not in ANCHORED:
        return 0
    if given.momentum_generations is not None:
        return given.momentum_generations
    return max(1, generations // 4) if given.name == "mgrpo" else generations


def _refuse_traps(given: ObjectiveConfig, found: ObjectiveConfig, generations: int) -> None:
    refuse_numbers(given)
    name, N = found.name, found.momentum_generations or 0
    if name == "dr_grpo" and found.scale_rewards != "none":
        raise ValueError(
            f"objective.scale_rewards = {found.scale_rewards!r} makes dr_grpo another objective: "
            "leave it out, or use grpo"
        )
    if name in ("cispo", "sapo") and given.epsilon is not None:
        raise ValueError(f"{name} has no clip width, so leave epsilon = {given.epsilon} out")
    if name == "cispo" and (found.epsilon_high or 0) <= 1:
        raise ValueError(
            f"cispo's epsilon_high = {found.epsilon_high} is the largest ratio itself and would "
            "clamp every token: give one above 1 (5.0 is published)"
        )
    if name not in SELF_LABELLED and given.loss != "grpo":
        raise ValueError(
            f"objective.loss = {given.loss!r} is for {', '.join(SELF_LABELLED)}; "
            f"for {name} give the loss as objective.name"
        )
    if not 0 <= N < (generations if name == "mgrpo" else N + 1):
        raise ValueError(
            f"objective.momentum_generations = {N} leaves none of the {generations} completions "
            "to the policy itself: give fewer"
        )
    if name == "mgrpo" and not found.loss_on_momentum and generations - N < 2:
        raise ValueError(
            f"{generations - N} completion of the policy itself has no baseline: raise "
            "rollout.generations to 4 or more"
        )
    if name == "corewarding" and (N < 1 or found.loss_on_momentum):
        raise ValueError(
            "corewarding takes its labels from the anchor and trains on the policy alone: give "
            "momentum_generations >= 1 and leave loss_on_momentum off"
        )


def trained_generations(objective: ObjectiveConfig, generations: int) -> int:
    """How many completions of each prompt enter the loss: TRL's `num_generations`.

    Args:
        objective: resolved.
        generations: `RolloutConfig.generations`.

    Example:
        >>> trained_generations(resolve("mgrpo", 8), 8)
        6
    """
    apart = objective.name == "mgrpo" and not objective.loss_on_momentum
    return generations - (objective.momentum_generations or 0) if apart else generations


def loss_arguments(objective: ObjectiveConfig) -> dict[str, Any]:
    """The part of `GRPOConfig` that says which loss it is.

    Args:
        objective: resolved.

    Example:
        >>> loss_arguments(resolve("gspo", 8))["importance_sampling_level"]
        'sequence'
    """
    published = PUBLISHED[objective.name]
    aimed = objective.entropy_target is not None
    most = max(MOST_ENTROPY_WEIGHT, objective.entropy_bonus) if aimed else None
    found = {
        "loss_type": published.loss_type,
        "importance_sampling_level": published.level,
        "beta": objective.beta,
        "scale_rewards": objective.scale_rewards,
        "epsilon": objective.epsilon,
        "epsilon_high": objective.epsilon_high,
        "entropy_coef": objective.entropy_bonus or None,
        "use_adaptive_entropy": aimed or None,
        "entropy_target": objective.entropy_target,
        "entropy_coef_max": most,
    }
    return {key: value for key, value in found.items() if value is not None}


def trl_arguments(
    objective: ObjectiveConfig,
    rollout: RolloutConfig,
    optim: OptimConfig,
    num_processes: int = 1,
) -> dict[str, Any]:
    """Arguments of `trl.GRPOConfig` for these parts of a run.

    Args:
        objective: resolved or not.
        rollout: `prompts` counts over all processes, `micro_batch` on each.
        optim: the schedule and the clip; the optimizer itself is the trainer's.
        num_processes: how many train together.

    Returns:
        Keyword arguments; the output folder, steps, seed and precision are the caller's.

    Example:
        >>> rollout = RolloutConfig(prompts=4, generations=8, updates=2)
        >>> found = trl_arguments(ObjectiveConfig(), rollout, OptimConfig())
        >>> found["per_device_train_batch_size"], found["steps_per_generation"]
        (16, 2)
    """
    resolved = resolve(objective, rollout.generations)
    generations = trained_generations(resolved, rollout.generations)
    found = loss_arguments(resolved) | _schedule(optim)
    found |= _batches(rollout, generations, num_processes)
    found |= {
        "num_generations": generations,
        "max_completion_length": rollout.max_tokens,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
    }
    if rollout.vllm != "off":
        if rollout.fast:
            raise ValueError(
                f"rollout.fast and rollout.vllm {rollout.vllm} both sample: leave one of them out"
            )
        found |= {"use_vllm": True, "vllm_mode": rollout.vllm}
    return found


def _schedule(optim: OptimConfig) -> dict[str, Any]:
    constant = "constant_with_warmup" if optim.warmup else "constant"
    return {
        "learning_rate": optim.lr,
        "weight_decay": optim.weight_decay,
        "lr_scheduler_type": constant if optim.schedule == "constant" else optim.schedule,
        "warmup_steps": optim.warmup,
        "max_grad_norm": optim.max_grad_norm,
    }


def _batches(rollout: RolloutConfig, generations: int, num_processes: int) -> dict[str, int]:
    """A rollout batch is cut into `updates` steps, a step into micro-batches on each process."""
    rows = rollout.prompts * generations
    share, left = divmod(rows, rollout.updates * num_processes)
    if left or not share:
        raise ValueError(
            f"{rollout.prompts} prompts x {generations} trained completions = {rows} rows "
            f"cannot be shared by {rollout.updates} updates on {num_processes} processes: change "
            "rollout.prompts"
        )
    micro = rollout.micro_batch or share
    micro = min(micro, share)
    if share % micro:
        raise ValueError(
            f"rollout.micro_batch = {micro} does not divide the {share} rows of one update: give "
            f"{share // ceil(share / micro)} or another divisor"
        )
    steps = share // micro
    return {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": steps,
        "steps_per_generation": steps * rollout.updates,
    }


def warn_if_on_policy(objective: ObjectiveConfig, updates: int) -> None:
    """Say that a loss which differs only off-policy changes nothing with one update per rollout."""
    if updates > 1:
        return
    geometric = objective.name == "gmpo" or (
        objective.loss == "gmpo" and objective.name in SELF_LABELLED
    )
    if geometric or objective.name == "gspo":
        name = "gmpo" if geometric else "gspo"
        log.warning(
            "%s equals grpo while each rollout is used for one update, since every ratio is 1: "
            "raise rollout.updates (4 and 8 are published)",
            name,
        )
