"""The tuning corpus as data: every run and what it is meant to show.

Each setting is the default recipe of `mesotron train` (the shipped tiny model on generated
arithmetic) with a few flags, at one to three seeds. `kind` is what it was made to be; whether it
came to that is decided by what happened (`labels.py`), never by the watch. The runs that no
threshold has met are in `held_out_runs`.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Runs that differ in their seed alone.

    Args:
        name: a word.
        kind: the failure it is made to provoke, or healthy.
        flags: of `mesotron train`, in one string.
        seeds: below 100 here, 100 and more in the held-out corpus.
        steps: optimizer steps.
    """

    name: str
    kind: str
    flags: str
    seeds: tuple[int, ...] = (0, 1)
    steps: int = 60


@dataclass(frozen=True)
class Run:
    """One run of the corpus."""

    setting: Setting
    seed: int

    @property
    def name(self) -> str:
        """Its folder's name."""
        return f"{self.setting.name}-{self.seed}"


HALF = "--batch 8"


def healthy(name: str, flags: str, seeds: tuple[int, ...] = (0, 1), steps: int = 60) -> Setting:
    """A run with sensible settings."""
    return Setting(
        name=name,
        kind="healthy",
        flags=flags,
        seeds=seeds,
        steps=steps,
    )


def failing(
    kind: str, name: str, flags: str, seeds: tuple[int, ...] = (0, 1), steps: int = 60
) -> Setting:
    """A run with a defect, at half the default batch."""
    return Setting(
        name=name,
        kind=kind,
        flags=f"{HALF} {flags}",
        seeds=seeds,
        steps=steps,
    )


CONSTANT = "--optim.schedule constant"

HEALTHY = (
    healthy("default", "", (0, 1, 3), steps=80),
    healthy("muon_slow", f"{HALF} --lr 2e-4 {CONSTANT}"),
    healthy("adamw", "--optim adamw --lr 2e-4"),
    healthy("adamw_slow", f"{HALF} --optim adamw --lr 5e-5 {CONSTANT}"),
    healthy("muon_sgd", "--optim muon_sgd --lr 4e-4"),
    healthy("pion", f"{HALF} --optim pion --optim.cutoff noise --lr 6e-4"),
    healthy("gmpo", "--objective.name gmpo --rollout.updates 4 --lr 2e-4"),
    healthy("dr_grpo", "--objective.name dr_grpo --lr 4e-4", (1,)),
    healthy("dapo", f"{HALF} --objective.name dapo --lr 4e-4", (0,)),
    healthy("mgrpo", f"{HALF} --objective.name mgrpo --lr 2e-4"),
    healthy("vote", f"{HALF} --objective.name vote --lr 1e-4"),
    healthy("kl", f"{HALF} --objective.beta 0.04 --optim.warmup 0.1"),
    healthy("sparse", f"{HALF} --reward sparse --lr 3e-4"),
    healthy("easy", "--task.levels 1 2", (0, 1)),
    healthy("saturated", f"{HALF} --task.levels 1 --lr 3e-4"),
    healthy("hard", "--task.levels 3 4"),
    healthy("cool", "--rollout.temperature 0.7 --lr 4e-4", (1,)),
    healthy("warm", f"{HALF} --rollout.temperature 1.2 --lr 4e-4", (0,)),
    healthy("small_batch", "--batch 4 --group 4 --lr 1e-4"),
    healthy("wide_groups", "--batch 4 --group 32 --lr 3e-4", (1,)),
    healthy("lora", f"{HALF} --lora 8 --optim adamw --lr 1e-3"),
    healthy("overlong", "--reward two_part overlong --reward.overlong-buffer 12", (0,)),
)

OPTIMIZER = (
    failing("huge_step", "muon_x10", f"--lr 6e-3 {CONSTANT}"),
    failing("huge_step", "muon_x30", f"--lr 2e-2 {CONSTANT}", (1,)),
    failing("huge_step", "adamw_x10", f"--optim adamw --lr 3e-3 {CONSTANT}"),
    failing("huge_step", "adamw_x100", f"--optim adamw --lr 3e-2 {CONSTANT}", (0,)),
    failing(
        "huge_step",
        "pion_x20",
        f"--optim pion --optim.cutoff noise --lr 1.5e-2 {CONSTANT}",
    ),
    failing(
        "huge_step",
        "sgd_x300",
        f"--optim muon_sgd --lr 4e-4 --optim.aux-lr 30 --optim.max-grad-norm 0 {CONSTANT}",
    ),
    failing("rising_step", "muon_rising", "--lr 2e-2 --optim.warmup 0.95", steps=90),
    failing(
        "rising_step",
        "adamw_rising",
        "--optim adamw --lr 1e-2 --optim.warmup 0.95",
        steps=90,
    ),
    failing(
        "rising_step",
        "muon_sgd_rising",
        "--optim muon_sgd --lr 1e-2 --optim.warmup 0.95",
        (1,),
        steps=90,
    ),
    failing("slow_decay", "muon_slowly", f"--lr 1.5e-3 {CONSTANT}", steps=110),
    failing(
        "reuse",
        "unclipped_reuse",
        f"--rollout.updates 8 --objective.epsilon 10 --lr 2e-3 {CONSTANT}",
    ),
    failing("negative_kl", "negative_kl", f"--objective.beta -0.2 {CONSTANT}"),
)

