"""Stacked experts: one parameter that holds a matrix per expert, in the storage orders that
Transformers uses."""

from __future__ import annotations

from torch import nn

from mesotron.optim.routing.reading import Reading, doubt, matrix
from mesotron.optim.routing.sites import Site, find_int

_COUNTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
)
_FUSED_PAIRS = ("gate_up_proj", "gate_and_up_proj", "w13", "input_linear")


def num_experts(site: Site) -> int | None:
    """How many experts the owner, its parent, its config or the `experts` list beside it speaks
    of."""
    told = find_int((site.owner, site.parent, site.config), _COUNTS)
    if told is not None:
        return told
    beside = site.parent._modules.get("experts")
    return len(beside) if isinstance(beside, nn.ModuleList) else None


def read_experts(site: Site) -> Reading | None:
    """A 3-D stack (experts, out, in) or (experts, in, out); None if the parameter is not one."""
    if type(site.owner).__name__ == "DbrxExpertGLU":
        return _read_dbrx(site)
    if site.param.ndim != 3 or "Expert" not in type(site.owner).__name__:
        return None
    transposed = _stored_transposed(site)
    if transposed is None:
        return doubt(
            f"{site.name} is an expert stack of shape {tuple(site.param.shape)} that may be "
            "(experts, out, in) or (experts, in, out); write "
            f"overrides={{'{site.name}': {{'view': 'stack'}}}} or "
            f"{{'view': 'stack/T'}}"
        )
    view = "stack/T" if transposed else "stack"
    rows = site.param.shape[2 if transposed else 1]
    if site.leaf not in _FUSED_PAIRS and site.called not in _FUSED_PAIRS:
        return matrix("expert", f"{site.param.shape[0]} experts", view)
    if getattr(site.owner, "is_concatenated", True):
        return matrix("expert", f"{site.param.shape[0]} experts, gate | up", f"{view}/rows:2")
    alternating = f"{view}/rows:{rows // 2}%2"
    return matrix("expert", f"{site.param.shape[0]} experts, gate and up alternating", alternating)


def _stored_transposed(site: Site) -> bool | None:
    """Whether the stack is (experts, in, out): by Transformers' own mark, else by where the hidden
    width lies."""
    mark = getattr(site.owner, "is_transposed", None)
    if isinstance(mark, bool):
        return mark
    _, second, third = site.param.shape
    if "Parallel" in type(site.owner).__name__:  # JetMoe: documented as (experts, out, in)
        return False
    width = find_int((site.config,), ("hidden_size",))
    if second == third or width not in (second, third):
        return None
    reads_hidden = "down" not in site.leaf and site.leaf != "w2"
    return (second == width) == reads_hidden


def _read_dbrx(site: Site) -> Reading:
    """DBRX lays its experts one below the other in a 2-D weight; w2 is stored (in, out)."""
    count = num_experts(site)
    view = f"T/cols:{count}" if site.leaf == "w2" else f"rows:{count}"
    return matrix("expert", f"{count} experts, one below the other", view)
