"""Filter a packed bucket on a CUDA GPU; products with a symmetric result compute half of it.

Every segment of the plan is in Gram form (one of length 1 is the standard step): R = X X^T, a chain
of m x m products that gives Q, then Q X. X is never divided by its norm: R is, and the step size at
the end. Blocks of at most 128 rows stay on chip instead.

Legend: X is [B, m, n] with m <= n; R, Z, Q are [B, m, m]; all are float16, summed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from mesotron.optim.matrix import largest_eigenvalue
from mesotron.optim.triton.packed import Packed
from mesotron.spectral import SYMMETRIC, Filter, Segment, cheapest_plan, noise_edge
from mesotron.spectral.filters import aim

# 8 times closer to the exact filter than bfloat16 at the same speed, and in range once a block is
# scaled; the accuracy table of benchmarks/optim_step has both.
WORK_DTYPE = torch.float16
# Allowed growth of R's rounding error inside a Gram segment: [3, 2] for Muon's steps, [2, 2, 1] for
# Polar Express. With [2, 3] its error on a 1/k spectrum of 384 x 2048 was 2e-2, three quarters of
# the plain bfloat16 iteration's and growing with the size.
GRAM_TOLERANCE = 0.07


class FilteredBucket(NamedTuple):
    """A filtered bucket, which keeps the scale its blocks came with.

    Args:
        X: [B, m, n], gain * f(X).
        gain: [B], the norm a block would have been divided by, 1 for a zero block. Dividing is left
            to whoever reads X, who multiplies by a step size anyway.
        squares: [B, parts], to be summed: sum sigma^4 / (sum sigma^2)^2 of each input block.
    """

    X: Tensor
    gain: Tensor
    squares: Tensor


def filter_blocks(X: Tensor, packed: Packed, filter: Filter, spare: Tensor) -> FilteredBucket:
    """Filter every block of a bucket.

    Args:
        X: [B, m, n] float16 on the GPU, |X| <= 1, any scale per block; overwritten.
        packed: the norms of the blocks.
        filter: any but low-rank.
        spare: like X; overwritten. The result is in one of the two.
    """
    from mesotron.optim.triton.heads import LARGEST_M, filter_heads
    from mesotron.optim.triton.symmetric import gram, num_parts

    num, m, n = X.shape
    if m <= LARGEST_M and filter.cutoff is None:
        gain = math.sqrt(n)  # keeps the entries of an orthogonal result near 1
        out, seen = filter_heads(X, _coefficients(filter, X.device), out=X, gain=gain)
        return FilteredBucket(out, _constant(gain, num, X.device), seen.concentration[:, None])
    gain, per_trace = packed.norm, packed.inverse_square
    squares = torch.empty(num, num_parts(num, m), dtype=torch.float32, device=X.device)
    R = gram(X, scale=per_trace, squares=squares)
    triples: Iterator = iter(filter.steps)
    if filter.cutoff is not None:
        R, gain, triples = _rescale_to_bound(R, gain, filter, (m, n))
        per_trace = gain.square().reciprocal()
    for k, segment in enumerate(fused_plan(m, n, filter)):
        # The kernel scales its float32 sums; cuBLAS would round them to float16 first and overflow.
        R = R if k == 0 else gram(X, scale=per_trace)
        with _exact_sums():
            torch.bmm(_chain(R, [next(triples) for _ in segment.steps]), X, out=spare)
        X, spare = spare, X
    return FilteredBucket(X, gain, squares)


@lru_cache(maxsize=256)
def fused_plan(m: int, n: int, filter: Filter) -> tuple[Segment, ...]:
    """The cheapest segments in which float16 stays accurate; the standard form: one step each."""
    steps = filter.steepest_steps(m, n)
    roundoff = torch.finfo(WORK_DTYPE).eps / 2
    plan = cheapest_plan(m, n, steps, roundoff, SYMMETRIC, GRAM_TOLERANCE)
    if plan[0].form == "standard":
        return tuple(Segment("gram", (step,)) for step in steps)
    return plan


@lru_cache(maxsize=64)
def _coefficients(filter: Filter, device: torch.device) -> Tensor:
    return torch.tensor(filter.steps, dtype=torch.float32, device=device)


@lru_cache(maxsize=64)
def _constant(value: float, num: int, device: torch.device) -> Tensor:
    return torch.full((num,), value, device=device)


@contextmanager
def _exact_sums() -> Iterator[None]:
    """Keep cuBLAS from adding up partial sums in float16, as PyTorch allows it by default."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_fp16_reduced_precision_reduction
    settings.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        settings.allow_fp16_reduced_precision_reduction = before


def _chain(R: Tensor, triples: list[tuple]) -> Tensor:
    """Q with f(X) = Q X after these steps, Z = a I + b R + c R R in each. All factors commute, and
    the kernel keeps them symmetric: an unsymmetric part would grow from step to step."""
    from mesotron.optim.triton.symmetric import symmetric_product

    Q = None
    for k, (a, b, c) in enumerate(triples):  # numbers, or [B] where each block has its own
        Z = symmetric_product(R, R, alpha=c, C=R, beta=b, diag=a)
        Q = Z if Q is None else symmetric_product(Q, Z)
        if k < len(triples) - 1:
            R = symmetric_product(symmetric_product(R, Z), Z)
    assert Q is not None
    return Q


def _rescale_to_bound(
    R: Tensor, gain: Tensor, filter: Filter, shape: tuple[int, int]
) -> tuple[Tensor, Tensor, Iterator]:
    """As in `matrix`: divide by the Schatten-8 norm and aim each block's own coefficients."""
    from mesotron.optim.triton.symmetric import symmetric_product

    S = symmetric_product(R, R).float()
    bound = torch.linalg.vector_norm(S, dim=(1, 2)).pow(0.25)
    bound = torch.where(bound > 0, bound, 1.0)
    assert filter.cutoff is not None
    if filter.cutoff == "noise":
        t = noise_edge(*shape) / bound
    else:
        t = filter.cutoff * largest_eigenvalue(S).pow(0.25) / bound
    # In float32: a factor rounded to float16 would shift every threshold the same way.
    torch.mul(R, bound.square().reciprocal()[:, None, None], out=R)
    triples = []
    for _ in range(filter.num_steps(*shape)):
        triple, t = aim(t)
        triples.append(triple)
    return R, gain * bound, iter(triples)
