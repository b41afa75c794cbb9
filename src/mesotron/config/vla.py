"""Configs of vision-language-action runs: world, demonstrations, policy, training, evaluation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from mesotron.config.base import Config, setting
from mesotron.config.optim import PartsOptimConfig
from mesotron.config.types import Bounds, Count, Device, Natural, NonNegative, Seed

Perturbation = Literal["camera", "light", "noise", "position", "wording"]
PerturbationName = Literal["none", Perturbation]


@dataclass(frozen=True, kw_only=True)
class WorldConfig(Config, prefix="world."):
    """A simulated world, its observations, and which of its tasks to use."""

    name: str = setting("blocks", is_code=True)
    """blocks (two objects in view) and object10 (four to six of ten): put the named one into a bin.
    blocks_state and object10_state give the object's position instead of images.
    metaworld is the package of that name. MODULE:CLASS is a world of your own."""
    pixels: int = 24
    """Width and height of an image."""
    wrist: bool = False
    """Add a camera that looks down from the hand (our own worlds)."""
    tasks: tuple[str, ...] = ()
    """Tasks by name, such as red-cube or drawer-open (unset: all of the world, or MT10)."""
    perturbation: PerturbationName = "none"
    """What evaluation changes: camera pose, light, image noise, object positions or wording."""
    renderer: Literal["rays", "gl"] = "rays"
    """Cast rays, identical on every machine, or use OpenGL if available (metaworld)."""


@dataclass(frozen=True, kw_only=True)
class DemosConfig(Config):
    """Generate demonstrations with a world's scripted expert."""

    world: WorldConfig = WorldConfig()
    """The world, at the image size that the policy will see."""
    out: Path = Path("demos")
    """Folder of the demonstrations; existing ones are kept and the rest generated."""
    episodes: int = 300
    """Whole demonstrations, divided evenly among the tasks."""
    starts: int | None = None
    """Frames with the hand at a random place (unset: ten per episode in our worlds, else none)."""
    every: Count = 1
    """Record every N-th observation; where rendering is slow, more scenes teach more."""
    horizon: Count = 8
    """Actions recorded after each single frame; at least the policy's chunk."""
    noise: NonNegative = 0.15
    """Standard deviation of the noise added to the expert's moves; the clean ones are recorded."""
    seed: int = 0
    """First scene; scenes from 1,000,000 on are reserved for evaluation."""
    workers: Count | None = None
    """Simulation processes (unset: one per core)."""
    compact: bool = False
    """Store the simulator's state instead of images; --render makes the images elsewhere."""
    render: Path | None = None
    """Make --out from these compact demonstrations instead of simulating."""
    lerobot: Path | None = None
    """Also write the demonstrations to this folder as a LeRobotDataset v3.0."""

    def check_fields(self) -> None:
        if self.lerobot is not None and self.every > 1:
            self.refuse("every", "skips frames, and --lerobot writes whole episodes: drop one")
        if self.world.perturbation != "none":
            self.world.refuse("perturbation", "is for evaluation: train on the plain world")


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(Config, prefix="policy."):
    """The vision-language-action policy: its size, its head, and pretrained parts if any."""

    size: Literal["ci", "small", "base", "large"] = "small"
    """0.2, 5, 20 or 50 million weights."""
    head: Literal["l1", "flow"] = "l1"
    """Predict the actions, or the flow from noise to them."""
    chunk: Count = 8
    """Actions predicted at once."""
    patch: Count | None = None
    """Side of an image patch in pixels (unset: the size's own)."""
    vision_tower: str | None = None
    """Pretrained image model of Transformers: a folder or hub name (unset: from scratch)."""
    language_tower: str | None = None
    """The same for the instruction."""
    lora: Natural = 0
    """Rank of LoRA adapters on pretrained towers (0: train all their weights)."""
    freeze_towers: bool = False
    """Freeze pretrained towers."""

    def check_fields(self) -> None:
        has_tower = self.vision_tower is not None or self.language_tower is not None
        why = "needs --policy.vision-tower or --policy.language-tower"
        self.refuse_unless(has_tower, why, "lora", "freeze_towers")


