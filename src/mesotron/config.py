"""Every config of the command line, as frozen dataclasses; the standard library only.

The string under a field is its help text, and its lines stay lines: break between sentences. A
field marked POSITIONAL may be given without its flag.
Names that live in a registry (filters, models) are checked by the registry's owner, not here.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

OptimizerName = Literal["muon", "pion", "muon_sgd", "adamw"]

POSITIONAL = {"positional": True}


@dataclass(frozen=True, kw_only=True)
class SpectrumConfig:
    """Show what a filter does to singular values in [0, 1]."""

    filters: tuple[str, ...] = field(
        default=("muon", "cubic", "polar_express", "pion"), metadata=POSITIONAL
    )
    """Filters to show, by name."""

    promote: tuple[int, ...] = ()
    """Pion's promotion steps k_p, one curve for each."""

    cutoff: tuple[float | Literal["noise"], ...] = ()
    """Pion's continuous strengths, one curve for each: fractions of the largest singular value.
    The word noise stands for the edge that pure noise of --shape would reach.
    Without --promote and --cutoff Pion is shown with promote 0 and 2 and with the noise cutoff."""

    shape: tuple[int, int] = (1024, 4096)
    """Rows and columns of the matrix, for the noise edge and the FLOPs."""

    steps: int | None = None
    """Steps of each filter (of a cutoff: its suppression steps); each filter's own if not given."""

    axis: Literal["log", "linear"] = "log"
    """Axis of sigma in the plots."""

    plot: Path | None = None
    """Also draw the curves into this file (.png, .svg or .pdf)."""

    json: Path | None = None
    """Also write the numbers to this file."""


@dataclass(frozen=True, kw_only=True)
class RouteConfig:
    """Show which rule each parameter of a model gets, without loading weights."""

    model: str = field(metadata=POSITIONAL)
    """A model folder, a config.json, or a name on the hub."""

    optim: OptimizerName = "muon"
    """The optimizer that routes."""

    per_head: bool = False
    """Filter attention projections head by head."""

    override: tuple[str, ...] = ()
    """PATTERN=RULE pairs that win over the roles found, such as '*.action_head.*=pion'."""

    lora: int | None = None
    """Route the model as it is under LoRA of this rank, on all linear layers."""

    json: Path | None = None
    """Also write the table to this file."""


@dataclass(frozen=True, kw_only=True)
class BenchOptimConfig:
    """Time the optimizer's whole step against its peers, as ratios in one run."""

    models: tuple[str, ...] = field(default=("micro_192x576", "gpt2_124m"), metadata=POSITIONAL)
    """Models whose matrix shapes are stepped, by name; weights are never loaded."""

    optimizers: tuple[str, ...] = ()
    """Optimizers to time; every one that is installed if not given."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes CUDA if there is one."""

    repeats: int = 5
    """Timed steps of each optimizer; the median is reported."""

    layers: int | None = None
    """Step only this many layers. If not given: all on CUDA, about two seconds' worth on a CPU."""

    embeddings: bool = False
    """Also step the embedding, by each optimizer's auxiliary rule."""

    buckets: bool = False
    """Also time our Muon on each matrix shape alone."""

    stats_cost: bool = False
    """Also measure what the statistics of a step cost."""

    accuracy: bool = True
    """Also compare every update with the float64 SVD."""

    threads: int | None = None
    """CPU threads; torch's own choice if not given."""

    out: Path | None = None
    """Also write the result to this JSON file."""


@dataclass(frozen=True, kw_only=True)
class BenchTrainConfig:
    """Train a small language model with each optimizer, over learning rates and seeds."""

    optimizers: tuple[str, ...] = field(default=(), metadata=POSITIONAL)
    """Optimizers to compare, by name. If not given: all of them, or four with --quick."""

    lrs: tuple[float, ...] = ()
    """Learning rates to sweep for each optimizer; extended where the best one is at an edge.
    If not given: 0.002 0.004 0.008 0.016 0.032, or 0.002 0.016 with --quick."""

    aux_lr: float = 4e-3
    """AdamW's rate for embeddings, head and norms beside Muon and Pion."""

    aux_sgd_lrs: tuple[float, ...] = ()
    """SGD's rates for the same parameters in muon_sgd, swept as well.
    If not given: 0.1 0.3 1, or 0.3 with --quick."""

    seeds: tuple[int, ...] = ()
    """Seeds; the first searches the rates, all of them judge the best one and its neighbours.
    If not given: 0 1 2, or 0 with --quick."""

    steps: int | None = None
    """Optimizer steps of each run. If not given: 120, or 50 with --quick."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes CUDA if there is one."""

    threads: int | None = None
    """CPU threads; torch's own choice if not given."""

    quick: bool = False
    """A minute's run to look at, not to cite: fewer optimizers, steps, rates and seeds."""

    out: Path | None = None
    """Also write the result to this JSON file.
    A sweep that was stopped continues from the .runs.jsonl beside it."""

    plot: Path | None = None
    """Also draw rates and curves into this file (.png, .svg or .pdf)."""
