"""Gradient clipping beside spectral rules.

A step of a spectral rule does not feel the size of a gradient, so clipping touches the auxiliary
groups alone unless asked: clipped by the norm of everything, AdamW's step would depend on matrices
that it does not train. Momentum does feel it: see `clip_gradients`.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mesotron.optim.routed import RoutedOptimizer
from mesotron.optim.rules import AUXILIARY_RULES


class Norms(NamedTuple):
    """Norms of a gradient before clipping: of all weights, and of the auxiliary groups."""

    total: Tensor
    auxiliary: Tensor


def clip_gradients(optimizer: RoutedOptimizer, max_norm: float, matrices: bool = False) -> Norms:
    """Clip the gradient of the auxiliary groups together to a norm; spectral groups if asked.

    A first gradient r times as large as those after it (a format that two steps teach) outweighs
    all of them in a momentum mu for ln(1 + r^2 (1 - mu^2)) / (2 ln(1 / mu)) steps if they have
    nothing in common, 23 for r = 10 and mu = 0.95, and a spectral rule makes each of these steps at
    full size. With `matrices` the spectral groups are clipped too, by their own norm; not where it
    is no finite number: each matrix with such a gradient is skipped by itself, and the others would
    be scaled to nothing.

    Args:
        optimizer: its gradients are there and unscaled; DTensors included.
        max_norm: of the auxiliary groups' gradient, and of the spectral groups'.
        matrices: whether spectral groups are clipped.

    Example:
        >>> from torch.nn import Linear, Sequential
        >>> from mesotron.optim import muon
        >>> model = Sequential(Linear(4, 4), Linear(4, 2))
        >>> optimizer = muon(model)
        >>> model(torch.ones(1, 4)).sum().mul(100).backward()
        >>> before = model[0].weight.grad.clone()
        >>> norms = clip_gradients(optimizer, max_norm=1.0)
        >>> bool(norms.auxiliary > 1), torch.equal(model[0].weight.grad, before)
        (True, True)
    """
    auxiliary: list[Tensor] = []
    spectral: list[Tensor] = []
    for group in optimizer.param_groups:
        side = auxiliary if group["rule"] in AUXILIARY_RULES else spectral
        side += [p for p in group["params"] if p.grad is not None]
    meshes = [_by_mesh(auxiliary), _by_mesh(spectral)]
    norms = [_norm(part) for part in meshes]
    for params in meshes[0]:
        clip_grads_with_norm_(params, max_norm, norms[0])
    for params in meshes[1] if matrices else ():
        finite = torch.where(norms[1].isfinite(), norms[1], 0.0)
        clip_grads_with_norm_(params, max_norm, finite)
    if not spectral:  # bringing the host's zero to a GPU would wait for it
        return Norms(norms[0], norms[0])
    return Norms(torch.hypot(norms[0], norms[1].to(norms[0].device)), norms[0])


def _by_mesh(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """Weights apart by the mesh of their gradient: no norm spans two meshes."""
    found = defaultdict(list)
    for p in params:
        found[p.grad.device_mesh if isinstance(p.grad, DTensor) else None].append(p)
    return list(found.values())


def _norm(meshes: list[list[Tensor]]) -> Tensor:
    norms = [get_total_norm([p.grad for p in params if p.grad is not None]) for params in meshes]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return torch.linalg.vector_norm(torch.stack(whole)) if whole else torch.zeros(())
