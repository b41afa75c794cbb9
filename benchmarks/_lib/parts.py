"""A training session around a model that a study has made itself."""

from __future__ import annotations

from typing import Any

import torch

from mesotron.answers.facts import Judge
from mesotron.answers.verify import Verifier
from mesotron.config import TaskConfig, TrainConfig
from mesotron.rewards.call import make_reward
from mesotron.rlvr.parts import Parts
from mesotron.rlvr.trl_arguments import trl_arguments
from mesotron.tasks.load import load_task


def parts_around(
    model: Any,
    tokenizer: Any,
    config: TrainConfig,
    device: torch.device,
    verifier: Verifier,
    task_config: TaskConfig | None = None,
) -> Parts:
    """What a trainer is built from.

    Args:
        model: on the device.
        tokenizer: its own.
        config: of the run.
        device: where it trains.
        verifier: judges answers.
        task_config: of another task than the config's.
    """
    task = load_task(task_config or config.task)
    judge = Judge(task.format, verifier)
    reward = make_reward(config.reward, judge, config.rollout.max_tokens)
    arguments = trl_arguments(config.objective, config.rollout, config.optim)
    return Parts(config, device, model, tokenizer, task, judge, reward, arguments)
