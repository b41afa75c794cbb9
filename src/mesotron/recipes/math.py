"""Competition problems (MATH, Hendrycks et al., 2021, arXiv 2103.03874) with Qwen3.

The data is never shipped: the name is a hub's, and `--task.path` takes a local file.
"""

from dataclasses import replace

from mesotron.config import (
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    RewardConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
)
from mesotron.recipes.gsm8k import PION

MATH = TaskConfig(
    name="math", path="DigitalLearningGmbH/MATH-lighteval", format="boxed", num_eval=500
)


def qwen3_math_pion() -> TrainConfig:
    """MATH, levels 3 to 5, with Qwen3-1.7B, Pion per head, GRPO, as its paper trains it."""
    return TrainConfig(
        recipe="qwen3_math_pion",
        model=ModelConfig(name="Qwen/Qwen3-1.7B", gradient_checkpointing=True),
        task=replace(MATH, levels=(3, 4, 5)),
        reward=RewardConfig(parts=("correct",)),
        objective=ObjectiveConfig(name="grpo", beta=0.001, epsilon=0.2),
        optim=PION,
        rollout=RolloutConfig(prompts=128, generations=8, max_tokens=3000, micro_batch=4),
        steps=1320,
        save_every=20,
    )


def qwen3_math_pion_gmpo() -> TrainConfig:
    """The same with GMPO, in eight updates a rollout as GMPO's paper has it."""
    base = qwen3_math_pion()
    return replace(
        base,
        recipe="qwen3_math_pion_gmpo",
        objective=ObjectiveConfig(name="gmpo", beta=0.0, epsilon=0.4),
        rollout=replace(base.rollout, updates=8),
        steps=8 * base.steps,  # the same number of rollouts
    )


def qwen3_math_mgrpo() -> TrainConfig:
    """MATH without its answers: M-GRPO with Qwen3-4B-Base, as its paper trains it."""
    return TrainConfig(
        recipe="qwen3_math_mgrpo",
        model=ModelConfig(name="Qwen/Qwen3-4B-Base", gradient_checkpointing=True),
        task=MATH,
        objective=ObjectiveConfig(
            name="mgrpo", beta=0.005, epsilon=0.2, momentum=0.99, momentum_generations=8,
            entropy_filter=0.75,
        ),
        optim=OptimConfig(name="adamw", lr=1e-6, schedule="cosine", warmup=0.1),
        rollout=RolloutConfig(
            prompts=8, generations=32, max_tokens=3072, temperature=1.1, micro_batch=4
        ),
        steps=937,
        save_every=50,
    )  # fmt: skip
