"""What a running trainer can be told: its settings by the names of the training config.

Any Transformers trainer can change its step size. TRL's GRPO trainer can also change the weight of
the KL term, the temperature and the upper clip; checked against TRL 1.16. What else a run can do,
such as another reward, its owner adds.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mesotron.watch.remedies import SMALLER_STEP, Change


@dataclass(frozen=True)
class Setting:
    """One setting of a running trainer.

    Args:
        read: gives its present value.
        write: changes it from the next step on.
        obstacle: why it cannot be written now, None if it can.
        in_checkpoint: a checkpoint holds it, so that a resumed run has it without being told.
    """

    read: Callable[[], Any]
    write: Callable[[Any], None]
    obstacle: Callable[[], str | None] = lambda: None
    in_checkpoint: bool = False


Settings = dict[str, Setting]


@dataclass(frozen=True)
class Outcome:
    """What became of a remedy: {"field", "old", "new"} and {"field", "why"} as `events.Act` has."""

    changes: tuple[dict[str, Any], ...]
    refused: tuple[dict[str, Any], ...]


def apply(remedy: Sequence[Change], settings: Settings, smaller: Change = SMALLER_STEP) -> Outcome:
    """Apply a remedy as far as the trainer can; where none of it can be, make the steps smaller.

    Args:
        remedy: what is wanted.
        settings: what the trainer can be told.
        smaller: the step size to take where nothing else can be done.

    Example:
        >>> rate = [0.01]
        >>> settings = {"optim.lr": Setting(lambda: rate[0], lambda new: rate.__setitem__(0, new))}
        >>> found = apply([Change(field="rollout.generations", act="multiply", value=2)], settings)
        >>> rate, found.refused[0]["why"]
        ([0.005], 'it cannot be changed while this trainer runs')
    """
    changes, refused = [], []
    for change in remedy:
        why = obstacle(change, settings.get(change.field))
        if why:
            refused.append({"field": change.field, "why": why})
        else:
            changes.append(write(change, settings[change.field]))
    if not changes:
        changes.append(write(smaller, settings[smaller.field]))
    return Outcome(tuple(changes), tuple(refused))


def obstacle(change: Change, setting: Setting | None) -> str | None:
    """Why a change cannot be made, or would be none; None if it can be made."""
    if setting is None:
        return "it cannot be changed while this trainer runs"
    why = setting.obstacle()
    if why is None and change.applied_to(setting.read()) == setting.read():
        return "it has that value already"
    return why


def write(change: Change, setting: Setting) -> dict[str, Any]:
    """Make one change and say what it was."""
    old = setting.read()
    setting.write(change.applied_to(old))
    return {"field": change.field, "old": old, "new": setting.read()}


def settings_of(trainer: Any) -> Settings:
    """What a trainer can be told, by the names of the training config.

    Args:
        trainer: any `transformers.Trainer`.
    """
    found = {
        "optim.lr": Setting(
            lambda: first_rate(trainer),
            # Nothing can be made of a rate of 0.
            lambda rate: scale_rates(trainer, rate / (first_rate(trainer) or 1.0)),
            in_checkpoint=True,
        )
    }
    return found | _grpo_settings(trainer) if is_grpo(trainer) else found


def is_grpo(trainer: Any) -> bool:
    """Whether it is TRL's GRPO trainer or a kind of it; TRL is not imported to find out."""
    module = sys.modules.get("trl.trainer.grpo_trainer")
    return module is not None and isinstance(trainer, module.GRPOTrainer)


def has_adapters(model: Any) -> bool:
    """Whether it is a PEFT model, whose base is there to be compared with; PEFT is not imported."""
    module = sys.modules.get("peft")
    return module is not None and isinstance(model, module.PeftModel)


def base_rates(trainer: Any) -> list[float]:
    """The learning rate of each group before the schedule."""
    groups = trainer.optimizer.param_groups
    return [group.get("initial_lr", group["lr"]) for group in groups]


def first_rate(trainer: Any) -> float:
    """The learning rate of the first group that has one; 0 if none has."""
    return next((rate for rate in base_rates(trainer) if rate > 0), 0.0)


def plain_scheduler(trainer: Any) -> Any:
    """The scheduler itself, which Accelerate wraps."""
    return getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)


def scale_rates(trainer: Any, factor: float) -> None:
    """Multiply every group's rate, now and in the schedule to come."""
    for group in trainer.optimizer.param_groups:
        for key in ("lr", "initial_lr"):
            if key in group:
                group[key] *= factor
    # One that follows a plateau keeps no base rates.
    scheduler = plain_scheduler(trainer)
    for name in ("base_lrs", "_last_lr"):
        if name in vars(scheduler):
            setattr(scheduler, name, [rate * factor for rate in vars(scheduler)[name]])


def _grpo_settings(trainer: Any) -> Settings:
    def no_reference() -> str | None:
        if trainer.ref_model is not None or has_adapters(trainer.model):
            return None
        return "the trainer was built with beta = 0 and has no model to hold to"

    def autocast() -> str | None:
        mixed = trainer.accelerator.mixed_precision != "no"
        return "its log-probabilities are computed in mixed precision" if mixed else None

    return {
        "objective.beta": _attribute(trainer, "beta", no_reference),
        "objective.epsilon_high": _attribute(trainer, "epsilon_high"),
        "rollout.temperature": Setting(
            lambda: trainer.temperature, lambda new: set_temperature(trainer, new), autocast
        ),
    }


def _attribute(
    trainer: Any, name: str, obstacle: Callable[[], str | None] = lambda: None
) -> Setting:
    return Setting(
        lambda: getattr(trainer, name), lambda new: setattr(trainer, name, new), obstacle
    )


def set_temperature(trainer: Any, temperature: float) -> None:
    """Sample, and compute log-probabilities, at another temperature."""
    from trl.trainer.utils import add_fused_lm_head

    trainer.temperature = temperature
    if trainer.use_vllm:
        trainer.vllm_generation.temperature = temperature
    else:
        trainer.generation_config.temperature = temperature
        trainer.generation_kwargs["temperature"] = temperature
    # TRL builds the temperature into the head that gives log-probabilities; the newest one counts.
    model, reference = trainer.model, trainer.ref_model
    model = model.get_base_model() if has_adapters(model) else model
    cast = trainer.args.cast_lm_head_to_fp32
    add_fused_lm_head(model, temperature, cast, outputs=("log_probs", "entropy"))
    if reference is not None and "forward" in vars(reference):  # a model with such a head itself
        add_fused_lm_head(reference, temperature, cast)
