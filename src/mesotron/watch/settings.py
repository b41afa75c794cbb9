"""Changes to a running trainer: its settings, by their config names, and its weights on a rollback.

Any Transformers trainer can change its step size; TRL's GRPO trainer also the weight of the KL
term, the temperature and the upper clip (checked against TRL 1.16). A caller may add more.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim.lr_scheduler import LambdaLR

from mesotron.runs.checkpoints import MANIFEST, damage, list_checkpoints
from mesotron.watch.detectors import SMALLER_STEP, Change


@dataclass(frozen=True)
class LiveSetting:
    """One setting of a running trainer; `write` takes effect from the next step on."""

    read: Callable[[], Any]
    write: Callable[[Any], None]
    obstacle: Callable[[], str | None] = lambda: None  # why it cannot be written now
    in_checkpoint: bool = False  # a resumed run has it already


Settings = dict[str, LiveSetting]
Records = tuple[dict[str, Any], ...]


def apply(
    remedy: Sequence[Change], settings: Settings, smaller: Change = SMALLER_STEP
) -> tuple[Records, Records]:
    """Apply a remedy as far as the trainer can, or else make the steps smaller; returns the changes
    and refusals of an `Action`."""
    changes = []
    refused = []
    for change in remedy:
        if why := obstacle(change, settings.get(change.field)):
            refused.append({"field": change.field, "why": why})
        else:
            changes.append(_write(change, settings[change.field]))

    if not changes:
        changes.append(_write(smaller, settings[smaller.field]))

    return tuple(changes), tuple(refused)


def obstacle(change: Change, setting: LiveSetting | None) -> str | None:
    """Why a change cannot be made or would change nothing; None if it can be made."""
    if setting is None:
        return "it cannot be changed during a run"

    why = setting.obstacle()
    if why is None and change.applied_to(setting.read()) == setting.read():
        return "it has that value already"

    return why


def _write(change: Change, setting: LiveSetting) -> dict[str, Any]:
    old = setting.read()
    setting.write(change.applied_to(old))

    return {
        "field": change.field,
        "old": old,
        "new": setting.read(),
    }


def settings_of(trainer: Any) -> Settings:
    """What a `transformers.Trainer` can change, by config name."""

    def set_rate(rate: float) -> None:
        scale_rates(trainer, rate / (first_rate(trainer) or 1.0))  # 0 cannot be scaled

    rate = LiveSetting(lambda: first_rate(trainer), set_rate, in_checkpoint=True)
    return {"optim.lr": rate} | (_grpo_settings(trainer) if is_grpo(trainer) else {})


def _grpo_settings(trainer: Any) -> Settings:
    def no_reference() -> str | None:
        if trainer.ref_model is not None or has_adapters(trainer.model):
            return None
        return "the trainer was built with beta = 0 and has no reference model"

    def autocast() -> str | None:
        mixed = trainer.accelerator.mixed_precision != "no"
        if mixed:
            return "its log-probabilities are computed in mixed precision"

        return None

    def attribute(name: str, **options: Any) -> LiveSetting:
        return LiveSetting(
            partial(getattr, trainer, name), partial(setattr, trainer, name), **options
        )

    set_to = partial(set_temperature, trainer)
    return {
        "objective.beta": attribute("beta", obstacle=no_reference),
        "objective.epsilon_high": attribute("epsilon_high"),
        "rollout.temperature": LiveSetting(lambda: trainer.temperature, set_to, autocast),
    }


def set_temperature(trainer: Any, temperature: float) -> None:
    """Sample, and compute log-probabilities, at another temperature."""
    from trl.trainer.utils import add_fused_lm_head

    trainer.temperature = temperature

    if trainer.use_vllm:
        trainer.vllm_generation.temperature = temperature
    else:
        trainer.generation_config.temperature = temperature
        trainer.generation_kwargs["temperature"] = temperature

    # TRL builds the temperature into the head that computes log-probabilities; the newest wins.
    model = trainer.model
    reference = trainer.ref_model
    model = model.get_base_model() if has_adapters(model) else model
    cast = trainer.args.cast_lm_head_to_fp32
    add_fused_lm_head(model, temperature, cast, outputs=("log_probs", "entropy"))

    if reference is not None and "forward" in vars(reference):  # it has such a head itself
        add_fused_lm_head(reference, temperature, cast)


def is_grpo(trainer: Any) -> bool:
    """Whether it is TRL's GRPO trainer or a subclass, without importing TRL."""
    module = sys.modules.get("trl.trainer.grpo_trainer")
    return module is not None and isinstance(trainer, module.GRPOTrainer)


