"""Configs of the tournament and of sweeps."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mesotron.config.fields import POSITIONAL


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Compare optimizers and objectives fairly: a search of the rate for each, then fresh seeds."""

    recipe: str = field(default="arith", metadata=POSITIONAL)
    """A recipe of mesotron train, snake for PPO, or vla for a robot's policy, with
    --set demos=FOLDER."""

    optims: tuple[str, ...] = ()
    """Who takes part, of adamw, muon, muon_sgd, muon_heads, pion, pion_cutoff and lowrank, or
    variants such as pion:promote=2; all but lowrank if not given. For snake of adam, muon and
    pion; for vla of adamw, muon, pion_action, pion and lowrank."""

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
    """Folder of the tournament, runs/compare-RECIPE if not given; one that is there is
    continued."""


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Search a run's settings with Optuna, in the ranges of a W&B sweep file."""

    file: str = field(metadata=POSITIONAL)
    """A sweep file in W&B's form (YAML or JSON), or a recipe's name with --space."""

    space: tuple[str, ...] = ()
    """Ranges of flags, in place of or beside the file's: optim.lr=1e-5..1e-3 (both ends above 0
    and a decade or more apart: in logarithm), rollout.updates=1..4, optim.name=muon,pion."""

    metric: str | None = None
    """What to make large or small: a name in metrics.jsonl (the mean of the last tenth of the
    rows) or in result.json; the file's, or the score that mesotron compare takes, if not given."""

    goal: Literal["maximize", "minimize"] | None = None
    """Which; the file's, or maximize, if not given."""

    trials: int = 20
    """Trials of the whole study that end with a score or are pruned; those of other workers
    count."""

    workers: int | None = None
    """Trials run at once by this process; one for each GPU, or for each core without one, if not
    given."""

    threads: int = 1
    """CPU threads of a trial."""

    prune: bool = True
    """End a trial once the watch calls it dead."""

    every: float = 2.0
    """Seconds between two looks at the running trials."""

    study: str | None = None
    """Name of the study in its storage; the file's own name if not given."""

    storage: str | None = None
    """A database that several machines share, such as postgresql://...; a file in --out if not
    given, which several processes of one machine may share."""

    seed: int = 0
    """Seed of the sampler."""

    out: Path | None = None
    """Folder of the trials' runs, runs/sweep-NAME if not given; a study that is there is
    continued."""
