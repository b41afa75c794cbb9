"""LoRA factors of PEFT: W + B A, with B (out, rank) filtered and A (rank, in) auxiliary by default.

B starts at zero and carries the update's output side, so it takes its base weight's row cuts
(heads, fused sections); A takes the column cuts. Adapters on embeddings and DoRA's magnitudes are
auxiliary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from mesotron.optim.routing.reading import Reading, matrix
from mesotron.optim.routing.sites import Site, is_a
from mesotron.optim.views import View


@dataclass(frozen=True)
class LoraFactor:
    """One adapter parameter: which factor, the weight it adapts (None: a bare parameter), and how
    many experts."""

    site: Site
    factor: str
    base_site: Site | None
    num_experts: int


def find_lora_factor(site: Site) -> LoraFactor | None:
    """The LoRA factor at `site`, or None."""
    for at in range(len(site.path), 0, -1):
        layer, below = site.modules[at], site.path[at:]
        if is_a(layer, "peft.tuners.lora.layer", "LoraLayer") and below:
            base = getattr(layer, "base_layer", None)
            stacked = is_a(layer, "peft.tuners.lora.layer", "ParamWrapper")
            experts = getattr(layer, "num_experts", 1) if stacked else 1
            return LoraFactor(site, below[0], _base_site(site, at, base), experts)
    return None


def _base_site(site: Site, at: int, base: object) -> Site | None:
    weight = getattr(base, "weight", None)
    if not isinstance(base, nn.Module) or not isinstance(weight, nn.Parameter):
        return None
    modules = (*site.modules[:at], base)
    return Site(site.name, "weight", weight, base, site.path[:at], modules)


def read_lora(factor: LoraFactor, base: Reading | None) -> Reading:
    """Read an adapter parameter; `base` is the reading of the weight it adapts."""
    kind = factor.factor
    if kind == "lora_magnitude_vector":
        return Reading(kind, "DoRA magnitudes, one per output")
    if kind not in ("lora_A", "lora_B"):
        return Reading(kind, "adapter of an embedding")
    if factor.num_experts > 1:
        return _read_stacked(factor)
    axis = "rows" if kind == "lora_B" else "cols"
    if factor.site.param.ndim > 2:
        return matrix(kind, "LoRA factor of a convolution", "conv")
    if base is None:
        return matrix(kind, "LoRA factor")
    if base.doubt:
        return replace(base, role=kind)
    view = View.parse(base.view)
    if view.axis != axis or view.layout != "matrix":
        return matrix(kind, f"LoRA factor beside {base.role}")
    reason = f"LoRA factor beside {base.role}: {base.reason}"
    return matrix(kind, reason, str(replace(view, transposed=False)))


def _read_stacked(factor: LoraFactor) -> Reading:
    """PEFT's adapter of an expert stack: A is (experts, rank, in) by rows, B is (out, rank,
    experts) by columns."""
    experts = factor.num_experts
    if factor.factor == "lora_A":
        return matrix("lora_A", f"LoRA factors of {experts} experts", f"rows:{experts}")
    rank = factor.site.param.shape[1] // experts
    return matrix("lora_B", f"LoRA factors of {experts} experts", f"cols:{rank}%{experts}")
