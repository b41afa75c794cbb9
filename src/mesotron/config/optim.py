"""Configs of the optimizers: one for language models, one with a rule for each part of a policy."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mesotron.config.base import Config, setting
from mesotron.config.registry import unknown
from mesotron.config.rules import optimizer_names
from mesotron.config.types import (
    Count,
    Cutoff,
    Fraction,
    NonNegative,
    Positive,
    Promotion,
    Scale,
    Schedule,
)

if TYPE_CHECKING:
    OptimizerName = str
else:
    # The choices that the help shows; there may be more by the time a config is made.
    OptimizerName = Literal[optimizer_names()] | str

LoraRule = Literal["B", "A", "both", "product", "none"]
PartRule = Literal["muon", "pion", "low_rank", "adamw"]


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Config, prefix="optim."):
    """The optimizer and its step size."""

    name: OptimizerName = setting("muon", flag="optim")
    """The rule of hidden matrices; adamw takes them too."""
    lr: NonNegative = setting(1e-5, flag="lr")
    """Learning rate in AdamW's unit, whatever the optimizer."""
    aux_lr: NonNegative | None = None
    """Rate of the auxiliary rule for embeddings, norms and heads (unset: lr, or 1e-3 for SGD)."""
    per_head: bool = False
    """Filter attention projections head by head."""
    promote: Promotion | None = None
    """Pion's promotion steps k_p."""
    cutoff: Cutoff | None = None
    """Pion's strength: a fraction of the largest singular value, aligned (0.414) or noise."""
    rank: Count | None = None
    """Low-rank Muon: keep this many directions of each block, by an exact SVD (slow)."""
    momentum: Fraction = 0.95
    """Momentum of the spectral rules."""
    lora: LoraRule = "B"
    """With --lora: the factors that the filter applies to; product updates B A as one matrix."""
    leash: Positive | None = None
    """Keep each matrix within this share of its starting spectral norm; replaces weight decay."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    scale: Scale = "rms"
    """Unit of the step, or a factor; see docs/learning_rate.md."""
    schedule: Schedule = "constant"
    """Learning rate schedule after the warm-up."""
    warmup: Fraction = 0.0
    """Fraction of the steps over which the rate rises from 0."""
    max_grad_norm: NonNegative = 1.0
    """Clip the gradient of the auxiliary groups to this norm (0: off). The whole norm is logged."""
    clip: Literal["auxiliary", "all"] = "auxiliary"
    """Which gradients to clip; all also clips the matrices, by their own norm."""
    fused: bool | None = None
    """Use our GPU kernels for spectral steps. They compile for up to 13 s once per machine (unset:
    in mesotron train from 100 steps on)."""

    def check_fields(self) -> None:
        if self.name not in optimizer_names():
            self.refuse("name", unknown(self.name, optimizer_names()))

        is_muon = self.name.startswith("muon")
        self.refuse_unless(self.name == "pion", "needs --optim pion", "promote", "cutoff")
        self.refuse_unless(is_muon, "needs --optim muon", "rank")
        spectral = self.name != "adamw"
        self.refuse_unless(spectral, "needs a spectral rule, such as --optim muon", "leash")

        if self.lora == "product" and self.name in ("adamw", "normuon"):
            self.refuse("lora", f"needs --optim muon or pion, not {self.name}")

        if self.promote and self.cutoff is not None:
            self.refuse("promote", "and --optim.cutoff are two strengths of Pion: give one")

        if self.clip == "all" and not self.max_grad_norm:
            self.refuse("clip", "needs --optim.max-grad-norm above 0; auxiliary does not")


@dataclass(frozen=True, kw_only=True)
class PartsOptimConfig(Config, prefix="optim."):
    """One rule for the matrices of each part; everything else is trained by AdamW."""

    vision: PartRule = "muon"
    """Rule for the matrices of the image encoder."""
    language: PartRule = "muon"
    """Rule for the matrices of the instruction encoder."""
    fusion: PartRule = "muon"
    """Rule for the matrices where images, text and robot state meet."""
    action: PartRule = "muon"
    """Rule for the matrices of the action module; the Pion paper uses pion here."""
    lr: NonNegative = setting(2.5e-3, flag="lr")
    """Learning rate of matrices in AdamW's unit (adamw: use a tenth; the ci size: four times)."""
    action_scale: NonNegative = 1.0
    """Factor on the rate of the action module's matrices."""
    aux_lr: NonNegative | None = 1e-3
    """Rate of embeddings, norms, biases and the output layer; from scratch 3e-3 learns faster."""
    promote: Promotion | None = None
    """Pion's promotion steps k_p."""
    cutoff: Cutoff | None = None
    """Pion's strength: a fraction, aligned or noise (unset, without --optim.promote: noise)."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay."""
    schedule: Schedule = "linear"
    """Learning rate schedule after the warm-up; linear and cosine fall to 0 at the last step."""
    warmup: Fraction = 0.0
    """Fraction of the steps over which the rate rises from 0."""

    def check_fields(self) -> None:
        has_pion = "pion" in (self.vision, self.language, self.fusion, self.action)
        why = "needs a part trained by Pion, such as --optim.action pion"
        self.refuse_unless(has_pion, why, "promote", "cutoff")
