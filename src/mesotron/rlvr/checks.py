"""Settings that cannot work, refused before torch and TRL are imported: in a second, not in twenty.

What only a model, a file's rows or a user's module can tell is refused where they are loaded.
"""

import logging
import math

from mesotron.config import OptimConfig, RewardConfig, RolloutConfig, SftConfig, TrainConfig
from mesotron.config.checks import check_least, check_warmup
from mesotron.rlvr.models import check_name
from mesotron.rlvr.objectives import SELF_LABELLED, first_round_prompts, trl_arguments
from mesotron.rlvr.rewards import check_reward
from mesotron.rlvr.tasks.load import check_task
from mesotron.runs.processes import num_processes
from mesotron.spectral import make_filter
from mesotron.spectral.scale import check_scale

log = logging.getLogger("mesotron")
# Of every run of a language model, whether it is rewarded or shown what is right.
LEAST = {
    "steps": 1, "save_every": 0, "keep": 1, "seed": 0, "threads": 1, "model.lora": 0, "optim.lr": 0,
    "optim.max_grad_norm": 0, "optim.rank": 1,
}  # fmt: skip
# Whose part of a reward a number is; format_share may come from a recipe whose parts were changed.
PART_OF = {"near_unit": "near", "overlong_buffer": "overlong"}


def check_parts(config: TrainConfig | SftConfig) -> None:
    """Refuse what no run of a language model can have, in its numbers and in its parts.

    Args:
        config: as parsed.

    Example:
        >>> check_parts(TrainConfig(optim=OptimConfig(name="pion", cutoff="noise")))
    """
    check_least(config, LEAST)
    check_name(config.model.name)
    if not 0 < config.model.lora_alpha < math.inf:
        raise ValueError(
            f"--model.lora-alpha {config.model.lora_alpha:g} must be above 0, and finite: 32 is "
            "usual"
        )
    check_task(config.task)
    check_optim(config.optim)
    if isinstance(config, TrainConfig):
        check_reward(config.reward, config.rollout.max_tokens)
        check_shares(config.reward)
        trl_arguments(config.objective, config.rollout, config.optim, num_processes())
        # There are never more than were asked for; all that a file has are counted when it is read.
        check_enough(math.inf if config.task.num_train is None else config.task.num_train, config)
        warn_if_reward_is_idle(config)
    else:
        trl_arguments(TrainConfig().objective, RolloutConfig(), config.optim)


def check_enough(num_problems: float, config: TrainConfig) -> None:
    """Refuse fewer problems than a batch asks at once: TRL would train on none, in silence.

    Args:
        num_problems: to train on; infinite where they are not counted yet.
        config: as parsed.

    Example:
        >>> check_enough(16, TrainConfig(rollout=RolloutConfig(prompts=16)))
    """
    prompts, more = config.rollout.prompts, config.objective.dynamic_oversample
    if num_problems < prompts:
        raise ValueError(
            f"{num_problems} training problems are fewer than the {prompts} prompts of one rollout "
            "batch: give more problems or a smaller --rollout.prompts"
        )
    first = first_round_prompts(config.objective, config.rollout, num_processes())
    if num_problems < first:
        raise ValueError(
            f"{num_problems} training problems are fewer than the {first} prompts that "
            f"--objective.dynamic-oversample {more:g} samples at once: give more problems or a "
            "smaller one"
        )


def check_shares(config: RewardConfig) -> None:
    """Refuse a number of a part that the reward does not have; a rollback may leave one later.

    Args:
        config: as parsed.

    Example:
        >>> check_shares(RewardConfig(parts=("two_part", "near"), near_unit=5.0))
    """
    usual = RewardConfig()
    for name, part in PART_OF.items():
        given = getattr(config, name)
        if given != getattr(usual, name) and part not in config.parts:
            flag, parts = name.replace("_", "-"), ", ".join(config.parts)
            raise ValueError(
                f"--reward.{flag} {given:g} is for {part}, which the reward ({parts}) has not: add "
                f"{part} to --reward.parts, or leave it out"
            )


def warn_if_reward_is_idle(config: TrainConfig) -> None:
    """Say that parts of a reward were named for an objective that trains on its votes alone.

    Args:
        config: as parsed.

    Example:
        >>> warn_if_reward_is_idle(TrainConfig())
    """
    usual, name = RewardConfig(), config.objective.name
    parts, weights = config.reward.parts, config.reward.weights
    if name in SELF_LABELLED and (parts, weights) != (usual.parts, usual.weights):
        log.warning(
            "%s trains on its votes alone: the reward %s is logged as rewards/reward and trains "
            "nothing", name, " + ".join(parts),
        )  # fmt: skip


def check_optim(config: OptimConfig) -> None:
    """Refuse an optimizer's settings that its rule does not have.

    Args:
        config: see `OptimConfig`.

    Example:
        >>> check_optim(OptimConfig(name="pion", promote=2))
    """
    check_warmup(config.warmup)
    if not 0 <= config.momentum < 1:
        raise ValueError(f"--optim.momentum {config.momentum:g} must be at least 0 and below 1")
    if not 0 <= config.weight_decay < math.inf:
        raise ValueError(
            f"--optim.weight-decay {config.weight_decay:g} must be at least 0, and finite"
        )
    if config.aux_lr is not None and not 0 <= config.aux_lr < math.inf:
        raise ValueError(f"--optim.aux-lr {config.aux_lr:g} must be at least 0, and finite")
    if config.clip == "all" and not config.max_grad_norm:
        raise ValueError(
            "--optim.clip all has no norm to clip to with --optim.max-grad-norm 0: give one, or "
            "leave --optim.clip out"
        )
    given = {"promote": config.promote, "cutoff": config.cutoff}
    strength = {key: value for key, value in given.items() if value is not None}
    if strength and config.name != "pion":
        key, value = next(iter(strength.items()))
        raise ValueError(f"optim.{key} = {value} is Pion's: use --optim.name pion or leave it out")
    check_scale(config.scale)
    if config.name == "pion":
        make_filter("pion", promote=config.promote or 0, cutoff=config.cutoff)
