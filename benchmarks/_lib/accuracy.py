"""How far an optimizer's update is from the exact filter, beside the plain iteration's error.

The exact filter maps the singular values of a float64 SVD by the filter's scalar polynomial. Each
optimizer takes one real step from zero weights, so everything between gradient and weight is in the
comparison. The plain iteration is three products a step in the dtype that the hardware is fast in.

Legend: G is [m, n] with m <= n; s are singular values; errors are Frobenius norms, relative to the
exact update or to one full direction, whichever is larger.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks._lib.peers import LR, PEERS, Peer
from benchmarks._lib.shapes import Projection
from mesotron.optim import step_scale
from mesotron.optim.device import filter_dtype
from mesotron.spectral import Filter, noise_edge
from mesotron.spectral.filters import Triple, aim

CPU_SHAPES = ((48, 144), (192, 576))
CUDA_SHAPES = ((64, 896), (128, 2048), (768, 768), (896, 4864))
# On a CPU without 16-bit units, what forces such a dtype is tried on the small shape only.
EMULATED_LIMIT = 64
KINDS = ("gaussian", "power law", "spiked")


def make_gradient(kind: str, m: int, n: int) -> Tensor:
    """A float64 gradient with a spectrum of this kind; the same on every machine.

    gaussian: pure noise. power law: singular values 1/k. spiked: one direction with nine tenths of
    the energy, noise below.
    """
    generator = torch.Generator().manual_seed(m * n)
    noise = torch.randn(m, n, dtype=torch.float64, generator=generator)
    if kind == "gaussian":
        return noise

    U, s, Vh = torch.linalg.svd(noise, full_matrices=False)
    if kind == "power law":
        return (U / torch.arange(1, m + 1)) @ Vh

    s = s / s[1:].norm()
    s[0] = 3.0

    return (U * s) @ Vh


def exact_update(G: Tensor, filter: Filter) -> Tensor:
    """f(G) by SVD in float64."""
    U, s, Vh = torch.linalg.svd(G.double(), full_matrices=False)
    s = s / s.norm()
    triples, divisor = steps_for(filter, s, G.shape[1])

    s = s / divisor
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5

    return (U * s) @ Vh


def plain_update(G: Tensor, filter: Filter, dtype: torch.dtype) -> Tensor:
    """f(G) by the plain iteration, each product in `dtype`."""
    s = torch.linalg.svdvals(G.double())
    triples, divisor = steps_for(filter, s / s.norm(), G.shape[1])

    X = (G.double() / (s.norm() * divisor)).to(dtype)
    for a, b, c in triples:
        A = X @ X.mT
        X = a * X + (b * A + c * (A @ A)) @ X

    return X


def steps_for(filter: Filter, s: Tensor, n: int) -> tuple[list[Triple], float]:
    """The steps for a matrix with singular values s (of norm 1), and what to divide it by first.

    Only the noise cutoff depends on s: it divides by the Schatten-8 norm and aims each step.
    """
    if filter.cutoff is None:
        return list(filter.steps), 1.0

    assert filter.cutoff == "noise"
    divisor = float(s.pow(8).sum() ** 0.125)
    t = np.float64(noise_edge(len(s), n) / divisor)

    triples: list[Triple] = []
    for _ in range(filter.num_steps(len(s), n)):
        (a, b, c), t = aim(t)
        triples.append((float(a), float(b), float(c)))

    return triples, divisor


def peer_update(peer: Peer, G: Tensor) -> Tensor:
    """What one step of an optimizer from zero weights moves, without rate and sign."""
    p = nn.Parameter(torch.zeros(G.shape, dtype=torch.float32, device=G.device))
    p.grad = G.float()
    peer.build([p], [Projection(G.shape[0], G.shape[1])]).step()

    return -p.detach().double()


def relative_error(update: Tensor, exact: Tensor, scale: float | None) -> float:
    """Error of an update; `scale` is its known factor, None fits it (peers have other units)."""
    if scale is None:
        scale = float((update * exact).sum() / update.square().sum())
    return float((update * scale - exact).norm() / max(1.0, float(exact.norm())))


def measure(names: list[str], device: torch.device) -> list[dict[str, Any]]:
    """Errors of each optimizer and of the plain iteration, the worst over the kinds of gradient.

    Returns:
        Rows of optimizer, shape, error and plain_error (in the dtype the filter works in here).
    """
    dtype = filter_dtype(device)
    shapes = CUDA_SHAPES if device.type == "cuda" else CPU_SHAPES

    rows = []
    for name in names:
        peer = PEERS[name]
        if peer.filter is None or peer.per_head:
            continue

        for m, n in shapes:
            if peer.half and dtype != torch.bfloat16 and m > EMULATED_LIMIT:
                continue

            rows.append({"optimizer": name, "shape": [m, n], **worst_errors(peer, m, n, device)})
    return rows


def worst_errors(peer: Peer, m: int, n: int, device: torch.device) -> dict[str, float]:
    """Of a shape, over the kinds of gradient."""
    errors = []
    plain_errors = []
    for kind in KINDS:
        G = make_gradient(kind, m, n).to(device)
        error, plain = _errors(peer, G, filter_dtype(device))
        errors.append(error)
        plain_errors.append(plain)
    return {"error": max(errors), "plain_error": max(plain_errors)}


def _errors(peer: Peer, G: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    assert peer.filter is not None
    exact = exact_update(G, peer.filter)
    scale = None
    if peer.package is None and not peer.half:  # ours
        scale = 1 / (LR * step_scale("rms", G.shape[0], G.shape[1]))

    error = relative_error(peer_update(peer, G), exact, scale)
    plain = plain_update(G, peer.filter, dtype).double()
    return error, relative_error(plain, exact, 1.0)
