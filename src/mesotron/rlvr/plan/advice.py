"""What would make a planned run faster, or fit into memory."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from mesotron.config import GPUS, GpuName, ModelConfig, PlanConfig
from mesotron.rlvr.plan.estimate import Prediction, StepEstimate
from mesotron.runs.process import num_processes

SLOW_SAMPLING = 0.5  # share of a step from which faster sampling is advised

# Flags that save memory, and what they set.
MODEL_CHANGES: dict[str, dict[str, Any]] = {
    "--model.dtype bfloat16": {"dtype": "bfloat16"},
    "--model.gradient-checkpointing": {"gradient_checkpointing": True},
    "--lora 16": {"lora": 16},
    "--lora 16 --model.gradient-checkpointing": {"lora": 16, "gradient_checkpointing": True},
}
ROLLOUT_FLAGS = {
    "prompts": "--batch",
    "max_tokens": "--max-tokens",
    "micro_batch": "--rollout.micro-batch",
}


def advise(step: StepEstimate) -> list[str]:
    if step.prediction is None or step.gpu is None:
        return []
    if step.prediction.fits:
        return advise_faster(step, step.prediction, step.gpu)

    fitting = list_fitting(step, step.gpu)
    return ["it would fit with one of:", *(f"  {change}" for change in fitting)]


def advise_faster(step: StepEstimate, now: Prediction, gpu: GpuName) -> list[str]:
    config = step.config
    rollout = config.rollout
    share = now.seconds["generate"] / now.step
    can_be_faster = not rollout.fast and rollout.vllm == "off" and config.model.load == "full"
    if share <= SLOW_SAMPLING or not can_be_faster:
        return []

    faster = step.predict(replace(config, rollout=replace(rollout, fast=True)), gpu)
    if faster.step >= now.step:  # it is already on
        return []

    pace = spell(faster.step * step.factor)
    return [f"sampling takes {share:.0%} of a step; with --rollout.fast {pace} s per step"]


def list_fitting(step: StepEstimate, gpu: GpuName) -> list[str]:
    """Changes with which the run would fit, the mildest of each family."""
    fitting: list[str] = []
    for family in families(step.config):
        change = mildest(family, step, gpu)
        if change is None:
            continue

        flags, prediction = change
        is_more_of_another = any(f"{flags} ".startswith(one.split("(")[0]) for one in fitting)
        if not is_more_of_another:
            pace = spell(prediction.step * step.factor)
            fitting.append(f"{flags} ({prediction.needed:.0f} GiB, {pace} s per step)")

    rented = [name for name, model in GPUS.items() if model.price is not None]
    for name in sorted(rented, key=lambda name: GPUS[name].memory):
        if step.predict(step.config, name).fits:
            fitting.append(f"--gpu {name}")
            break

    return fitting or ["several GPUs (docs/scaling.md), or a smaller --model"]


@dataclass(frozen=True)
class Family:
    """Changes that save memory, from mild to strong: a model's, with each of several rollouts'."""

    model: ModelConfig
    flags: str = ""  # of the model's change
    rollouts: list[dict[str, int]] = field(default_factory=list)


def mildest(family: Family, step: StepEstimate, gpu: GpuName) -> tuple[str, Prediction] | None:
    """The flags of the first change that fits, and what it needs."""
    config = step.config
    for change in family.rollouts:
        changed = replace(config, model=family.model, rollout=replace(config.rollout, **change))
        prediction = step.predict(changed, gpu)
        if prediction.fits:
            flags = [family.flags] if family.flags else []
            flags += [f"{ROLLOUT_FLAGS[name]} {value}" for name, value in change.items()]
            return " ".join(flags), prediction

    return None


def families(config: PlanConfig) -> Iterator[Family]:
    model = config.model
    rollout = config.rollout
    smaller = smaller_batches(config)

    yield Family(model, rollouts=smaller)
    yield Family(model, rollouts=[{"max_tokens": rollout.max_tokens // k} for k in (2, 4)])

    chosen = chosen_settings(config)
    for flags, change in MODEL_CHANGES.items():
        if not chosen & change.keys():
            yield Family(replace(model, **change), flags, [{}, *smaller])

    can_round = model.load == "full" and not config.sft.steps
    if can_round and not rollout.fast and rollout.vllm == "off":
        rounded = replace(model, lora=model.lora or 16, load="4bit")

        if model.lora:
            flags = "--model.load 4bit"
        else:
            flags = "--lora 16 --model.load 4bit"

        yield Family(rounded, flags, [{}, *smaller])


def chosen_settings(config: PlanConfig) -> set[str]:
    """The model's settings that were chosen, which stay."""
    chosen: set[str] = set()
    if config.model.lora:
        chosen = {"lora", "dtype"}
    elif config.model.dtype == "float32":
        chosen = {"dtype"}

    if config.sft.steps:  # which trains every weight
        chosen.add("lora")

    return chosen


def smaller_batches(config: PlanConfig) -> list[dict[str, int]]:
    """Micro-batches that divide the batch, and then fewer prompts."""
    rollout = config.rollout
    rows = rollout.prompts * rollout.generations // rollout.updates // num_processes()

    changes: list[dict[str, int]] = []
    for size in range((rollout.micro_batch or rows) - 1, 0, -1):
        if rows % size == 0:
            changes.append({"micro_batch": size})

    for k in (2, 4, 8):
        if rows % k == rollout.prompts % k == 0:
            changes.append({"prompts": rollout.prompts // k, "micro_batch": 1})

    return changes


def spell(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f}"

    return f"{seconds:.3g}"
