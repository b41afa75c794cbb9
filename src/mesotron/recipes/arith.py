"""Runs of minutes on a CPU: the shipped tiny model on generated arithmetic."""

from dataclasses import replace

from mesotron.config import (
    ObjectiveConfig,
    OptimConfig,
    RewardConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
)


def arith() -> TrainConfig:
    """Generated word problems, the shipped tiny model, minutes on a CPU (the default)."""
    return TrainConfig(
        recipe="arith",
        task=TaskConfig(name="arith"),
        reward=RewardConfig(parts=("two_part",), format_share=0.1),
        objective=ObjectiveConfig(name="grpo", beta=0.0),
        optim=OptimConfig(name="muon", lr=6e-4, schedule="linear"),
        rollout=RolloutConfig(prompts=16, generations=8, max_tokens=32),
        steps=60,
    )


def arith_sparse_collapse() -> TrainConfig:
    """Meant to fail: a reward for the boxed right answer alone, and steps that are too large."""
    return replace(
        arith(),
        recipe="arith_sparse_collapse",
        reward=RewardConfig(parts=("sparse",)),
        optim=OptimConfig(name="muon", lr=5e-3),
    )


def arith_mgrpo() -> TrainConfig:
    """Without gold answers: M-GRPO's vote of policy and momentum anchor."""
    return replace(
        arith(),
        recipe="arith_mgrpo",
        objective=ObjectiveConfig(name="mgrpo", momentum=0.99, entropy_filter=0.75),
    )
