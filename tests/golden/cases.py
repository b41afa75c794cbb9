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
    shown: bool = False  # compare what the commands print, too


SMALL = (
    "--device cpu --threads 1 --seed 3 --steps 4 --save-every 2 --out run "
    "--rollout.prompts 4 --rollout.generations 4 --rollout.max-tokens 24 "
    "--task.num-train 16 --task.num-eval 4"
)
TRAIN = f"train arith {SMALL}"
# At this rate the second update of a rollout reaches the clip.
TWO_UPDATES = f"{TRAIN} --rollout.updates 2 --optim.lr 6e-3"
LONG = TRAIN.replace("--steps 4", "--steps 8").replace("--save-every 2", "--save-every 1")

OBJECTIVES = {
    "grpo": "--objective.name grpo",
    "grpo_beta": "--objective.name grpo --objective.beta 0.04",
    "dr_grpo": "--objective.name dr_grpo",
    "dapo": "--objective.name dapo",
    "bnpo": "--objective.name bnpo",
    "cispo": "--objective.name cispo --objective.epsilon-high 1.2",
    "gspo": "--objective.name gspo",
    "gspo_token": "--objective.name gspo_token",
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
    "ahead": "--max-staleness 1",
    "micro_batch": "--rollout.micro-batch 4",
    "sampling_mask": "--rollout.top-p 0.9 --objective.sampling-mask --rollout.updates 2",
    "entropy_bonus": "--objective.entropy-bonus 0.05",
    "entropy_target": "--objective.entropy-bonus 0.02 --objective.entropy-target 0.5",
    "anchor_per_step": (
        "--objective.name mgrpo --objective.momentum-update optimizer_step "
        "--objective.loss-on-momentum --rollout.updates 2"
    ),
    "drop": "--reward.parts sparse --objective.dynamic-sampling drop",
    "resample": "--reward.parts sparse --objective.dynamic-sampling resample",
    "resample_widest": (
        "--reward.parts sparse --objective.dynamic-sampling resample "
        "--objective.dynamic-oversample 3 --objective.dynamic-choice widest "
        "--objective.dynamic-max-rounds 1"
    ),
    "skip": "--reward.parts sparse --objective.dynamic-sampling skip --rollout.prompts 1",
    "average": "--average 0.8 --eval-every 2",
    "rewards": "--reward.parts sparse near length --reward.weights 1 0.5 0.1",
    "probes": "--watch.snr-every 2 --watch.forgetting-every 2",
    "sampling": (
        "--rollout.temperature 0.8 --rollout.top-p 0.9 --task.few-shot 1 --task.levels 1 2 "
        "--task.format answer --objective.scale-rewards batch"
    ),
    "sums": "--task sums --reward two_part overlong repetition --reward.overlong-buffer 8",
    "checkpointing": "--model.gradient-checkpointing --model.lora 4",
    "four_bits": "--model.load 4bit --model.lora 4 --optim adamw",
    "trl_options": "--trl.top_k 20 --trl.mask_truncated_completions true",
}

RESUMED = {
    "resumed": "--rollout.updates 2",
    "resumed_ahead": "--max-staleness 1",
    "resumed_lora": "--model.lora 4 --optim.name adamw",
    "resumed_anchor": "--objective.name mgrpo --rollout.fast",
    "resumed_resample": "--reward sparse --objective.dynamic-sampling resample --average 0.8",
}

OWN = (
    f"train --model tiny --data data.jsonl {SMALL} --reward rewards.py:even rewards.py:close "
    "--reward.weights 1 0.5"
).replace("--task.num-train 16 ", "")
COLLAPSE = (
    "train arith_collapse --device cpu --threads 1 --seed 3 --steps 30 --save-every 2 --out run "
    "--rollout.prompts 8 --rollout.generations 4 --rollout.max-tokens 24 --optim.lr 0.05 "
    "--optim.schedule constant --guard rollback --watch.precision 0 --task.num-train 64 "
    "--task.num-eval 8 --eval-every 10"
)
GYM = f"{TRAIN} --task rg:chain_sum --task.settings min_terms=2,max_terms=2 --task.curriculum 0.01"
SFT = (
    "sft --model tiny --device cpu --threads 1 --seed 3 --steps 8 --batch 4 --save-every 2 "
    "--task.num-train 16 --task.num-eval 4 --out run"
)
EVAL = "eval run --samples 2 --task.num-eval 4 --device cpu --threads 1 --out eval.json"

