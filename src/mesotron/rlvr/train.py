"""`mesotron train` and `mesotron sft` up to where torch is needed: inputs, folder, variables."""

import logging
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from mesotron.config import (
    SELF_LABELED,
    RewardConfig,
    RolloutConfig,
    SftConfig,
    TaskConfig,
    TrainConfig,
)
from mesotron.rlvr.models import SHIPPED, check_name
from mesotron.rlvr.objectives import first_round_prompts, trl_arguments
from mesotron.rlvr.rewards import check_reward
from mesotron.rlvr.spending import Account
from mesotron.rlvr.tasks.load import check_task
from mesotron.runs import new_run_path
from mesotron.runs.extras import require
from mesotron.runs.process import go_offline_without_network, is_main, num_processes, started
from mesotron.runs.resume import Plan, plan_new, plan_resume

log = logging.getLogger("mesotron")
Limited = TypeVar("Limited", TrainConfig, SftConfig)


def run(config: Limited, then: Callable[[Path], None] | None = None) -> int:
    """Train or resume; the main process calls `then` with the folder. Returns the exit code."""
    began = started()
    check_installed(config)
    plan: Plan[Any] = resume_plan(config) if config.resume else new_run(config)
    with Account(plan, began) as account:
        set_library_variables(plan.config.task, plan.config.model.name)
        go_offline_without_network()
        if is_main():
            print(f"{plan.path}: loading PyTorch, Transformers and TRL", flush=True)
        # Only now: Hugging Face libraries read the variables at import.
        if isinstance(config, SftConfig):
            from mesotron.rlvr.sft import train
        else:
            from mesotron.rlvr.session import train
        code = train(plan, account)
        if then is not None and is_main():
            then(plan.path)
    return code


def new_run(config: Limited) -> Plan[Limited]:
    check(config)
    name = "sft" if isinstance(config, SftConfig) else config.recipe
    return plan_new(config, config.out or new_run_path(name))


def resume_plan(config: Limited) -> Plan[Limited]:
    instead = "start a new run (from its weights: --model.name CHECKPOINT)"
    plan = plan_resume(config, "mesotron eval", instead)
    if config.gpu is not None and config.price is None:
        # The run's old price was for another machine.
        return replace(plan, config=replace(plan.config, price=None))
    return plan


def check_installed(config: TrainConfig | SftConfig) -> None:
    require("rlvr", what="training")
    if config.model.lora:
        require("rlvr", ["peft"], "--model.lora")
    if isinstance(config, TrainConfig):
        for name in config.report_to:
            require(None, [name], f"--report-to {name}")
        if config.rollout.vllm != "off":
            require(None, ["vllm"], f"--rollout.vllm {config.rollout.vllm}")


def check(config: TrainConfig | SftConfig) -> None:
    """Refuse what depends on files, installed packages and processes, before torch is imported."""
    check_name(config.model.name)
    check_task(config.task)
    if isinstance(config, SftConfig):
        if num_processes() > 1:
            raise ValueError(f"mesotron sft runs in one process, not WORLD_SIZE={num_processes()}")
        trl_arguments(TrainConfig().objective, RolloutConfig(), config.optim)
        return
    if num_processes() > 1 and config.out is None:
        raise ValueError("several processes must agree on the run's folder: give it with --out")
    check_reward(config.reward)
    trl_arguments(config.objective, config.rollout, config.optim, num_processes())
    check_enough(math.inf if config.task.num_train is None else config.task.num_train, config)
    parts, default = config.reward.parts, RewardConfig().parts
    if config.objective.name in SELF_LABELED and (parts != default or config.reward.weights):
        message = "%s trains on its votes only: the reward %s is logged as rewards/reward, not used"
        log.warning(message, config.objective.name, " + ".join(parts))


def check_enough(num_problems: float, config: TrainConfig) -> None:
    """Refuse fewer problems than one batch samples: TRL would silently train on none."""
    first = first_round_prompts(config.objective, config.rollout, num_processes())
    if num_problems < max(config.rollout.prompts, first):
        more = config.objective.dynamic_oversample
        oversampled = f" with --objective.dynamic-oversample {more:g}" if more > 1 else ""
        raise ValueError(
            f"{num_problems} training problems are fewer than the {first} prompts of one rollout "
            f"batch{oversampled}: give more problems or a smaller --rollout.prompts"
        )


def set_library_variables(task: TaskConfig, *models: str) -> None:
    """No telemetry, and no network unless a model or the data is a name on the hub."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    # Without a path the data is generated, or the hub's GSM8K.
    local = [Path(task.path).expanduser().exists() if task.path else task.name != "gsm8k"]
    local += [name in SHIPPED or Path(name).expanduser().exists() for name in models]
    if all(local):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
