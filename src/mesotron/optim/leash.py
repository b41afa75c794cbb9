"""The leash: matrices decay toward their starting weights W0 instead of toward zero.

    W <- W - lr scale f(U);  W <- W - s / (s + r) (W - W0),   s = lr scale F_MAX, r = leash ||W0||_2

A filtered step has a spectral norm of at most s, so by induction no filtered block moves further
than (r + s) r / (s + r) = r from its start, at any rate. A LoRA product needs no copy of W0: its
decay is the leash (`mesotron.optim.lora`).
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mesotron.optim.device import round_stochastically
from mesotron.optim.matrix import largest_eigenvalue
from mesotron.optim.step import Group
from mesotron.optim.views import View
from mesotron.spectral.scale import step_scale

F_MAX = 1.2  # the largest singular value that Muon's five steps leave


def spectral_norm(W: Tensor, view: str = "whole") -> Tensor:
    """The largest singular value of a matrix, a convolution or all of a stack."""
    window = View(View.parse(view).layout).windows(W.detach().float())[0]
    X = window.wide.reshape(-1, *window.block_shape)
    unit = X.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)

    return largest_eigenvalue(torch.bmm(X / unit, (X / unit).mT)).amax().sqrt() * unit


def keep_start(state: dict[str, Any], p: Tensor, group: Group) -> None:
    """Remember a parameter's weights and their norm before its first step."""
    if group["leash"] is None or "start" in state:
        return

    state["start"] = p.detach().clone()
    whole = p.full_tensor() if isinstance(p, DTensor) else p
    state["start_norm"] = spectral_norm(whole, group["view"])


def pull(W: Tensor, state: dict[str, Any], group: Group, finite: Tensor | None, seed: int) -> None:
    """After a step, move (a shard of) a parameter toward its start, where its gradient is finite;
    weights that started at zero have no leash."""
    start = state["start"]
    shape = start.shape
    W0 = start.to_local() if isinstance(start, DTensor) else start
    windows = View.parse(group["view"]).windows(torch.empty(shape, device="meta"))
    scale = max(step_scale(group["scale"], w.rows, w.cols) for w in windows)
    step = group["lr"] * scale * F_MAX
    norm = state["start_norm"]

    share = torch.where(norm > 0, step / (step + group["leash"] * norm), 0.0)
    if finite is not None:
        share = share * finite

    if W.dtype == torch.bfloat16:
        round_stochastically(W.float().lerp(W0.float(), share.float()), W, seed)
    else:
        W.lerp_(W0, share.to(W.dtype))


def distance(p: Tensor, state: dict[str, Any], group: Group) -> float | None:
    """The spectral distance to the start over the start's spectral norm; None for a shard, whose
    norm would need every rank."""
    if "start" not in state or isinstance(p, DTensor):
        return None
    moved = spectral_norm(p.detach().float() - state["start"].float(), group["view"])
    return (moved / state["start_norm"].clamp_min(torch.finfo(torch.float32).tiny)).item()