LANGUAGE = {
    "own_data": (OWN, EVAL),
    "curriculum": (GYM.replace("--steps 4", "--steps 12"),),
    "rollback": (COLLAPSE,),
    "evaluated": (TRAIN, EVAL, "export run --out export"),
    "exported_lora": (f"{TRAIN} --model.lora 4", "export run --merge-lora --out export"),
}
SUPERVISED = {
    "sft": (f"{SFT} --loose 0.5",),
    "sft_lora": (f"{SFT} --model.lora 4 --optim adamw --lr 1e-3",),
    "sft_resumed": (Killed(SFT.replace("--steps 8", "--steps 30"), rows=4), "sft --resume run"),
}

SNAKE = (
    "ppo snake --width 3 --height 3 --num-envs 8 --num-steps 8 --num-minibatches 2 --chunk 2 "
    "--update-epochs 1 --total-timesteps 512 --d-model 8 --num-heads 1 --mlp-ratio 1 "
    "--eval-episodes 4 --no-gif --save-freq 2 --save-dir . --run-name run"
)
PPO = {
    "snake": (SNAKE,),
    "snake_muon": (f"{SNAKE} --use-muon --eval-freq 4 --death-penalty -0.5",),
    "snake_pion": (f"{SNAKE} --optim pion --use-cnn --readout head --num-seeds 2",),
    "snake_resumed": (Killed(f"{SNAKE} --use-muon", rows=3), "ppo snake --resume run"),
}

DEMOS = (
    "vla demos --world.name blocks --world.pixels 8 --episodes 4 --starts 8 --workers 1 --out demos"
)
VLA = (
    "vla train demos --steps 8 --batch 8 --episodes 1 --workers 1 --device cpu --threads 1 "
    "--log-every 1 --probe-every 4 --save-every 3 --policy.size ci --policy.chunk 6 --out run"
)
VLA_EVAL = "vla eval run --episodes 1 --perturb light --workers 1 --device cpu --threads 1"
VLA_RUNS = {
    "vla": (DEMOS, VLA, VLA_EVAL),
    "vla_flow": (DEMOS, f"{VLA} --policy.head flow --optim.action pion --where 0.5"),
    "vla_resumed": (
        DEMOS,
        Killed(VLA.replace("--steps 8", "--steps 40"), rows=5),
        "vla train --resume run",
    ),
}

SIZES = "rollout.prompts=2 rollout.generations=4 rollout.max_tokens=16 task.num_eval=40 steps=2"
COMPARE = f"--workers 1 --set {SIZES} device=cpu --out run"
TOURNAMENTS = {
    "compare": (f"compare arith --optims adamw --seeds 1 --rates 1 --extend 0 {COMPARE}",),
    "sweep": ("sweep sweep.yaml --trials 2 --workers 1 --out run",),
}

# Commands that print their result.
PRINTED = {
    "plan": ("plan --model tiny --data data.jsonl --gpu h100 --budget 45", "plan qwen3_math_pion"),
    "reward_check": ("reward check two_part --data data.jsonl --rows 8",),
    "spectrum": ("spectrum muon pion --cutoff aligned --brief", "spectrum cubic --out s.json"),
    "route": ("route tiny --per-head", "route tiny --optim pion --lora 4 --out routes.json"),
    "chat": ("chat tiny --device cpu --threads 1 --max-tokens 16 --prompt 2+3=",),
    "explain": ("watch --explain entropy_collapse",),
}

# A choice of the others, for a first look.
QUICK = {"grpo", "gmpo", "mgrpo", "lora_muon", "fast", "resample", "own_data", "optimizers", "vla"}


def make_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}

    def add(rooms: str, tables: dict[str, tuple[str | Killed, ...]], shown: bool = False) -> None:
        for name, steps in tables.items():
            also = ["quick"] if name in QUICK else []
            cases[name] = Case((*rooms.split(), *also), steps, shown)

    add("rlvr objectives", {name: (f"{TWO_UPDATES} {x}",) for name, x in OBJECTIVES.items()})
    add("rlvr optim", {name: (f"{TRAIN} {x}",) for name, x in OPTIMIZERS.items()})
    add("rlvr features", {name: (f"{TRAIN} {x}",) for name, x in FEATURES.items()})
    add("rlvr resume", {name: killed(f"{LONG} {x}") for name, x in RESUMED.items()})
    add("rlvr language", LANGUAGE)
    add("rlvr optim watch", {"trl_trainers": ("trl_trainers.py",)})
    add("rlvr", {"trl_tools": ("trl_tools.py",)})
    add("sft", SUPERVISED)
    add("optim", {"optimizers": ("optimizers.py",)})
    add("jax", {"jax_optimizers": ("jax_optimizers.py",)})
    add("ppo", PPO)
    add("vla", VLA_RUNS)
    add("compare", TOURNAMENTS)
    add("printed", PRINTED, shown=True)
    return cases


def killed(command: str) -> tuple[Killed, str]:
    return Killed(command, rows=3), "train --resume run --trust"


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
