"""Filter a packed bucket on a CUDA GPU; products with a symmetric result compute half of it.

Every segment of the plan is in Gram form (one of length 1 is the standard step): R = X X^T, a chain
of m x m products that gives Q, then Q X. X is never divided by its norm: R is, and the step size at
the end. Blocks of at most 128 rows stay on chip instead.

Legend: X is [B, m, n] with m <= n; R, Z, Q are [B, m, m]; all are float16, summed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from mesotron.optim.matrix import largest_eigenvalue
from mesotron.spectral import SYMMETRIC, Filter, Segment, cheapest_plan, noise_edge
from mesotron.spectral.filters import PROMOTE, aim

# 8 times closer to the exact filter than bfloat16 at the same speed, and in range once a block is
# scaled; the accuracy table of benchmarks/optim_step has both.
WORK_DTYPE = torch.float16
# Allowed growth of R's rounding error inside a Gram segment: [3, 2] for Muon's steps and [2, 3] for
# Polar Express, both nearer to the exact filter than the plain bfloat16 iteration.
GRAM_TOLERANCE = 0.08


class FilteredBucket(NamedTuple):
    """A filtered bucket, which keeps the scale its blocks came with.

    Args:
        X: [B, m, n], gain * f(X).
        gain: [B], the norm a block would have been divided by, 1 for a zero block. Dividing by
            it is left to whoever reads X, who multiplies by a step size anyway.
        concentration: [B], sum sigma^4 / (sum sigma^2)^2 of each input block.
    """

    X: Tensor
    gain: Tensor
    concentration: Tensor


def filter_blocks(X: Tensor, sumsq: Tensor, filter: Filter) -> FilteredBucket:
    """Filter every block of a bucket.

    Args:
        X: [B, m, n] float16 on the GPU, |X| <= 1, any scale per block; may be overwritten.
        sumsq: [B] float32, the sum of squares of each block.
        filter: any but low-rank.
    """
    from mesotron.optim.kernels.heads import LARGEST_M, filter_heads

    m, n = X.shape[1:]
    if m <= LARGEST_M and filter.cutoff is None:
        gain = math.sqrt(n)  # keeps the entries of an orthogonal result near 1
        out, seen = filter_heads(X, _coefficients(filter, X.device), out=X, gain=gain)
        return FilteredBucket(out, torch.full_like(sumsq, gain), seen.concentration)
    gain = torch.where(sumsq > 0, sumsq.sqrt(), 1.0)
    R = _gram(X, gain.square().reciprocal())
    concentration = torch.linalg.vector_norm(R, dim=(1, 2), dtype=torch.float32).square()
    triples: Iterator = iter(filter.steps)
    if filter.cutoff is not None:
        R, gain, triples = _rescale_to_bound(R, gain, filter, (m, n))
    for k, segment in enumerate(fused_plan(m, n, filter)):
        R = R if k == 0 else _gram(X, gain.square().reciprocal())
        X = torch.bmm(_chain(R, [next(triples) for _ in segment.steps]), X)
    return FilteredBucket(X, gain, concentration)


@lru_cache(maxsize=256)
def fused_plan(m: int, n: int, filter: Filter) -> tuple[Segment, ...]:
    """The cheapest segments in which float16 stays accurate; the standard form: one step each."""
    steps = filter.steps or (PROMOTE,) * filter.num_steps(m, n)
    roundoff = torch.finfo(WORK_DTYPE).eps / 2
    plan = cheapest_plan(m, n, steps, roundoff, SYMMETRIC, GRAM_TOLERANCE)
    if plan[0].form == "standard":
        return tuple(Segment("gram", (step,)) for step in steps)
    return plan


@lru_cache(maxsize=64)
def _coefficients(filter: Filter, device: torch.device) -> Tensor:
    return torch.tensor(filter.steps, dtype=torch.float32, device=device)


def _chain(R: Tensor, triples: list[tuple]) -> Tensor:
    """Q with f(X) = Q X after these steps."""
    Q = None
    for k, triple in enumerate(triples):
        Z = _polynomial(R, triple)
        Q = Z if Q is None else _product(Q, Z)
        if k < len(triples) - 1:
            R = _product(_product(R, Z), Z)
    assert Q is not None
    return Q


def _polynomial(R: Tensor, triple: tuple) -> Tensor:
    """a I + b R + c R R; numbers, or [B] where each block has its own. One launch for large R."""
    a, b, c = triple
    if _symmetric_pays(R):
        from mesotron.optim.kernels.symmetric import symmetric_product

        return symmetric_product(R, R, alpha=c, C=R, beta=b, diag=a)
    if isinstance(a, Tensor):
        b, c = b[:, None, None].to(R.dtype), c[:, None, None].to(R.dtype)
        Z = torch.bmm(R, R).mul_(c).addcmul_(R, b)
        Z.diagonal(dim1=1, dim2=2).add_(a[:, None])
        return Z
    Z = torch.baddbmm(R, R, R, beta=b, alpha=c)
    Z.diagonal(dim1=1, dim2=2).add_(a)
    return Z


def _product(S: Tensor, T: Tensor) -> Tensor:
    """S T for commuting symmetric S and T."""
    if _symmetric_pays(S):
        from mesotron.optim.kernels.symmetric import symmetric_product

        return symmetric_product(S, T)
    return torch.bmm(S, T)


def _symmetric_pays(S: Tensor) -> bool:
    from mesotron.optim.kernels.symmetric import prefers_symmetric

    return prefers_symmetric(S.shape[0], S.shape[1], S.shape[1], S.dtype)


def _gram(X: Tensor, scale: float | Tensor) -> Tensor:
    """scale * X X^T; the scale may differ by block."""
    from mesotron.optim.kernels.symmetric import gram, prefers_symmetric

    if prefers_symmetric(len(X), X.shape[1], X.shape[2], X.dtype):
        return gram(X, scale=scale)
    # cuBLAS rounds to float16 before the scale is applied: X X^T fits, as |X| is at most about 1.
    R = torch.bmm(X, X.mT)
    return R.mul_(scale[:, None, None] if isinstance(scale, Tensor) else scale)


def _rescale_to_bound(
    R: Tensor, gain: Tensor, filter: Filter, shape: tuple[int, int]
) -> tuple[Tensor, Tensor, Iterator]:
    """As in `matrix`: divide by the Schatten-8 norm and aim each block's own coefficients."""
    S = _product(R, R).float()
    bound = torch.linalg.vector_norm(S, dim=(1, 2)).pow(0.25)
    bound = torch.where(bound > 0, bound, 1.0)
    assert filter.cutoff is not None
    if filter.cutoff == "noise":
        t = noise_edge(*shape) / bound
    else:
        t = filter.cutoff * largest_eigenvalue(S).pow(0.25) / bound
    R = R * bound.square().reciprocal()[:, None, None].to(R.dtype)
    triples = []
    for _ in range(filter.num_steps(*shape)):
        triple, t = aim(t)
        triples.append(triple)
    return R, gain * bound, iter(triples)
