"""Gradient clipping of a routed optimizer."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mesotron.config.rules import AUXILIARY_RULES
from mesotron.optim.lora import find_pairs
from mesotron.optim.state import whole


class Norms(NamedTuple):
    total: Tensor
    auxiliary: Tensor


def clip_gradients(
    optimizer: torch.optim.Optimizer, max_norm: float, matrices: bool = False
) -> Norms:
    """Clip the gradient of the auxiliary groups together to a norm; optionally the spectral groups.
    A spectral step does not depend on the size of a gradient, but momentum does: a first gradient r
    times as large as those after it outweighs them in a momentum mu for up to
    ln(1 + r^2 (1 - mu^2)) / (2 ln(1 / mu)) steps, 23 for r = 10 and mu = 0.95."""
    auxiliary: dict[Any, list[Tensor]] = defaultdict(list)  # by mesh: no norm spans two
    spectral: dict[Any, list[Tensor]] = defaultdict(list)
    for group in optimizer.param_groups:
        meshes = auxiliary if group["rule"] in AUXILIARY_RULES else spectral
        for p in group["params"]:
            if p.grad is not None:
                meshes[getattr(p.grad, "device_mesh", None)].append(p)

    auxiliary_norm = _norm(auxiliary.values(), {})
    spectral_norm = _norm(spectral.values(), {})
    scales = _pair_scales(optimizer.param_groups)
    counted = _norm(spectral.values(), scales) if scales else spectral_norm

    # NaN skips them all; an infinite norm would make them zeros, which AdamW steps.
    usable = torch.where(auxiliary_norm.isfinite(), auxiliary_norm, torch.nan)
    for params in auxiliary.values():
        clip_grads_with_norm_(params, max_norm, usable)

    if matrices:
        finite = torch.where(spectral_norm.isfinite(), spectral_norm, 0.0)
        for params in spectral.values():
            clip_grads_with_norm_(params, max_norm, finite)

    if not spectral:  # bringing the host's zero to a GPU would wait for it
        return Norms(auxiliary_norm, auxiliary_norm)

    return Norms(torch.hypot(auxiliary_norm, counted.to(auxiliary_norm.device)), auxiliary_norm)


def _pair_scales(groups: list[dict[str, Any]]) -> dict[Tensor, Tensor]:
    """Factors on the gradients of LoRA products, for the total: it counts them as if A had rows of
    norm 1. B's gradient is proportional to A, which grows severalfold within tens of steps at any
    rate, however little B A moves."""
    scales: dict[Tensor, Tensor] = {}
    for pair in find_pairs(groups):
        length = pair.A.detach().norm().clamp_min(1e-30) / len(pair.A) ** 0.5
        scales[pair.A] = length
        scales[pair.B] = 1 / length

    return scales


def _norm(meshes: Iterable[list[Tensor]], scales: dict[Tensor, Tensor]) -> Tensor:
    norms = []
    for params in meshes:
        norm = get_total_norm([_scaled_gradient(p, scales) for p in params])
        norms.append(whole(norm))

    if not norms:
        return torch.zeros(())

    return torch.linalg.vector_norm(torch.stack(norms))


def _scaled_gradient(p: Tensor, scales: dict[Tensor, Tensor]) -> Tensor:
    assert p.grad is not None
    return p.grad * scales[p] if p in scales else p.grad
