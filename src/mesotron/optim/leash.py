"""The leash: matrices decay toward their starting weights W0 instead of toward zero.

    W <- W - lr scale f(U);  W <- W - s / (s + r) (W - W0),   s = lr scale F_MAX, r = leash ||W0||_2

A filtered step has a spectral norm of at most s, so by induction no filtered block moves further
than (r + s) r / (s + r) = r from its start, at any rate. A rule that changes the filtered direction
(NorMuon) has no such s in advance: each step's own norm is bounded instead, by two more products. A
LoRA product needs no copy of W0: its decay is the leash (`mesotron.optim.lora`).
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mesotron.optim.device import round_stochastically, rounding_seed
from mesotron.optim.finite import gradients_finite, on_host
from mesotron.optim.lora import product_distances
from mesotron.optim.norms import F_MAX, spectral_norm
from mesotron.optim.registry import Group, State
from mesotron.optim.state import ParamStep, local_part, whole
from mesotron.optim.views import View
from mesotron.spectral.scale import step_scale


def keep_start(state: State, p: Tensor, group: Group) -> None:
    """Remember a parameter's weights and their norm before its first step."""
    if group["leash"] is None or "start" in state:
        return

    state["start"] = p.detach().clone()
    state["start_norm"] = spectral_norm(whole(p), group["view"])


def pull_to_start(steps: list[ParamStep], bounds: Mapping[int, Tensor]) -> None:
    """After a step, pull parameters with a finite gradient toward their start; `bounds` are from
    `filter_and_apply`."""
    if not steps:
        return

    finite = gradients_finite([step.grad for step in steps])
    for step, ok in zip(steps, finite, strict=True):
        seed = rounding_seed(step.group["step"], step.number, 2**31)
        mask = None if on_host(ok) else ok
        if mask is not None or ok:
            bound = bounds.get(step.number)
            pull(step.param, step.state, step.group, mask, seed, bound)


def pull(
    W: Tensor,
    state: State,
    group: Group,
    finite: Tensor | None,
    seed: int,
    bound: Tensor | None = None,
) -> None:
    """Move (a shard of) a parameter toward its start, where its gradient is finite; weights that
    started at zero have no leash. `bound`, on the spectral norm of the step, is the filter's unless
    it is given."""
    W0 = local_part(state["start"])
    norm = state["start_norm"]

    step = bound
    if step is None:
        step = group["lr"] * _largest_scale(group, state["start"].shape) * F_MAX

    share = torch.where(norm > 0, step / (step + group["leash"] * norm), 0.0)
    if finite is not None:
        share = share * finite

    if W.dtype == torch.bfloat16:
        pulled = W.float().lerp(W0.float(), share.float())
        round_stochastically(pulled, W, seed)
    else:
        W.lerp_(W0.to(W.dtype), share.to(W.dtype))


def _largest_scale(group: Group, shape: torch.Size) -> float:
    windows = View.parse(group["view"]).windows(torch.empty(shape, device="meta"))
    return max(step_scale(group["scale"], w.rows, w.cols) for w in windows)


def distances(group: Group, states: Mapping[Tensor, State]) -> list[float]:
    """How far the group's matrices are from their start, as shares of the starting norm."""
    if group["pairs"] is not None:
        return product_distances(group)

    far = []
    for p in group["params"]:
        # The norm of a shard would need every rank.
        if "start" in states[p] and not isinstance(p, DTensor):
            far.append(_distance(p, states[p], group))

    return far


def _distance(p: Tensor, state: State, group: Group) -> float:
    moved = spectral_norm(p.detach().float() - state["start"].float(), group["view"])
    tiny = torch.finfo(torch.float32).tiny
    return (moved / state["start_norm"].clamp_min(tiny)).item()
