"""Sums of three digits with SmolLM2-135M-Instruct: minutes on one GPU, every problem checkable.

Answers fit into ten tokens, so a step is short and many runs can be compared.
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
        rollout=RolloutConfig(prompts=32, generations=8, max_tokens=10, fast=True),
        steps=120,
        save_every=0,
        keep=1,
    )


def arith_smollm2_fast() -> TrainConfig:
    """The same to 0.90 in about 80 seconds: groups that teach, a falling rate, recorded passes."""
    usual = arith_smollm2()
    return replace(
        usual,
        recipe="arith_smollm2_fast",
        model=replace(usual.model, dtype="mixed"),
        # Wrong numbers earn by their distance, and an end is paid for.
        reward=replace(usual.reward, parts=("two_part", "near", "overlong"), overlong_buffer=1),
        # Of three times as many groups those train that have something to tell.
        objective=replace(
            usual.objective,
            entropy_bonus=0.02,
            entropy_target=0.3,
            dynamic_sampling="resample",
            dynamic_max_rounds=1,
            dynamic_oversample=3.0,
        ),
        # Kernels that take 12 s to compile do not pay in 280 steps.
        optim=OptimConfig(
            name="muon", lr=2e-4, aux_lr=1e-5, clip="all", schedule="linear", fused=False
        ),
        rollout=replace(usual.rollout, prompts=64),
        steps=280,
    )