REWARD = (
    failing("gamed", "longer", f"--reward gamed_rewards:longer {CONSTANT}"),
    failing("gamed", "shorter", f"--reward gamed_rewards:shorter {CONSTANT}"),
    failing("gamed", "repeating", f"--reward gamed_rewards:repeating {CONSTANT}"),
    failing("gamed", "many_numbers", f"--reward gamed_rewards:many_numbers {CONSTANT}", (1,)),
    failing(
        "gamed",
        "mentioned",
        f"--reward gamed_rewards:mentioned --lr 1e-3 {CONSTANT}",
        steps=90,
    ),
    failing("gamed", "format_alone", f"--reward format --lr 1e-3 {CONSTANT}"),
    failing("parser_trap", "unboxed", f"--reward gamed_rewards:unboxed {CONSTANT}"),
    failing("wrong_sign", "inverted", f"--reward gamed_rewards:inverted {CONSTANT}"),
    failing("noise", "noise", f"--reward gamed_rewards:noise --lr 1.5e-3 {CONSTANT}"),
    failing("sparse_collapse", "sparse_collapse", f"--reward sparse --lr 5e-3 {CONSTANT}"),
    failing("constant_reward", "constant", "--reward gamed_rewards:constant"),
    failing("broken_reward", "broken", "--reward gamed_rewards:broken"),
    failing("nonfinite", "overflowing", "--reward gamed_rewards:overflowing"),
    failing("stall", "stalling", "--reward gamed_rewards:stalling"),
)

SAMPLING = (
    failing("hot", "hot", f"--rollout.temperature 2.5 --lr 1e-3 {CONSTANT}"),
    failing("hot", "warm_fast", f"--rollout.temperature 1.5 --lr 2.5e-3 {CONSTANT}", (1,)),
    failing("cold", "cold", f"--rollout.temperature 0.2 --lr 2.5e-3 {CONSTANT}"),
    failing("truncation", "cut", "--max-tokens 10"),
    failing(
        "starvation",
        "starved",
        "--task.levels 5 --reward sparse --lr 1e-4 --max-tokens 48",
    ),
    failing("self_reward", "vote_fast", f"--objective.name vote --lr 2e-3 {CONSTANT}"),
    failing(
        "self_reward",
        "vote_free",
        f"--objective.name vote --objective.beta 0 --lr 1.2e-3 {CONSTANT}",
        steps=100,
    ),
    failing("self_reward", "mgrpo_fast", f"--objective.name mgrpo --lr 3e-3 {CONSTANT}", (1,)),
    failing(
        "dead_optimizer",
        "pion_dead",
        "--optim pion --optim.promote 0 --optim.aux-lr 0 --lr 1e-6",
    ),
)

SETTINGS = (*HEALTHY, *OPTIMIZER, *REWARD, *SAMPLING)


def tuning_runs() -> list[Run]:
    """Every run of the tuning corpus."""
    return in_random_order(SETTINGS)


def in_random_order(settings: Sequence[Setting]) -> list[Run]:
    """All runs in a fixed random order, so that a time limit leaves no kind out."""
    shuffled = random.Random(0).sample(settings, len(settings))
    return [Run(setting, seed) for setting in shuffled for seed in setting.seeds]


# Provoked collapses of the optimizer that rollback is to rescue -> the healthy setting to reach.
RESCUES = {
    "muon_x10": "default",
    "adamw_x10": "adamw",
    "pion_x20": "pion",
    "muon_rising": "default",
    "adamw_rising": "adamw",
    "muon_slowly": "default",
    "unclipped_reuse": "default",
    "sparse_collapse": "sparse",
}
# Two seeds on which the policy was developed, and a held-out one.
RESCUE_SEEDS = (0, 1, 100)


def rescue_runs() -> list[Run]:
    """The collapses of `RESCUES` again, with time to recover."""
    chosen = [setting for setting in SETTINGS if setting.name in RESCUES]
    return [Run(replace(setting, steps=110), seed) for seed in RESCUE_SEEDS for setting in chosen]
