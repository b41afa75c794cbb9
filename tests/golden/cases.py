"""The cases: short runs through the command line and through public names.

A case is a list of steps, run one after the other in one folder that begins as a copy of
`inputs/`. A step is a mesotron command line without the word mesotron, or a script of `inputs/`.
Old flags stay old here: they must keep working.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Killed:
    """A command that is killed once it has logged `rows` steps."""

    command: str
    rows: int


@dataclass(frozen=True)
class Case:
    """What is run, and the rooms whose changes it should accompany."""

    rooms: tuple[str, ...]
    steps: tuple[str | Killed, ...]


SMALL = (
    "--device cpu --threads 1 --seed 3 --steps 4 --save-every 2 --out run "
    "--rollout.prompts 4 --rollout.generations 4 --rollout.max-tokens 24 "
    "--task.num-train 16 --task.num-eval 4"
)
TRAIN = f"train arith {SMALL}"
TWO_UPDATES = f"{TRAIN} --rollout.updates 2"
LONG = TRAIN.replace("--steps 4", "--steps 8").replace("--save-every 2", "--save-every 1")
RESUME = "train --resume run --trust"

OBJECTIVES = {
    "grpo": "--objective.name grpo",
    "grpo_beta": "--objective.name grpo --objective.beta 0.04",
    "dr_grpo": "--objective.name dr_grpo",
    "dapo": "--objective.name dapo",
    "bnpo": "--objective.name bnpo",
    "cispo": "--objective.name cispo",
    "gspo": "--objective.name gspo",
    "sapo": "--objective.name sapo",
    "luspo": "--objective.name luspo",
    "vespo": "--objective.name vespo",
    "clip_cov": "--objective.name clip_cov --objective.cov-share 0.1",
    "kl_cov": "--objective.name kl_cov --objective.cov-share 0.1",
    "gmpo": "--objective.name gmpo",
    "vote": "--objective.name vote",
    "vote_gmpo": "--objective.name vote --objective.loss gmpo --objective.tie random",
    "mgrpo": "--objective.name mgrpo --objective.momentum 0.9",
    "corewarding": "--objective.name corewarding --objective.momentum 0.9",
}

OPTIMIZERS = {
    "muon": "--optim.name muon --optim.weight-decay 0.01",
    "muon_per_head": "--optim.name muon --optim.per-head --optim.clip all --optim.warmup 0.5",
    "pion": "--optim.name pion",
    "pion_noise": "--optim.name pion --optim.cutoff noise --optim.schedule cosine",
    "normuon": "--optim.name normuon",
    "muon_sgd": "--optim.name muon_sgd --optim.lr 1e-4",
    "adamw": "--optim.name adamw --optim.lr 1e-4 --optim.weight-decay 0.1",
}

FEATURES = {
    "lora_adamw": "--model.lora 4 --optim.name adamw",
    "lora_muon": "--model.lora 4 --optim.name muon --rollout.updates 2",
    "fast": "--rollout.fast --rollout.updates 2",
    "micro_batch": "--rollout.micro-batch 4",
    "entropy_bonus": "--objective.entropy-bonus 0.05",
    "entropy_target": "--objective.entropy-bonus 0.02 --objective.entropy-target 0.5",
    "anchor_per_step": (
        "--objective.name mgrpo --objective.momentum-update optimizer_step "
        "--objective.loss-on-momentum --rollout.updates 2"
    ),
    "drop": "--objective.dynamic-sampling drop",
    "resample": "--objective.dynamic-sampling resample --objective.dynamic-oversample 2",
    "resample_widest": (
        "--objective.dynamic-sampling resample --objective.dynamic-oversample 3 "
        "--objective.dynamic-choice widest --objective.dynamic-max-rounds 1"
    ),
    "skip": "--objective.dynamic-sampling skip --rollout.prompts 1",
    "average": "--average 0.8 --eval-every 2",
    "rewards": "--reward.parts sparse near length --reward.weights 1 0.5 0.1",
    "probes": "--watch.snr-every 2 --watch.forgetting-every 2",
    "trl_options": "--trl.top_k 20 --trl.mask_truncated_completions true",
}

RESUMED = {
    "resumed": "--rollout.updates 2",
    "resumed_lora": "--model.lora 4 --optim.name adamw",
    "resumed_anchor": "--objective.name mgrpo --rollout.fast",
    "resumed_resample": "--objective.dynamic-sampling resample --average 0.8",
}


def make_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name, flags in OBJECTIVES.items():
        cases[name] = Case(("rlvr",), (f"{TWO_UPDATES} {flags}",))

    for name, flags in OPTIMIZERS.items():
        cases[name] = Case(("rlvr", "optim"), (f"{TRAIN} {flags}",))

    for name, flags in FEATURES.items():
        cases[name] = Case(("rlvr",), (f"{TRAIN} {flags}",))

    for name, flags in RESUMED.items():
        cases[name] = Case(("rlvr", "runs"), (Killed(f"{LONG} {flags}", rows=3), RESUME))

    return cases


CASES = make_cases()


def choose(only: Iterable[str]) -> list[str]:
    """Names of the cases that are named or belong to a room that is; all without names."""
    wanted = set(only)
    rooms = {room for case in CASES.values() for room in case.rooms}
    unknown = wanted - rooms - CASES.keys()
    if unknown:
        raise SystemExit(f"no case or room is called {', '.join(sorted(unknown))}")
    if not wanted:
        return list(CASES)

    return [name for name, case in CASES.items() if wanted & {name, *case.rooms}]
