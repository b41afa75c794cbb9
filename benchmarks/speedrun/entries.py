"""The contenders: what each changes in the recipe arith_smollm2.

A name that begins with stock is plain TRL with AdamW; all others are `mesotron train` with options.
"""

from typing import Any

RECIPE = "arith_smollm2"
FULL = {"rollout.fast": True, "model.dtype": "mixed"}
UNFUSED = {"optim.fused": False}  # nothing of the optimizer's to compile
MUON = {"optim.name": "muon"}
ADAMW = {"optim.name": "adamw"}
# Each adds one option to the one before; then more prompts, and bfloat16 weights.
LADDER: dict[str, dict[str, Any]] = {
    "stock": ADAMW | {"optim.lr": 1e-5},
    "generate": ADAMW | {"optim.lr": 1e-5, "model.dtype": "mixed"},
    "recorded": ADAMW | FULL | {"optim.lr": 1e-5},
    "muon": MUON | FULL | {"optim.lr": 1e-4},
    "muon_p128": MUON | FULL | {"optim.lr": 1e-4, "rollout.prompts": 128},
    "muon_p128_unfused": MUON | FULL | UNFUSED | {"optim.lr": 1e-4, "rollout.prompts": 128},
    "muon_bf16": MUON | FULL | {"optim.lr": 1e-4, "model.dtype": "bfloat16"},
}
# Embeddings and head are one matrix; AdamW on everything breaks the model from 4e-5 on.
OURS = MUON | FULL | {"optim.aux_lr": 1e-5, "optim.clip": "all"}
# To keep exploring, and to use the GPU: groups with signal are chosen from more prompts.
CURIOUS = {"objective.entropy_bonus": 0.02, "objective.entropy_target": 0.3}
CHOOSING = {"objective.dynamic_sampling": "resample", "objective.dynamic_max_rounds": 1}
QUICK = OURS | UNFUSED | CURIOUS
OF_192 = CHOOSING | {"rollout.prompts": 64, "objective.dynamic_oversample": 3.0}
FALLING = {"optim.schedule": "linear"}
# The searches of PROTOCOL.md: with a bonus that starts from 0.02 runs may settle on one answer to
# all negative sums, and from 0.04 one of six fresh seeds did, from 0.1 none of ten. A start above
# 0.1 is also the limit.
BONUS = QUICK | FALLING | OF_192 | {"optim.lr": 2e-4, "steps": 400}
BONUSES: dict[str, dict[str, Any]] = {
    f"ours_bonus_{bonus}": BONUS | {"objective.entropy_bonus": bonus}
    for bonus in (0.04, 0.06, 0.1, 0.2)
}
OF_16 = {"average": 0.95, "rollout.prompts": 32, "rollout.generations": 16}
OURS_SEARCH = {"ours_16": BONUSES["ours_bonus_0.1"] | OF_16}
TRL_SEARCH: dict[str, dict[str, Any]] = {
    f"stock_{rate:g}_{steps}": ADAMW | FALLING | {"optim.lr": rate, "steps": steps}
    for steps in (400, 650)
    for rate in (2e-5, 4e-5, 8e-5, 1.6e-4)
}
# Plain TRL's update with our sampler and shared prompts: for its search, at a fraction of the time.
TWIN = FULL | {
    "optim.clip": "all",
    "objective.name": "dapo",
    "objective.epsilon_high": 0.2,
}
TWINS = {name.replace("stock", "twin"): entry | TWIN for name, entry in TRL_SEARCH.items()}
ARMS = {"ours": OURS_SEARCH, "trl": TRL_SEARCH}
NAMES = LADDER | BONUSES | OURS_SEARCH | TRL_SEARCH | TWINS
