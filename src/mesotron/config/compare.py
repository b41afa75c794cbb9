"""Configs of the tournament and of sweeps."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mesotron.config.fields import POSITIONAL


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Compare optimizers and objectives fairly: a search of the rate for each, then fresh seeds."""

    recipe: str = field(default="arith", metadata=POSITIONAL)
    """A recipe of mesotron train; snake for PPO; vla for a robot's policy (--set demos=FOLDER)."""

    optims: tuple[str, ...] = ()
    """Of adamw, muon, muon_sgd, muon_heads, pion, pion_cutoff and lowrank; all but the last if not
    given. Variants are written pion:promote=2.
    For snake of adam, muon and pion; for vla of adamw, muon, pion_action, pion and lowrank."""

    objectives: tuple[str, ...] = ()
    """Objectives to combine each optimizer with; the recipe's own if not given."""

    seeds: int = 3
    """Seeds that judge each contender at the rate its search has chosen."""

    search_seeds: int = 1
    """Seeds that search the rate; they judge nobody."""

    rates: int = 4
    """Rates that each contender's search tries."""

    factor: float = 2.0
    """Between two neighbouring rates."""

    extend: int = 2
    """Further rates for a contender whose best one is the smallest or the largest it tried."""

    set: tuple[str, ...] = ()
    """Settings of the recipe to change in every cell, such as steps=20 rollout.prompts=8."""

    seed: int = 0
    """The first seed: searches take it, and finals those that follow."""

    workers: int | None = None
    """Cells run at once; one for each GPU, or for each core without one, if not given."""

    threads: int = 1
    """CPU threads of a cell."""

    keep_weights: bool = False
    """Keep the checkpoints of finished cells."""

    out: Path | None = None
    """Folder of the tournament; runs/compare-RECIPE if not given. One that is there goes on."""


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Search a run's settings with Optuna, in the ranges of a W&B sweep file."""

    file: str = field(metadata=POSITIONAL)
    """A sweep file in W&B's form (YAML or JSON); or a recipe as in mesotron compare, with
    --space."""

    space: tuple[str, ...] = ()
    """Ranges of flags beside the file's: optim.lr=1e-5..1e-3 optim.name=muon,pion seed=0..9.
    Numbers above 0 and a decade or more apart are drawn in logarithm."""

    metric: str | None = None
    """What to make large or small; the file's, or the run's own score, if not given.
    A name in metrics.jsonl (the mean of the last tenth of its values) or in result.json."""

    goal: Literal["maximize", "minimize"] | None = None
    """Which; the file's, or maximize, if not given."""

    trials: int = 20
    """Trials of the whole study that have a score or were pruned, whoever ran them."""

    workers: int | None = None
    """Trials run at once; one for each GPU, or for each core without one, if not given."""

    threads: int = 1
    """CPU threads of a trial."""

    prune: bool = True
    """End a trial once the watch calls it dead."""

    every: float = 2.0
    """Seconds between two looks at the running trials."""

    study: str | None = None
    """Name of the study in its storage; the file's own name if not given."""

    storage: str | None = None
    """A database that several machines share, such as postgresql://...
    A file in --out, which several processes of one machine may share, if not given."""

    seed: int = 0
    """Seed of the sampler."""

    out: Path | None = None
    """Folder of the trials' runs; runs/sweep-NAME if not given. A study that is there goes on."""