def has_adapters(model: Any) -> bool:
    """Whether it is a PEFT model, whose base serves as the reference, without importing PEFT."""
    module = sys.modules.get("peft")
    return module is not None and isinstance(model, module.PeftModel)


def first_rate(trainer: Any) -> float:
    """The unscheduled learning rate of the first group that has one; 0 if none has."""
    for group in trainer.optimizer.param_groups:
        rate = group.get("initial_lr", group["lr"])
        if rate > 0:
            return rate

    return 0.0


def scale_rates(trainer: Any, factor: float) -> None:
    """Multiply the learning rate of every group, now and in the rest of the schedule."""
    for group in trainer.optimizer.param_groups:
        for key in ("lr", "initial_lr"):
            if key in group:
                group[key] *= factor

    scheduler = _plain_scheduler(trainer)
    for name in ("base_lrs", "_last_lr"):
        if name in vars(scheduler):  # ReduceLROnPlateau has no base rates
            setattr(scheduler, name, [rate * factor for rate in vars(scheduler)[name]])


def schedule_rise(trainer: Any, first: int, now: int, last: int) -> float:
    """The mean scheduled rate of the steps to come over that of the steps since `first`."""
    scheduler = _plain_scheduler(trainer)
    if not isinstance(scheduler, LambdaLR) or not first < now < last:
        return 1.0  # any other schedule counts as constant

    shape = scheduler.lr_lambdas[0]
    past = sum(map(shape, range(first, now))) / (now - first)
    future = sum(map(shape, range(now, last))) / (last - now)

    return future / past if past > 0 else 1.0


def _plain_scheduler(trainer: Any) -> Any:
    return getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)  # Accelerate wraps it


@runtime_checkable
class RestoresPolicy(Protocol):
    """A trainer with its own kind of checkpoints."""

    def restore_policy(self, checkpoint: Path) -> None: ...


def roll_back(trainer: Any, checkpoint: Path) -> None:
    """Restore weights and optimizer from a checkpoint. Nothing else is rewound: learning rates and
    files stay as they are, and a Trainer's loop cannot go back from inside."""
    rates = [
        {key: group[key] for key in ("lr", "initial_lr") if key in group}
        for group in trainer.optimizer.param_groups
    ]

    restorer: Any = trainer
    if isinstance(restorer, RestoresPolicy):
        restorer.restore_policy(checkpoint)
    else:
        trainer._load_from_checkpoint(str(checkpoint))
        state = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
        trainer.optimizer.load_state_dict(state)

    for group, kept in zip(trainer.optimizer.param_groups, rates, strict=True):
        group.update(kept)

    if is_grpo(trainer):
        trainer._buffered_inputs = None  # drops samples of the failed policy: TRL samples again


def check_rollback(trainer: Any, tries: int) -> None:
    """Refuse at the start what a rollback could not do hours later."""
    if trainer is None:
        raise ValueError("guard='rollback' needs the trainer: Watch('rollback', trainer=trainer)")
    if tries < 1:
        raise ValueError(f"tries {tries} must be at least 1; or use guard='stop'")

    is_fsdp = trainer.is_fsdp_enabled
    why = ""
    if trainer.is_deepspeed_enabled or (is_fsdp and not trainer.accelerator.is_fsdp2):
        why = "cannot restore the flat shards of DeepSpeed and FSDP1: use FSDP2, data parallelism,"
    elif trainer.args.save_only_model:
        why = "needs the optimizer state: turn save_only_model off,"
    elif is_fsdp and not isinstance(trainer, RestoresPolicy):
        why = "needs unsharded checkpoints under FSDP: use mesotron.GRPOTrainer,"

    if why:
        raise ValueError(f"guard='rollback' {why} or guard='stop'")


def complete_checkpoints(root: Path) -> set[int]:
    """Steps of the checkpoints in a Trainer's output folder that a rollback can use: those with a
    manifest must match it, others must have their last file."""
    return {each.step for each in list_checkpoints(root) if _is_complete(each.path)}


def _is_complete(checkpoint: Path) -> bool:
    if (checkpoint / MANIFEST).exists():
        return damage(checkpoint) is None

    return (checkpoint / "trainer_state.json").exists()
