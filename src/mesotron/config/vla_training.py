"""Configs of `mesotron vla train` and `vla eval`: the policy, who optimizes what, the run."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mesotron.config.fields import ANEW, POSITIONAL
from mesotron.config.vla import Perturbation

PartRule = Literal["muon", "pion", "low_rank", "adamw"]


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The vision-language-action policy: its size, its head, and pretrained parts if any."""

    size: Literal["ci", "small", "base", "large"] = "small"
    """0.2, 5, 20 or 50 million weights."""

    head: Literal["l1", "flow"] = "l1"
    """Predict the actions, or the flow that carries noise to them."""

    chunk: int = 8
    """Actions predicted at once."""

    patch: int | None = None
    """Side of an image patch in pixels; the size's own if not given."""

    flow_steps: int = 5
    """Euler steps from noise to actions, when acting with the flow head."""

    vision_tower: str | None = None
    """A pretrained image model of Transformers, a folder or a name on the hub; trained from
    scratch if not given."""

    language_tower: str | None = None
    """The same for the instruction."""

    lora: int = 0
    """Rank of LoRA adapters on pretrained towers; 0 trains all their weights."""

    lora_alpha: float = 32.0
    """LoRA's scale: the update is multiplied by alpha / rank."""

    freeze_towers: bool = False
    """Leave pretrained towers as they are."""


@dataclass(frozen=True, kw_only=True)
class PartsOptimConfig:
    """One optimizer, a rule for the matrices of each part; all else is AdamW's."""

    vision: PartRule = "muon"
    """Rule of the image encoder's matrices."""

    language: PartRule = "muon"
    """Rule of the instruction encoder's matrices."""

    fusion: PartRule = "muon"
    """Rule of the matrices where images, words and the robot's state meet."""

    action: PartRule = "muon"
    """Rule of the action module's matrices; the Pion paper's recipe has pion here."""

    lr: float = 2.5e-3
    """Learning rate of matrices in AdamW's unit, whatever the rule. AdamW itself wants about a
    tenth of it; the ci size, trained for a few hundred steps, four times it."""

    action_scale: float = 1.0
    """Factor on the rate of the action module's matrices: Pion passes a few directions, so that its
    step is several times smaller than Muon's at the same rate. Making it as large did harm with
    the l1 head, and nothing for the flow head."""

    aux_lr: float | None = 1e-3
    """Rate of embeddings, positions, norms, biases and the output layer; matrices that AdamW has
    keep --optim.lr. A small policy from scratch learns faster with 3e-3."""

    promote: int | None = None
    """Pion's promotion steps k_p."""

    cutoff: float | Literal["aligned", "noise"] | None = None
    """Pion's continuous strength: a fraction of the largest singular value, aligned or noise; noise
    if neither this nor --optim.promote is given."""

    rank: int = 8
    """Directions that low_rank keeps."""

    momentum: float = 0.95
    """Momentum of the spectral rules."""

    weight_decay: float = 0.01
    """Decoupled weight decay."""

    scale: float | Literal["rms", "moonlight", "spectral"] = "rms"
    """Unit of the step, or a factor of one's own; see docs/optimizers.md."""

    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """How the rate goes after the warm-up: stays, or falls to 0 at the last step."""

    warmup: float = 0.0
    """Share of the steps over which the rate rises from 0."""

    max_grad_norm: float = 1.0
    """Clip the gradient of the auxiliary groups and log the norm of all; 0 does not clip."""


@dataclass(frozen=True, kw_only=True)
class VlaTrainConfig:
    """Train a vision-language-action policy on demonstrations, by behaviour cloning."""

    demos: Path = field(default=Path("demos"), metadata=POSITIONAL)
    """Demonstrations: a folder that mesotron vla demos made, or a LeRobotDataset."""

    pixels: int = 128
    """Images of a LeRobotDataset that are larger are shrunk to this width and height: they are all
    kept in memory. Demonstrations of mesotron vla demos have their size already."""

    policy: PolicyConfig = PolicyConfig()
    optim: PartsOptimConfig = PartsOptimConfig()

    steps: int = 1500
    """Optimizer steps."""

    batch: int = 128
    """Frames in one step."""

    where: float = 0.0
    """Weight of an auxiliary loss that asks where the named object is, told by the simulator in
    training alone; every number made with it says so."""

    seed: int = 0
    """Seed of the weights, the order of the frames and the noise."""

    out: Path | None = None
    """Folder of the run; runs/vla-DATE if not given."""

    resume: Path | None = field(default=None, metadata=ANEW)
    """Continue the run in this folder from its newest whole checkpoint, with its own settings.
    Only --guard, --workers, --device and --threads may change."""

    log_every: int = 10
    """A row of metrics each so many steps."""

    probe_every: int = 100
    """Effective rank and signal-to-noise ratio of each part's gradient each so many steps; 0 never
    measures them."""

    save_every: int = 500
    """A checkpoint each so many steps, and one at the end; 0 keeps the last alone."""

    keep: int = 2
    """Checkpoints kept."""

    guard: Literal["off", "warn", "stop"] = field(default="warn", metadata=ANEW)
    """What the watch does when it sees the run fail: write it down, also say so, or also stop."""

    episodes: int = 50
    """Episodes of each task in the evaluation at the end; 0 leaves it out."""

    execute: int | None = None
    """Actions of each chunk carried out before looking again; two thirds of the chunk if not
    given."""

    workers: int | None = field(default=None, metadata=ANEW)
    """Processes that simulate in the evaluation; as many as there are processors if not given."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the products; auto is bfloat16 on a GPU that has it. Weights are float32."""

    compile: bool = False
    """Compile the policy: faster steps after a minute or so."""

    graph: bool | None = None
    """On a GPU, record a step once as a CUDA graph and replay it; by itself where nothing speaks
    against it (a pretrained tower, low_rank, images that do not fit on the GPU)."""

    device: Literal["auto", "cpu", "cuda"] = field(default="auto", metadata=ANEW)
    """Where to run; auto takes CUDA if there is one."""

    threads: int | None = field(default=None, metadata=ANEW)
    """CPU threads; torch's own choice if not given."""


@dataclass(frozen=True, kw_only=True)
class VlaEvalConfig:
    """Measure a policy in its world: success by task, beside a wrong instruction and the expert."""

    run: Path = field(default=Path("runs/last"), metadata=POSITIONAL)
    """A run of mesotron vla train, or one of its checkpoints."""

    world: str | None = None
    """Play in this world, a name as in --world.name of mesotron vla demos, instead of that of the
    demonstrations; a policy trained on recordings knows none."""

    episodes: int = 50
    """Episodes of each task."""

    execute: int | None = None
    """Actions of each chunk carried out before looking again; the run's own if not given."""

    controls: bool = True
    """Also tell the policy a wrong instruction, and let the expert play."""

    perturb: tuple[Perturbation, ...] = ()
    """Also evaluate with these changed against training, one column each."""

    validation: bool = False
    """Use the scenes for choosing settings instead of those for the final number."""

    gifs: int = 0
    """Record this many episodes of each task beside the result."""

    workers: int | None = None
    """Processes that simulate; as many as there are processors if not given."""

    out: Path | None = None
    """Folder of the result; RUN/eval if not given."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy runs; auto takes CUDA if there is one."""

    threads: int | None = None
    """CPU threads of the policy; torch's own choice if not given."""