@dataclass(frozen=True, kw_only=True)
class VlaTrainConfig(Config):
    """Train a vision-language-action policy on demonstrations by behavior cloning."""

    demos: Path = setting(Path("demos"), positional=True)
    """Demonstrations: a folder made by mesotron vla demos, or a LeRobotDataset."""
    pixels: Annotated[int, Bounds(ge=8)] = 128
    """Shrink larger images of a LeRobotDataset to this width and height: all are kept in memory."""
    policy: PolicyConfig = PolicyConfig()
    optim: PartsOptimConfig = PartsOptimConfig()

    steps: Count = setting(1500, on_resume=True)
    """Optimizer steps; with --resume, more of them train on."""
    batch: Annotated[int, Bounds(ge=4)] = 128
    """Frames per step."""
    where: NonNegative = 0.0
    """Weight of an auxiliary loss on the object's true position; results made with it say so."""
    seed: Seed = 0
    """Seed of the weights, the order of the frames and the noise."""
    out: Path | None = None
    """Run folder (unset: runs/vla-DATE)."""
    resume: Path | None = setting(None, on_resume=True)
    """Continue this run; only --guard, --workers, --device and --threads may change."""
    trust: bool = setting(False, on_resume=True)
    """Run the code that the demonstrations name as their world, MODULE:CLASS."""
    log_every: Count = 10
    """Log metrics every N steps."""
    probe_every: Natural = 100
    """Measure each part's gradient (effective rank, SNR) every N steps (0: never)."""
    save_every: Natural = 500
    """Save a checkpoint every N steps and at the end (0: only at the end)."""
    keep: Count = 2
    """Checkpoints to keep."""
    guard: Literal["off", "warn", "stop"] = setting("warn", on_resume=True)
    """What the watch does when the run fails: record it, also warn, or also stop."""
    episodes: Natural = 50
    """Episodes per task in the evaluation at the end (0: no evaluation)."""
    execute: Count | None = None
    """Actions of each chunk executed before observing again (unset: two thirds of the chunk)."""
    workers: Count | None = setting(None, on_resume=True)
    """Simulation processes in the evaluation (unset: one per core)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the products; weights are float32 (auto: bfloat16 on a GPU that has it)."""
    graph: bool | None = None
    """Replay a step as a CUDA graph (unset: if the model and the size of the images allow it)."""
    device: Device = setting("auto", on_resume=True)
    """Where to run (auto: CUDA if available)."""
    threads: Count | None = setting(None, on_resume=True)
    """CPU threads (unset: torch's choice)."""

    def check_fields(self) -> None:
        if (self.execute or 0) > self.policy.chunk:
            self.refuse("execute", f"exceeds the actions of a chunk, {self.policy.chunk}")


@dataclass(frozen=True, kw_only=True)
class VlaEvalConfig(Config):
    """Evaluate a policy in its world: success by task, also with wrong instructions."""

    run: Path = setting(Path("runs/last"), positional=True)
    """A run of mesotron vla train, or one of its checkpoints."""
    world: str | None = setting(None, is_code=True)
    """World, as in mesotron vla demos (unset: the demonstrations'; required after recordings)."""
    trust: bool = False
    """Run the code that the checkpoint names as its world, MODULE:CLASS."""
    episodes: Count = 50
    """Episodes per task."""
    execute: Count | None = None
    """Actions of each chunk executed before observing again (unset: the run's own)."""
    controls: bool = True
    """Also run the policy with a wrong instruction, and the expert."""
    perturb: tuple[Perturbation, ...] = ()
    """Also evaluate under these changes, one column each."""
    validation: bool = False
    """Use the scenes reserved for choosing settings instead of those for the final number."""
    gifs: Natural = 0
    """Record this many episodes per task beside the result."""
    workers: Count | None = None
    """Simulation processes (unset: one per core)."""
    out: Path | None = None
    """Folder of the result (unset: RUN/eval)."""
    device: Device = "auto"
    """Where the policy runs (auto: CUDA if available)."""
    threads: Count | None = None
    """CPU threads of the policy (unset: torch's choice)."""
