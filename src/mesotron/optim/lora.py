"""LoRA factors of PEFT: W + B A, with B (out, rank) filtered and A (rank, in) auxiliary by default.

B starts at zero and carries the update's output side, so it takes its base weight's row cuts (heads, fused sections); A
takes the column cuts. Adapters on embeddings and DoRA's magnitudes are auxiliary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from mesotron.optim.reading import Reading, matrix
from mesotron.optim.sites import Site, is_a
from mesotron.optim.views import View


@dataclass(frozen=True)
class LoraFactor:
    """One adapter parameter: which factor, and the base weight it adapts (None for a bare parameter's wrapper)."""

    site: Site
    factor: str
    base_site: Site | None


def find_lora_factor(site: Site) -> LoraFactor | None:
    """The LoRA factor at `site`, or None."""
    for at in range(len(site.path), 0, -1):
        layer, below = site.modules[at], site.path[at:]
        if is_a(layer, "peft.tuners.lora.layer", "LoraLayer") and below:
            base = getattr(layer, "base_layer", None)
            return LoraFactor(site, below[0], _base_site(site, at, base))
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
    if kind not in ("lora_A", "lora_B"):
        return Reading(kind, "adapter of an embedding, or a magnitude")
    axis = "rows" if kind == "lora_B" else "cols"
    if factor.site.param.ndim > 2:
        return matrix(kind, "LoRA factor of a convolution", "conv")
    if base is None:
        return matrix(kind, "LoRA factor")
    if base.doubt:
        return replace(base, role=kind)
    view = View.parse(base.view)
    if view.axis != axis or view.layout != "matrix":
        return matrix(kind, f"LoRA factor of a {base.role} weight")
    return matrix(kind, f"LoRA factor: {base.reason}", str(replace(view, transposed=False)))
