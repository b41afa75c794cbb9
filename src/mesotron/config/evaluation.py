"""Config of an evaluation: what is measured, on which problems, and how it samples."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mesotron.config.fields import POSITIONAL
from mesotron.config.training import TaskConfig


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Measure a model: greedy and sampled, strict and lenient, side by side."""

    model: str = field(default="runs/last", metadata=POSITIONAL)
    """A run folder, a checkpoint, a model folder, or a model's name."""

    against: str | None = None
    """Another one to compare with on the same problems; a run's own start if not given."""

    task: TaskConfig = field(default=TaskConfig())

    samples: int = 8
    """Sampled completions of each problem; 0 is greedy alone."""

    temperature: float = 1.0
    """Sampling temperature."""

    max_tokens: int = 256
    """Longest completion."""

    batch: int | None = None
    """Completions generated at once; by the memory there is if not given."""

    seed: int = 0
    """Seed of the samples and of the intervals."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes CUDA if there is one."""

    threads: int | None = None
    """CPU threads; torch's own choice if not given."""

    out: Path | None = None
    """Also write the result to this JSON file."""
