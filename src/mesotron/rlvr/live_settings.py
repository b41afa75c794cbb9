"""Settings that a guard may change after a rollback, beyond those of any TRL trainer."""

from collections.abc import Sequence
from dataclasses import replace

from mesotron.models.load import load_model
from mesotron.rewards.call import as_reward_function, make_reward, reads_answers
from mesotron.rlvr.anchor import Anchor
from mesotron.rlvr.parts import Parts
from mesotron.rlvr.trl_trainer import GRPOTrainer
from mesotron.watch.settings import LiveSetting, Settings, has_adapters

PAYS_FOR_FORMAT = ("two_part", "format")


def live_settings(trainer: GRPOTrainer, parts: Parts) -> Settings:
    reward = RewardParts(trainer, parts)
    beta = Beta(trainer, parts)

    return {
        "reward.parts": LiveSetting(reward.read, reward.write, reward.obstacle),
        "objective.beta": LiveSetting(beta.read, beta.write),
    }


class RewardParts:
    """The parts of the reward; new ones have equal weights."""

    def __init__(self, trainer: GRPOTrainer, parts: Parts) -> None:
        self.trainer = trainer
        self.parts = parts
        self.config = parts.config.reward

    def read(self) -> tuple[str, ...]:
        return self.config.parts

    def write(self, names: Sequence[str]) -> None:
        self.config = replace(self.config, parts=tuple(names), weights=())
        max_tokens = self.parts.config.rollout.max_tokens
        reward = make_reward(self.config, self.parts.judge, max_tokens)
        reward.waiting = self.parts.reward.waiting

        # Votes and an environment's own reward may stand beside it.
        place = self.trainer.reward_func_names.index("reward")
        self.trainer.reward_funcs[place] = as_reward_function(reward)

    def obstacle(self) -> str | None:
        if self.trainer.self_labeled:
            return f"{self.trainer.objective.name} trains on its votes, not on rewards"
        if not reads_answers(self.parts.config):
            return "your own rewards need no format"

        # A new reward is prescribed to reward the format.
        for name in self.config.parts:
            if name in PAYS_FOR_FORMAT:
                return f"its part {name} already rewards the format"

        return None


class Beta:
    """The weight of the KL term; it needs a reference model unless adapters can be turned off."""

    def __init__(self, trainer: GRPOTrainer, parts: Parts) -> None:
        self.trainer = trainer
        self.parts = parts

    def read(self) -> float:
        return self.trainer.beta

    def write(self, beta: float) -> None:
        trainer = self.trainer
        if trainer.ref_model is None and not has_adapters(trainer.policy):
            start, _ = load_model(self.parts.config.model, self.parts.device)
            trainer.ref_model = Anchor(dtype=None).start(start)

        trainer.beta = beta
        trainer.args.beta = beta
