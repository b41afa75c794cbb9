"""Who runs: what each contender changes in the recipe arith_smollm2.

A name that begins with stock is plain TRL with AdamW; all others are `mesotron train` with options.
"""

from typing import Any

RECIPE = "arith_smollm2"
FULL = {"rollout.engine": "fused", "rollout.share_prompts": True, "model.dtype": "mixed"}
MUON, ADAMW = {"optim.name": "muon"}, {"optim.name": "adamw"}
# Each adds one option to the one before; the last two ask what the weights' own type costs.
LADDER: dict[str, dict[str, Any]] = {
    "stock": ADAMW | {"optim.lr": 1e-5},
    "generate": ADAMW | {"optim.lr": 1e-5, "model.dtype": "mixed", "rollout.engine": "generate"},
    "graph": ADAMW | {"optim.lr": 1e-5, "model.dtype": "mixed", "rollout.engine": "graph"},
    "fused": ADAMW | {"optim.lr": 1e-5, "model.dtype": "mixed", "rollout.engine": "fused"},
    "shared": ADAMW | FULL | {"optim.lr": 1e-5},
    "muon": MUON | FULL | {"optim.lr": 1e-4},
    "muon_bf16": MUON | FULL | {"optim.lr": 1e-4, "model.dtype": "bfloat16"},
}
# In the order of what is worth knowing first.
GRID: dict[str, dict[str, Any]] = {
    "muon_2e-4": MUON | FULL | {"optim.lr": 2e-4},
    "muon_4e-4_p128": MUON | FULL | {"optim.lr": 4e-4, "rollout.prompts": 128},
    "muon_2e-4_resample": MUON
    | FULL
    | {"optim.lr": 2e-4, "objective.dynamic_sampling": "resample"},
    "muon_4e-4": MUON | FULL | {"optim.lr": 4e-4},
    "adamw_2e-5": ADAMW | FULL | {"optim.lr": 2e-5},
    "muon_1e-4": MUON | FULL | {"optim.lr": 1e-4},
    "muon_2e-4_x16": MUON | FULL | {"optim.lr": 2e-4, "rollout.generations": 16},
    "muon_2e-4_u4": MUON | FULL | {"optim.lr": 2e-4, "rollout.updates": 4, "rollout.prompts": 128},
}
STOCK_GRID: dict[str, dict[str, Any]] = {
    f"stock_{rate}": ADAMW | {"optim.lr": float(rate)} for rate in ("1e-5", "2e-5", "5e-6", "4e-5")
}
NAMES = LADDER | GRID | STOCK_GRID
