"""Sums of three digits with SmolLM2-135M-Instruct: minutes on one GPU, every problem checkable.

Answers fit into ten tokens, so a step is short and many runs can be compared.
"""

from mesotron.config import (
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    RewardConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
)


def arith_smollm2() -> TrainConfig:
    """Sums of three digits with SmolLM2-135M-Instruct, minutes on one GPU."""
    return TrainConfig(
        recipe="arith_smollm2",
        # Updates of 1e-5 are below the spacing of bfloat16 weights.
        model=ModelConfig(name="smollm2", dtype="float32"),
        task=TaskConfig(
            name="sums",
            format="answer",
            few_shot=2,
            system="Reply with ANSWER: n.",
            num_eval=512,
        ),
        reward=RewardConfig(parts=("two_part",), format_share=0.1),
        objective=ObjectiveConfig(name="grpo", beta=0.0),
        optim=OptimConfig(name="muon", lr=1e-4),
        rollout=RolloutConfig(prompts=32, generations=8, max_tokens=10, engine="graph"),
        steps=120,
        save_every=0,
        keep=1,
    )
