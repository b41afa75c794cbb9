"""What might make SmolLM2 learn faster: for each lever the optimizer, its rate and gain, and what
else it changes in the recipe.

A plain TRL trainer (stock) and the recipe as it is (adamw, muon) run beside them.
"""

SMALL_AUXILIARY = "muon:aux_lr=1e-5"
LEVERS: dict[str, tuple[str, float, float, tuple[str, ...]]] = {
    "stock": ("adamw", 1e-5, 1.0, ()),
    "adamw, plain passes": ("adamw", 1e-5, 1.0, ("rollout.fast=false",)),
    "adamw": ("adamw", 1e-5, 1.0, ()),
    "muon": ("muon", 4e-5, 1.8, ()),
    "muon, clipped": ("muon", 4e-5, 1.8, ("optim.clip=all",)),
    "muon, small auxiliary rate": (SMALL_AUXILIARY, 1e-4, 1.0, ()),
    "muon, both": (SMALL_AUXILIARY, 1e-4, 1.0, ("optim.clip=all",)),
    "adamw, right answers alone": ("adamw", 1e-5, 1.0, ("reward.parts=sparse",)),
    "muon, right answers alone": ("muon", 4e-5, 1.8, ("reward.parts=sparse",)),
    "adamw, unscaled rewards": ("adamw", 1e-5, 1.0, ("objective.scale_rewards=none",)),
    "muon, both, 128 prompts": (
        SMALL_AUXILIARY,
        2e-4,
        1.0,
        ("optim.clip=all", "rollout.prompts=128"),
    ),
    "adamw, 16 x 16": ("adamw", 1e-5, 1.0, ("rollout.prompts=16", "rollout.generations=16")),
    "adamw, resampled": ("adamw", 1e-5, 1.0, ("objective.dynamic_sampling=resample",)),
    "adamw, 8 examples": ("adamw", 1e-5, 1.0, ("task.few_shot=8",)),
    "adamw, must end": (
        "adamw",
        1e-5,
        1.0,
        ("reward.parts=two_part,overlong", "reward.overlong_buffer=1"),
    ),
    "adamw, warm-up": ("adamw", 1e-5, 1.0, ("optim.warmup=0.1",)),
    "adamw, decayed": ("adamw", 2e-5, 1.0, ("optim.schedule=linear",)),
}
# The same at four times the prompts, where steps are surer and can be larger.
WIDE = ("optim.clip=all", "rollout.prompts=128")
LEVERS |= {
    "stock, twice the rate": ("adamw", 2e-5, 1.0, ()),
    "wide": (SMALL_AUXILIARY, 4e-4, 1.0, WIDE),
    "wide, twice the rate": (SMALL_AUXILIARY, 8e-4, 1.0, WIDE),
    "wide, unscaled rewards": (SMALL_AUXILIARY, 4e-4, 1.0, (*WIDE, "objective.scale_rewards=none")),
    "wide, right answers alone": (SMALL_AUXILIARY, 4e-4, 1.0, (*WIDE, "reward.parts=sparse")),
    "wide, 8 examples": (SMALL_AUXILIARY, 4e-4, 1.0, (*WIDE, "task.few_shot=8")),
    "wide, 64 x 16": (
        SMALL_AUXILIARY,
        4e-4,
        1.0,
        ("optim.clip=all", "rollout.prompts=64", "rollout.generations=16"),
    ),
    "wide, 32 x 32": (SMALL_AUXILIARY, 4e-4, 1.0, ("optim.clip=all", "rollout.generations=32")),
    "wide, hotter": (SMALL_AUXILIARY, 4e-4, 1.0, (*WIDE, "rollout.temperature=1.3")),
    "wide, momentum 0.9": (SMALL_AUXILIARY, 4e-4, 1.0, (*WIDE, "optim.momentum=0.9")),
    "wide, larger auxiliary rate": ("muon:aux_lr=4e-5", 4e-4, 1.0, WIDE),
    "wide, noise cutoff": ("pion_cutoff:aux_lr=1e-5", 8e-4, 1.0, WIDE),
    "wide, adamw": ("adamw", 2e-5, 1.0, ("rollout.prompts=128",)),
    "wide, adamw, unscaled rewards": (
        "adamw",
        4e-5,
        1.0,
        ("rollout.prompts=128", "objective.scale_rewards=none"),
    ),
}
# Against the loss of exploration: after some twenty steps three groups of four teach nothing.
CLIPPED = "optim.clip=all"
ENTROPY = ("objective.entropy_bonus=0.02", "objective.entropy_target=0.3")
LEVERS |= {
    "muon, both, unscaled rewards": (
        SMALL_AUXILIARY,
        1e-4,
        1.0,
        (CLIPPED, "objective.scale_rewards=none"),
    ),
    "muon, both, half the rate": (SMALL_AUXILIARY, 5e-5, 1.0, (CLIPPED,)),
    "muon, both, resampled": (
        SMALL_AUXILIARY,
        1e-4,
        1.0,
        (CLIPPED, "objective.dynamic_sampling=resample"),
    ),
    "muon, both, entropy at 0.3": (SMALL_AUXILIARY, 1e-4, 1.0, (CLIPPED, *ENTROPY)),
    "muon, both, entropy at 0.15": (
        SMALL_AUXILIARY,
        1e-4,
        1.0,
        (CLIPPED, ENTROPY[0], "objective.entropy_target=0.15"),
    ),
    "muon, both, entropy bonus": (
        SMALL_AUXILIARY,
        1e-4,
        1.0,
        (CLIPPED, "objective.entropy_bonus=0.03"),
    ),
    "muon, both, twice the rate, entropy at 0.3": (SMALL_AUXILIARY, 2e-4, 1.0, (CLIPPED, *ENTROPY)),
    "adamw, entropy at 0.3": ("adamw", 1e-5, 1.0, ENTROPY),
}
# Against silent groups: wrong answers that differ in reward, and an end that is paid for.
ENDED = "reward.overlong_buffer=1"
MUST_END = ("reward.parts=two_part,overlong", ENDED)
NEAR = ("reward.parts=two_part,near,overlong", ENDED)
CHOSEN = (
    "objective.dynamic_sampling=resample",
    "objective.dynamic_max_rounds=1",
    "objective.dynamic_oversample=3",
)
WIDEST = "objective.dynamic_choice=widest"
LEVERS |= {
    "stock, near": ("adamw", 1e-5, 1.0, NEAR),
    "stock, near, twice the rate": ("adamw", 2e-5, 1.0, NEAR),
    "adamw, near, entropy at 0.3": ("adamw", 2e-5, 1.0, (*NEAR, *ENTROPY)),
    "muon, near": (SMALL_AUXILIARY, 1e-4, 1.0, (CLIPPED, *NEAR)),
    "muon, near, twice the rate": (SMALL_AUXILIARY, 2e-4, 1.0, (CLIPPED, *NEAR)),
    "muon, near, not ended": (SMALL_AUXILIARY, 1e-4, 1.0, (CLIPPED, "reward.parts=two_part,near")),
    "muon, near, entropy at 0.3": (SMALL_AUXILIARY, 1e-4, 1.0, (CLIPPED, *NEAR, *ENTROPY)),
    "muon, near, entropy at 0.3, twice the rate": (
        SMALL_AUXILIARY,
        2e-4,
        1.0,
        (CLIPPED, *NEAR, *ENTROPY),
    ),
    "muon, near, entropy at 0.3, four times the rate": (
        SMALL_AUXILIARY,
        4e-4,
        1.0,
        (CLIPPED, *NEAR, *ENTROPY),
    ),
    "muon, near, entropy at 0.3, chosen": (
        SMALL_AUXILIARY,
        1e-4,
        1.0,
        (CLIPPED, *NEAR, *ENTROPY, *CHOSEN),
    ),
    "muon, must end, entropy at 0.3": (SMALL_AUXILIARY, 1e-4, 1.0, (CLIPPED, *MUST_END, *ENTROPY)),
    "muon, must end, entropy bonus": (
        SMALL_AUXILIARY,
        1e-4,
        1.0,
        (CLIPPED, *MUST_END, "objective.entropy_bonus=0.03"),
    ),
    "muon, must end, entropy at 0.3, chosen": (
        SMALL_AUXILIARY,
        1e-4,
        1.0,
        (CLIPPED, *MUST_END, *ENTROPY, *CHOSEN),
    ),
    "muon, near, entropy at 0.3, widest": (
        SMALL_AUXILIARY,
        1e-4,
        1.0,
        (CLIPPED, *NEAR, *ENTROPY, *CHOSEN, WIDEST),
    ),
}
# The speedrun's batches, 64 groups of 192: which are chosen, and a rate that falls.
QUICK = (CLIPPED, *NEAR, *ENTROPY, *CHOSEN, "rollout.prompts=64")
FALLING = "optim.schedule=linear"
LEVERS |= {
    "quick": (SMALL_AUXILIARY, 2e-4, 1.0, QUICK),
    "quick, widest": (SMALL_AUXILIARY, 2e-4, 1.0, (*QUICK, WIDEST)),
    "quick, falling": (SMALL_AUXILIARY, 2e-4, 1.0, (*QUICK, FALLING)),
    "quick, widest, falling": (SMALL_AUXILIARY, 2e-4, 1.0, (*QUICK, WIDEST, FALLING)),
}
