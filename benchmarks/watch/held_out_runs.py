"""The held-out corpus as data: seeds that no threshold was tuned on, listed before any run.

Most settings are those of the tuning corpus with new seeds; `NEW_HEALTHY` and `NEW_FAILING` exist
here alone. Each run is made once, labelled by problems of its own (`labelled.py`), and judged once.
"""

from dataclasses import replace

from benchmarks.watch.runs import (
    CONSTANT,
    HALF,
    SETTINGS,
    Run,
    Setting,
    failing,
    healthy,
    in_random_order,
)

# Setting of the tuning corpus -> its seeds here.
SEEDS = {
    "default": (100, 101),
    "muon_slow": (100,),
    "adamw": (100, 101),
    "adamw_slow": (101,),
    "muon_sgd": (100,),
    "pion": (100, 101),
    "gmpo": (100,),
    "dr_grpo": (101,),
    "dapo": (101,),
    "mgrpo": (100,),
    "vote": (101,),
    "kl": (100,),
    "sparse": (100, 101),
    "easy": (101,),
    "saturated": (100,),
    "hard": (101,),
    "cool": (100,),
    "warm": (101,),
    "small_batch": (100,),
    "wide_groups": (101,),
    "lora": (100,),
    "overlong": (101,),
    "muon_x10": (100,),
    "adamw_x10": (100,),
    "pion_x20": (100,),
    "sgd_x300": (101,),
    "muon_rising": (100,),
    "adamw_rising": (100,),
    "muon_sgd_rising": (101,),
    "muon_slowly": (100, 101),
    "unclipped_reuse": (100,),
    "negative_kl": (101,),
    "longer": (101,),
    "shorter": (100,),
    "repeating": (101,),
    "many_numbers": (100,),
    "mentioned": (101,),
    "format_alone": (100,),
    "unboxed": (101,),
    "inverted": (100,),
    "noise": (101,),
    "sparse_collapse": (100,),
    "constant": (101,),
    "broken": (100,),
    "overflowing": (101,),
    "stalling": (100,),
    "hot": (100,),
    "warm_fast": (101,),
    "cold": (100,),
    "starved": (101,),
    "vote_fast": (100,),
    "vote_free": (101,),
    "mgrpo_fast": (100,),
    "pion_dead": (101,),
}

NEW_HEALTHY = (
    healthy("gspo", "--objective.name gspo --lr 3e-4", (100,)),
    healthy("cispo", f"{HALF} --objective.name cispo --lr 2e-4", (101,)),
    healthy("resampled", f"{HALF} --objective.dynamic-sampling resample --lr 3e-4", (100,)),
    healthy("per_head", "--optim.per-head --lr 4e-4", (101,)),
    healthy("nucleus", f"{HALF} --rollout.top-p 0.9 --lr 3e-4", (100,)),
    healthy("cosine", "--optim.schedule cosine --optim.warmup 0.2 --lr 5e-4", (101,), 80),
    healthy("corewarding", f"{HALF} --objective.name corewarding --lr 1e-4", (100,)),
)

NEW_FAILING = (
    failing("huge_step", "muon_x5", f"--lr 3e-3 {CONSTANT}", (101,)),
    failing("huge_step", "adamw_x30", f"--optim adamw --lr 9e-3 {CONSTANT}", (100,)),
    failing("huge_step", "dr_grpo_fast", f"--objective.name dr_grpo --lr 6e-3 {CONSTANT}", (101,)),
    failing(
        "huge_step",
        "lora_fast",
        f"--lora 8 --optim adamw --lr 5e-2 {CONSTANT}",
        (100,),
    ),
    failing(
        "rising_step",
        "pion_rising",
        "--optim pion --optim.cutoff noise --lr 4e-2 --optim.warmup 0.95",
        (101,),
        90,
    ),
    failing("weight_decay", "decaying", f"--optim.weight-decay 60 {CONSTANT}", (100,)),
    failing(
        "self_reward",
        "corewarding_fast",
        f"--objective.name corewarding --lr 3e-3 {CONSTANT}",
        (101,),
    ),
    failing("gamed", "seven", f"--reward gamed_rewards:seven {CONSTANT}", (100,)),
    failing("gamed", "digits", f"--reward gamed_rewards:digits {CONSTANT}", (101,)),
    failing(
        "noise",
        "late_coin",
        f"--reward gamed_rewards:late_coin --lr 1.5e-3 {CONSTANT}",
        (100,),
        80,
    ),
)


def held_out_settings() -> tuple[Setting, ...]:
    """Every setting with its seeds here."""
    known = {setting.name: setting for setting in SETTINGS}
    again = [replace(known[name], seeds=seeds) for name, seeds in SEEDS.items()]
    return (*again, *NEW_HEALTHY, *NEW_FAILING)


def held_out_runs() -> list[Run]:
    """Every run of the held-out corpus."""
    return in_random_order(held_out_settings())
