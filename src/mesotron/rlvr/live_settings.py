"""What a run of this room can be told on its way, beyond what any TRL trainer can.

Another reward, and a KL term to a start that nobody had kept. A guard writes these after it has
gone back; a resumed run is told them again.
"""

from dataclasses import replace
from typing import Any

import torch

from mesotron.config import TrainConfig
from mesotron.rlvr.anchor import Anchor
from mesotron.rlvr.answers.facts import Judge
from mesotron.rlvr.models import load_model
from mesotron.rlvr.rewards import as_reward_function, make_reward
from mesotron.rlvr.trainer import GRPOTrainer
from mesotron.watch.settings import Setting, Settings, has_adapters

PAY_FOR_FORMAT = ("two_part", "format")


def live_settings(
    trainer: GRPOTrainer, config: TrainConfig, judge: Judge, device: torch.device
) -> Settings:
    """Settings for `watch.settings.apply`.

    Args:
        trainer: of the run.
        config: as the run was started.
        judge: of the completions.
        device: of the model.
    """
    now: dict[str, Any] = {"parts": config.reward.parts}

    def set_reward(parts: Any) -> None:
        now["parts"] = tuple(parts)
        changed = replace(config.reward, parts=now["parts"], weights=())
        reward = make_reward(changed, judge, config.rollout.max_tokens)
        # Before it only votes can stand.
        trainer.reward_funcs[-1] = as_reward_function(reward)

    def reward_stays() -> str | None:
        if trainer.self_labelled:
            return f"{trainer.objective.name} trains on its votes, not on rewards"
        # Another reward is prescribed to pay for the format; what stands beside it is the user's.
        paying = [part for part in now["parts"] if part in PAY_FOR_FORMAT]
        return f"{paying[0]} among its parts pays for the format already" if paying else None

    def set_beta(beta: float) -> None:
        if trainer.ref_model is None and not has_adapters(trainer.policy):
            start, _ = load_model(config.model, device)
            trainer.ref_model = Anchor(dtype=None).start(start)
        trainer.beta = trainer.args.beta = beta

    return {
        "reward.parts": Setting(lambda: now["parts"], set_reward, reward_stays),
        "objective.beta": Setting(lambda: trainer.beta, set_beta),
    }
