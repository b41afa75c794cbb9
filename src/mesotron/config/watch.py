"""Configs of the watch: what counts as a change, and the command that reads a log."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mesotron.config.fields import POSITIONAL

GuardName = Literal["off", "warn", "stop", "rollback"]
LogKind = Literal["auto", "run", "trainer_state", "jsonl", "csv", "tensorboard", "console"]


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """How long the watch looks before it speaks; the detectors' own rules are data elsewhere."""

    warmup: int = 10
    """Rows from which a run's own baseline is taken."""

    window: int = 5
    """Rows whose median is the present value; five times as many are looked at too."""

    patience: int = 3
    """Rows in a row that must show a failure before it is told."""

    noise: float = 4.0
    """A change must also be this many standard errors of the run's own noise."""


@dataclass(frozen=True, kw_only=True)
class RunWatchConfig:
    """The watch inside a training run."""

    tries: int = 3
    """With --guard rollback: how often a run is gone back before it is given up."""

    snr_every: int = 0
    """Measure the gradient's signal-to-noise ratio each so many steps; 0 never.
    It costs about one more backward pass, which is logged as time/snr."""


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Diagnose a run from its logs: what failed, when, why, and what to do about it."""

    path: Path = field(default=Path("runs/last"), metadata=POSITIONAL)
    """A run folder, trainer_state.json, JSONL, CSV, TensorBoard events, a console log,
    or a folder with one of these."""

    kind: LogKind = "auto"
    """How to read the path; found out from its name and first bytes if not given."""

    rename: tuple[str, ...] = ()
    """Names that the watch does not know, as in reward=my_score; the left side is ours."""

    follow: bool = False
    """Keep reading while the run writes; Ctrl-C ends it with the story so far."""

    every: float = 2.0
    """Seconds between two looks with --follow."""

    idle: float | None = None
    """With --follow, end after this many seconds without a new row."""

    check: bool = False
    """Exit with 1 if the run is dead, for scripts."""

    out: Path | None = None
    """Also write the story and its events to this JSON file."""

    settings: WatchSettings = WatchSettings()
