"""Objectives by name: the published values as one table, and the `GRPOConfig` they become.

TRL's options can be combined into objectives that were never published: dr_grpo with scaled
rewards, or cispo whose cap falls back to a clip width of 0.2. Here a name is the whole objective.
"""

import logging
import tomllib
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from mesotron.config import (
    SELF_LABELED,
    ObjectiveConfig,
    ObjectiveName,
    OptimConfig,
    RolloutConfig,
    TrainConfig,
)
from mesotron.runs.process import num_processes

log = logging.getLogger("mesotron")

ANCHORED = ("mgrpo", "corewarding")
# Cap of an entropy bonus whose target is out of reach: TRL would raise it to 1, which is noise.
MAX_ENTROPY_COEF = 0.1


@dataclass(frozen=True)
class Published:
    loss_type: str  # TRL's name
    source: str
    epsilon: float | None = None  # clip width; None where the loss has no lower clip
    epsilon_high: float | None = None  # for cispo the largest ratio itself
    beta: float = 0.0
    scale_rewards: Literal["group", "batch", "none"] = "group"
    level: Literal["token", "sequence"] = "token"  # of importance ratios
    cov_share: float | None = None
    momentum_schedule: Literal["constant", "cosine"] = "constant"


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PUBLISHED = {name: Published(**_TABLE[name]) for name in get_args(ObjectiveName)}


def resolve(objective: str | ObjectiveConfig, generations: int) -> ObjectiveConfig:
    """Fill open fields with the published values; raise ValueError for what contradicts the name.

    `generations` are the completions per prompt, the anchor's included.

    Example:
        >>> resolved = resolve("mgrpo", generations=8)
        >>> resolved.beta, resolved.momentum_generations
        (0.005, 2)
    """
    given = ObjectiveConfig(name=objective) if isinstance(objective, str) else objective  # type: ignore
    if given.name not in PUBLISHED:
        raise ValueError(f"objective {given.name!r} must be one of {', '.join(PUBLISHED)}")

    published = PUBLISHED[given.name]
    if is_geometric(given):
        clip = PUBLISHED["gmpo"]
        published = replace(published, epsilon=clip.epsilon, epsilon_high=clip.epsilon_high)

    N = given.momentum_generations
    if given.name not in ANCHORED:
        N = 0
    elif N is None:
        N = max(1, generations // 4) if given.name == "mgrpo" else generations

    high = published.epsilon_high if given.epsilon is None else given.epsilon
    resolved = replace(
        given,
        epsilon=published.epsilon if given.epsilon is None else given.epsilon,
        epsilon_high=high if given.epsilon_high is None else given.epsilon_high,
        beta=published.beta if given.beta is None else given.beta,
        cov_share=given.cov_share or published.cov_share,
        scale_rewards=given.scale_rewards or published.scale_rewards,
        momentum_schedule=given.momentum_schedule or published.momentum_schedule,
        momentum_generations=N,
    )

    if given.name == "mgrpo" and generations <= N:
        raise ValueError(f"objective.momentum_generations = {N} leaves none of {generations}")
    if given.name == "mgrpo" and not given.loss_on_momentum and generations - N < 2:
        raise ValueError("one completion has no baseline: raise rollout.generations to 4 or more")

    return resolved


def is_geometric(objective: ObjectiveConfig) -> bool:
    return objective.name == "gmpo" or (objective.loss == "gmpo" and objective.name in SELF_LABELED)


def trained_generations(objective: ObjectiveConfig, generations: int) -> int:
    """How many completions per prompt enter the loss: TRL's `num_generations`."""
    if objective.name == "mgrpo" and not objective.loss_on_momentum:
        return generations - (objective.momentum_generations or 0)
    return generations


def loss_arguments(objective: ObjectiveConfig) -> dict[str, Any]:
    """The part of `GRPOConfig` that selects the loss, for a resolved objective."""
    published = PUBLISHED[objective.name]
    adaptive = objective.entropy_target is not None
    arguments = {
        "loss_type": published.loss_type,
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
    if rollout.vllm not in ("colocate", "server"):  # auto is resolved when the model is loaded
        return {}

    arguments = {"use_vllm": True, "vllm_mode": rollout.vllm}
    if objective == "vespo":  # it has a weight per sequence of its own
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
    name = "gmpo" if is_geometric(objective) else objective.name
    if updates <= 1 and name == "kl_cov":  # |log ratio| has no gradient at ratio 1
        raise ValueError(
            "--objective.name kl_cov has no effect with one update per rollout: raise "
            "--rollout.updates to 4 or 8, or use clip_cov"
        )

    if updates <= 1 and name in ("gmpo", "gspo"):
        message = "%s equals grpo with one update per rollout: raise rollout.updates to 4 or 8"
        log.warning(message, name)


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
    if objective is None:
        return ObjectiveConfig()

    given = ObjectiveConfig(name=objective) if isinstance(objective, str) else objective  # pyright: ignore
    M = args.num_generations or 0

    N = given.momentum_generations
    if given.name == "mgrpo" and not given.loss_on_momentum:
        # The anchor samples N more; by default a quarter of M + N, so a third of M.
        M += max(1, M // 3) if N is None else N

    return resolve(given, M)


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
        oversampled = f" with --objective.dynamic-oversample {more:g}" if more > 1 else ""
        raise ValueError(
            f"{num_problems} training problems are fewer than the {first} prompts of one rollout "
            f"batch{oversampled}: give more problems or a smaller --batch"
        )
