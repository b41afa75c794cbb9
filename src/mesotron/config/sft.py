"""Config of a warm start: a run's model, task and optimizer, with solved problems."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mesotron.config.budget import GpuName
from mesotron.config.fields import ANEW
from mesotron.config.training import ModelConfig, OptimConfig, TaskConfig


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Warm-start a language model on solved problems, by supervised training."""

    model: ModelConfig = field(default=ModelConfig())
    task: TaskConfig = field(default=TaskConfig())
    optim: OptimConfig = field(default=OptimConfig(lr=3e-4, schedule="cosine", warmup=0.03))

    steps: int = 200
    """Optimizer steps."""

    batch: int = 32
    """Solved problems in one step."""

    max_tokens: int = 512
    """Longest prompt and solution together."""

    loose: float = 0.0
    """Share of the solved problems whose answer is written outside the format, as a model that
    never learned it would."""

    seed: int = 0
    """Seed of everything that is drawn in training."""

    out: Path | None = None
    """Folder of the run; runs/sft-DATE if not given."""

    resume: Path | None = field(default=None, metadata=ANEW)
    """Continue the run in this folder from its newest whole checkpoint, with its own settings.
    Only limits (--budget, --price, --gpu, --time-limit), --device and --threads may change."""

    save_every: int = 100
    """A checkpoint each so many steps, and one at the end; 0 keeps the last alone."""

    keep: int = 2
    """Checkpoints kept."""

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
