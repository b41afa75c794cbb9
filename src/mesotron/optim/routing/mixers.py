"""Mixers: the fused input projections of state-space and linear-attention layers.

They pack queries, keys, values, gates and time steps into one weight. The layouts are those of
Transformers' forward passes; sizes come from the mixer's own attributes, and a layout that does not
add up is left whole, with that reason.
"""

from __future__ import annotations

from torch import nn

from mesotron.optim.routing.reading import Reading, matrix
from mesotron.optim.routing.sites import Site


def read_mixer(site: Site, rows: int) -> Reading | None:
    """Read a mixer's projection, or None if the weight is not in one."""
    mixer, kind = site.parent, type(site.parent).__name__
    if kind.endswith("GatedDeltaNet"):
        cut = _delta_net(mixer, site.called)
    elif kind.endswith("ShortConv"):
        cut = "3" if site.called == "in_proj" else ""
    elif kind.endswith("Mixer") and "A_log" in mixer._parameters:
        cut = _state_space(mixer, site.called)
    else:
        return None
    if not cut:
        return matrix("mixer", f"{site.called} of {kind}")
    if not cut.isdigit() and (_total(cut) != rows or "+0" in cut):
        return matrix("mixer", f"fused inputs of {kind}, of unknown layout: filtered whole")
    return matrix("mixer", f"fused inputs of {kind}, cut by part", f"rows:{cut}")


def _delta_net(mixer: nn.Module, called: str) -> str:
    """Gated delta nets (Qwen3-Next, Qwen3.5): sections, or the same parts repeated for every key
    head."""
    groups, values = _int(mixer, "num_k_heads"), _int(mixer, "num_v_heads")
    key, ratio = _int(mixer, "head_k_dim"), values // max(groups, 1)
    value = _int(mixer, "head_v_dim") * ratio
    return {
        "in_proj_qkvz": f"{groups}%{key}+{key}+{value}+{value}",
        "in_proj_ba": f"{groups}%{ratio}+{ratio}",
        "in_proj_qkv": f"{groups * key}+{groups * key}+{groups * value}",
    }.get(called, "")


def _state_space(mixer: nn.Module, called: str) -> str:
    """Mamba: hidden | gate, then time step | B | C. Mamba-2: gate | hidden | B | C | time step, all
    in one."""
    inner, state = _int(mixer, "intermediate_size"), _int(mixer, "ssm_state_size")
    if "x_proj" in mixer._modules:
        return {"in_proj": "2", "x_proj": f"{_int(mixer, 'time_step_rank')}+{state}+{state}"}.get(
            called, ""
        )
    shared = _int(mixer, "n_groups") * state
    heads = _int(mixer, "num_heads")
    return f"{inner}+{inner}+{shared}+{shared}+{heads}" if called == "in_proj" else ""


def _int(module: nn.Module, name: str) -> int:
    value = getattr(module, name, 0)
    return value if isinstance(value, int) else 0


def _total(cut: str) -> int:
    groups, _, sizes = cut.rpartition("%")
    return int(groups or 1) * sum(map(int, sizes.split("+")))
