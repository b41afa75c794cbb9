"""Configs of the commands that look at filters and routing."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mesotron.config.fields import POSITIONAL, OptimizerName


@dataclass(frozen=True, kw_only=True)
class SpectrumConfig:
    """Show what a filter does to singular values in [0, 1]."""

    filters: tuple[str, ...] = field(
        default=("muon", "cubic", "polar_express", "pion"), metadata=POSITIONAL
    )
    """Filters to show, by name."""

    promote: tuple[int, ...] = ()
    """Pion's promotion steps k_p, one curve for each."""

    cutoff: tuple[float | Literal["aligned", "noise"], ...] = ()
    """Pion's continuous strengths, one curve for each: fractions of the largest singular value.
    The word noise stands for the edge that pure noise of --shape would reach, aligned for 0.414.
    Without --promote and --cutoff Pion is shown with promote 0 and 2 and with the noise cutoff."""

    shape: tuple[int, int] = (1024, 4096)
    """Rows and columns of the matrix, for the noise edge and the FLOPs."""

    steps: int | None = None
    """Steps of each filter (of a cutoff: its suppression steps); each filter's own if not given."""

    axis: Literal["log", "linear"] = "log"
    """Axis of sigma in the plots."""

    plot: Path | None = None
    """Also draw the curves into this file (.png, .svg or .pdf)."""

    out: Path | None = None
    """Also write the numbers to this JSON file."""


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

    out: Path | None = None
    """Also write the table to this JSON file."""
