"""Configs of the other commands: sft, eval, plan, chat, export, watch, report, compare, ..."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from mesotron.config.base import Config, setting
from mesotron.config.optim import OptimConfig, OptimizerName
from mesotron.config.registry import FORMATS, unknown
from mesotron.config.rules import optimizer_names
from mesotron.config.train import LanguageRunConfig, TaskConfig, TrainConfig, check_alert
from mesotron.config.types import (
    Bounds,
    Count,
    Cutoff,
    Device,
    Natural,
    NonNegative,
    Positive,
    Seed,
    Several,
    Share,
)

# The choices that the help shows; the registry may know more by the time a config is made.
if TYPE_CHECKING:
    LogKind = str
else:
    LogKind = Literal[("auto", *FORMATS.names())] | str


@dataclass(frozen=True, kw_only=True)
class SftConfig(LanguageRunConfig):
    """Warm-start a language model on solved problems by supervised training."""

    # The best of twelve rules on a published model (benchmarks/finetuning).
    optim: OptimConfig = OptimConfig(
        name="adamw",
        lr=8e-5,
        schedule="linear",
        warmup=0.1,
    )

    steps: Count = setting(200, on_resume=True)
    """Optimizer steps; with --resume, more of them train on."""
    batch: Count = 32
    """Solved problems per step."""
    max_tokens: Several = 512
    """Maximum length of prompt and solution together."""
    loose: Share = 0.0
    """Fraction of the solved problems whose answer is written outside the format."""
    save_every: Natural = 100
    """Save a checkpoint every N steps and at the end (0: only at the end)."""

    def check_fields(self) -> None:
        super().check_fields()
        if self.task.env:
            self.task.refuse("env", "has no solved problems to imitate: use mesotron train")


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Config):
    """Evaluate a model: greedy and sampled, strict and lenient, side by side."""

    model: str = setting("runs/last", positional=True)
    """A run folder, a checkpoint, a model folder, or a model's name."""
    against: str | None = None
    """Another model to compare with on the same problems (unset: the start of a run)."""
    task: TaskConfig = TaskConfig()
    reward: tuple[str, ...] = setting((), is_code=True)
    """Also show the mean of these rewards, as in mesotron train; needed without gold answers."""

    samples: Natural = 8
    """Sampled completions per problem (0: greedy only)."""
    temperature: Positive = 1.0
    """Sampling temperature."""
    max_tokens: Count = 256
    """Maximum completion length."""
    seed: Seed = 0
    """Seed of the samples and of the intervals."""
    device: Device = "auto"
    """Where to run (auto: CUDA if available)."""
    threads: Count | None = None
    """CPU threads (unset: torch's choice)."""
    out: Path | None = None
    """Also write the result to this JSON file."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig(TrainConfig):
    """Estimate a run before it starts: updates, completions, tokens, hours, dollars."""

    calibrate: bool = False
    """Run three steps on this machine and use their speed."""
    seconds_per_step: Positive | None = None
    """The speed, if known: seconds per optimizer step."""
    tokens_per_second: Positive | None = None
    """The speed in another unit: tokens sampled per second, training included."""
    completion_tokens: Annotated[float, Bounds(ge=1)] | None = None
    """Tokens of a typical completion (unset: measured by --calibrate, else half of the maximum)."""

    def check_fields(self) -> None:
        super().check_fields()
        if self.resume is not None:
            self.refuse("resume", "does not apply: plan estimates a run before it starts")

        if self.calibrate + bool(self.seconds_per_step) + bool(self.tokens_per_second) > 1:
            raise ValueError("choose one of --calibrate, --seconds-per-step, --tokens-per-second")


@dataclass(frozen=True, kw_only=True)
class ChatConfig(Config):
    """Chat with a trained model; --compare also asks the model that it started from."""

    model: str = setting("runs/last", positional=True)
    """A run folder, a checkpoint, a model folder, or a model's name."""
    prompt: str | None = None
    """Answer this and exit (unset: a conversation until Ctrl-D; /new starts another)."""
    compare: bool = False
    """Also answer with the model that the run started from, side by side."""
    system: str | None = None
    """System prompt (unset: the one of the run's training)."""
    max_tokens: Count = 256
    """Maximum completion length."""
    temperature: NonNegative = 0.0
    """Sampling temperature (0: greedy)."""
    seed: int = 0
    """Seed of the samples."""
    device: Device = "auto"
    """Where to run (auto: CUDA if available)."""
    threads: Count | None = None
    """CPU threads (unset: torch's choice)."""


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Config):
    """Export a run's model as a folder for from_pretrained, with a model card."""

    model: str = setting("runs/last", positional=True)
    """A run folder, or one of its checkpoints."""
    out: Path | None = None
    """New folder (unset: RUN/export)."""
    merge_lora: bool = False
    """Add the adapters to the weights (unset: write the adapters alone, if the run has any)."""
    dtype: Literal["auto", "fp32", "bf16", "fp16", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights (auto: that of the model's own files)."""
    gguf: bool = False
    """Also write model.gguf, with llama.cpp's converter."""
    push: str | None = None
    """Upload the folder to this hub repository, USER/NAME; new ones are private."""


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(Config):
    """Check this machine: versions, GPU, kernels, extras, disk, and what would be slow."""


@dataclass(frozen=True, kw_only=True)
class WatchSettings(Config, prefix="settings."):
    """How much evidence the watch needs; the detectors' own rules are data elsewhere."""

    warmup: Count = 10
    """Rows from which a run's own baseline is taken."""
    window: Count = 5
    """Rows whose trimmed mean is the current value; twice and five times as many count too."""
    patience: Count = 3
    """Consecutive rows that must show a failure before it is reported."""
    noise: NonNegative = 4.0
    """A change must also exceed this many standard errors of the run's own noise."""


@dataclass(frozen=True, kw_only=True)
class WatchConfig(Config):
    """Diagnose a run from its logs: what failed, when, why, and what to do about it."""

    path: Path = setting(Path("runs/last"), positional=True)
    """Run folder, trainer_state.json, JSONL, CSV, Parquet, TensorBoard, W&B, trackio, MLflow or
    console log, a notebook, or a folder of runs; FILE#NAME is one run of a file with several. Also
    wandb://ENTITY/PROJECT/RUN, trackio://PROJECT/RUN or hf://OWNER/NAME."""
    kind: LogKind = "auto"
    """Format of the path (auto: by its name and first bytes)."""
    rename: tuple[str, ...] = ()
    """Metric names the watch does not know, as in reward=my_score (ours on the left). They are
    remembered in mesotron_names.json beside the log."""
    follow: bool = False
    """Keep reading while the run writes; Ctrl-C stops with the diagnosis so far."""
    every: Positive = 2.0
    """Seconds between reads with --follow."""
    idle: float | None = None
    """With --follow, stop after this many seconds without a new row."""
    json: bool = False
    """Print JSON for programs, and exit with 0 (healthy), 1 (warning), 3 (dead) or 4 (unknown)."""
    check: bool = False
    """Exit with code 1 if the run is dead, and 4 if that is not known, for scripts. In a GitHub job
    the verdict is on its page too."""
    out: Path | None = None
    """Also write the diagnosis and its events to this JSON file."""
    alerts: tuple[str, ...] = ()
    """Where to send alerts: webhook:$URL, slack:$URL, discord:$URL, ntfy:$TOPIC or
    command:PROGRAM; addresses come from environment variables."""
    forecast: bool = False
    """Also say how the run will end: will it learn, where do reward and held-out score end, what
    limits it."""
    steps: Count | None = None
    """With --forecast, the planned last step (unset: what the log says, else twice as many steps as
    so far)."""
    price: Positive | None = None
    """Dollars per hour of the machine, for the alerts and the forecast."""
    link: str = ""
    """Address of the run's page, for the alerts (unset: report.html in the run's folder)."""
    detectors: Path | None = None
    """TOML file with detectors of your own."""
    explain: str | None = None
    """Print rule, record and remedy of this detector, and exit."""
    settings: WatchSettings = WatchSettings()

    def check_fields(self) -> None:
        if self.kind != "auto" and self.kind not in FORMATS:
            self.refuse("kind", FORMATS.hint(self.kind))
        self.refuse_unless(self.forecast, "needs --forecast", "steps")
        for text in self.alerts:
            check_alert(text)


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Config):
    """Write a run, several runs or a tournament as one self-contained HTML page."""

    paths: tuple[Path, ...] = setting((Path("runs/last"),), positional=True)
    """Run folders, folders of runs, logs that mesotron watch reads, or one tournament's folder."""
    out: Path | None = None
    """The HTML file (unset: report.html in the run's folder, or here for several runs)."""
    live: bool = False
    """Rewrite the page while the runs go on; an open browser page follows."""
    port: Natural | None = None
    """Serve the live page on this port of 127.0.0.1 at a secret address (0: any free port)."""
    rename: tuple[str, ...] = ()
    """Metric names, as in mesotron watch --rename."""


@dataclass(frozen=True, kw_only=True)
class McpConfig(Config):
    """Serve tools over a folder of runs to an agent, by MCP on standard input and output."""

    runs: Path = Path("runs")
    """The folder: clients read, start, stop and resume runs in it, and reach nothing outside."""
    at_once: Count = 1
    """Runs that may train at the same time."""
    trust: bool = False
    """Let clients name code, addresses and files elsewhere in the settings of a start."""


@dataclass(frozen=True, kw_only=True)
class RewardCheckConfig(Config):
    """Check a reward before training: do gold answers earn, and do cheats?"""

    rewards: tuple[str, ...] = setting(("two_part",), positional=True)
    """Parts of the reward: names, or your own file.py:name or module:name."""
    weights: tuple[float, ...] = ()
    """One weight per part (unset: 1 each)."""
    task: TaskConfig = TaskConfig()
    rows: Several = 50
    """Training problems to try it on."""
    samples: Natural = 0
    """Also score this many samples of the model per problem, for the spread inside groups."""
    model: str = "tiny"
    """The model that is sampled from."""
    max_tokens: Count = 256
    """Longest sample, in tokens."""
    seed: Seed = 0
    """Seed of the choice of problems and of the samples."""

    def check_fields(self) -> None:
        if self.task.env:
            why = "pays rewards of its own, for whole episodes: try it with mesotron eval --env"
            self.task.refuse("env", why)


@dataclass(frozen=True, kw_only=True)
class ManyRunsConfig(Config):
    """What commands that start many runs share."""

    workers: Count | None = None
    """Runs in parallel (unset: one per GPU, or per core without one)."""
    threads: Count = 1
    """CPU threads per run."""
    on: str | None = None
    """Run them on a Ray cluster: ray, or ray:ADDRESS (unset: on this machine)."""
    gpus: Positive = 1.0
    """GPUs per run on a Ray cluster; with 0.5 two runs share one."""

    def check_fields(self) -> None:
        if self.on is not None and self.on.partition(":")[0] != "ray":
            self.refuse("on", "must be ray or ray:ADDRESS, such as ray:10.0.0.1:6379")


@dataclass(frozen=True, kw_only=True)
class CompareConfig(ManyRunsConfig):
    """Compare optimizers and objectives fairly; `compare sweep` searches any settings.

    Each contender gets a rate search, then fresh seeds. The short flags of mesotron train (--model,
    --data, --reward, ...) apply to every run."""

    recipe: str = setting("arith", positional=True)
    """A recipe of mesotron train; snake for PPO; vla for a robot policy (--set demos=FOLDER)."""
    optims: tuple[str, ...] = ()
    """Any of adamw, muon, muon_sgd, muon_heads, pion, pion_cutoff, normuon and lowrank (unset: all
    but the last two). Variants are written pion:promote=2. For snake: adam, muon and pion. For vla:
    adamw, muon, pion_action, pion and lowrank."""
    objectives: tuple[str, ...] = ()
    """Objectives to combine each optimizer with (unset: the recipe's)."""
    seeds: Count = 3
    """Seeds that score each contender at the rate chosen by its search."""
    search_seeds: Count = 1
    """Seeds for the rate search; they do not count in the final scores."""
    rates: Count = 4
    """Rates tried for each contender."""
    factor: Annotated[float, Bounds(ge=1.05, le=100)] = 2.0
    """Factor between neighboring rates."""
    extend: Natural = 2
    """Extra rates for a contender whose best rate is the smallest or largest tried."""
    set: tuple[str, ...] = ()
    """Settings of the recipe to change in every cell, such as steps=20 batch=8."""
    seed: Seed = 0
    """First seed. The search uses it, the final runs those after it."""
    keep_weights: bool = False
    """Keep the checkpoints of finished cells."""
    trust: bool = False
    """Run the code that demonstrations name as their world, MODULE:CLASS."""
    out: Path | None = None
    """Tournament folder (unset: runs/compare-RECIPE). An existing one is continued."""

    def check_fields(self) -> None:
        super().check_fields()
        for name in ("optims", "objectives"):
            given = getattr(self, name)
            distinct = sorted(set(given))
            if len(distinct) < len(given):
                self.refuse(name, f"has duplicates: give {', '.join(distinct)} once each")


@dataclass(frozen=True, kw_only=True)
class SweepConfig(ManyRunsConfig):
    """Search a run's settings with Optuna, over the ranges of a W&B sweep file.

    The short flags of mesotron train (--model, --data, --reward, ...) apply to every run."""

    file: str = setting(positional=True)
    """A W&B sweep file (YAML or JSON), or a recipe as in mesotron compare together with --space."""
    space: tuple[str, ...] = ()
    """Ranges of flags, in addition to the file's: lr=1e-5..1e-3 optim=muon,pion seed=0..9. Positive
    ranges of a decade or more are sampled in log space."""
    metric: str | None = None
    """Metric of metrics.jsonl or result.json (unset: the file's, or the run's own score)."""
    goal: Literal["maximize", "minimize"] | None = None
    """Direction (unset: the file's, or maximize)."""
    trials: Count = 20
    """Finished or pruned trials of the whole study, over all processes."""
    prune: bool = True
    """Stop a trial once the watch reports it dead."""
    study: str | None = None
    """Name of the study in its storage (unset: the file's name)."""
    storage: str | None = None
    """Database shared by several machines, as postgresql://... (unset: a file in --out)."""
    seed: Seed = 0
    """Seed of the sampler."""
    out: Path | None = None
    """Folder of the trials' runs (unset: runs/sweep-NAME). An existing study is continued."""


@dataclass(frozen=True, kw_only=True)
class SpectrumConfig(Config):
    """Show what a filter does to singular values in [0, 1]."""

    filters: tuple[str, ...] = setting(("muon", "cubic", "polar_express", "pion"), positional=True)
    """Filters to show, by name."""
    promote: tuple[Natural, ...] = ()
    """Pion's promotion steps k_p, one curve each."""
    cutoff: tuple[Cutoff, ...] = ()
    """Pion's strengths, one curve each: fractions, aligned (0.414), or noise (for --shape)."""
    shape: tuple[Count, Count] = (1024, 4096)
    """Rows and columns of the matrix, for the noise edge and the FLOPs."""
    steps: Count | None = None
    """Steps of each filter, or suppression steps of a cutoff (unset: each filter's own)."""
    axis: Literal["log", "linear"] = "log"
    """Scale of sigma in the plots."""
    brief: bool = False
    """Show the plot without the tables."""
    plot: Path | None = None
    """Also plot the curves to this file (.png, .svg or .pdf)."""
    out: Path | None = None
    """Also write the numbers to this JSON file."""


@dataclass(frozen=True, kw_only=True)
class RouteConfig(Config):
    """Show which rule each parameter of a model gets, without loading weights."""

    model: str = setting(positional=True)
    """tiny, a model folder, a config.json, or a name on the hub."""
    optim: OptimizerName = "muon"
    """The optimizer that routes."""
    per_head: bool = False
    """Filter attention projections head by head."""
    override: tuple[str, ...] = ()
    """PATTERN=RULE pairs that override the detected roles, such as '*.action_head.*=pion'."""
    lora: Count | None = None
    """Route the model as under LoRA of this rank on all linear layers."""
    out: Path | None = None
    """Also write the table to this JSON file."""

    def check_fields(self) -> None:
        if self.optim not in optimizer_names():
            self.refuse("optim", unknown(self.optim, optimizer_names()))
