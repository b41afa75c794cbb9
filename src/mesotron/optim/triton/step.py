"""The spectral step on a CUDA GPU: few launches, no waiting, capturable in a CUDA graph.

The same step as `mesotron.optim.step`. Momentum, Nesterov, scaling, cast and packing are one launch
for a bucket, decay and write-back another; both run at memory speed.

In the filter every segment of the plan is in Gram form (one of length 1 is the standard step):
R = X X^T, a chain of m x m products that gives Q, then Q X. X is never divided by its norm: R is,
and the step size at the end. Blocks of at most 128 rows stay on chip instead.

Legend: X is [B, m, n] with m <= n; R, Z, Q are [B, m, m]; all are float16, summed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mesotron.optim.device import rounding_seed
from mesotron.optim.matrix import Filtered, largest_eigenvalue
from mesotron.optim.stats import StepStats, move
from mesotron.optim.step import Member
from mesotron.optim.triton import elementwise
from mesotron.optim.triton.elementwise import Packed
from mesotron.optim.triton.heads import LARGEST_M, filter_heads
from mesotron.optim.triton.plan import (
    WORK_DTYPE,
    Bucket,
    can_fuse,
    make_buckets,
    signature,
    unique_groups,
)
from mesotron.optim.triton.symmetric import gram, num_parts, symmetric_product
from mesotron.spectral import SYMMETRIC, Filter, Segment, cheapest_plan, noise_edge
from mesotron.spectral.filters import aim

# Allowed growth of R's rounding error inside a Gram segment: [3, 2] for Muon's steps, [2, 2, 1] for
# Polar Express. With [2, 3] its error on a 1/k spectrum of 384 x 2048 was 2e-2, three quarters of
# the plain bfloat16 iteration's and growing with the size.
GRAM_TOLERANCE = 0.07


class FusedStep:
    """Plans a step for a set of parameters once and runs it many times. Learning rate, momentum and
    decay are read from the groups at every step: numbers are uploaded when they change, device
    tensors are read on the device, so a captured graph follows them."""

    def __init__(self, candidates: list[Member]) -> None:
        self._signature = signature(candidates)
        self._taken = [can_fuse(member) for member in candidates]
        members = [m for m, taken in zip(candidates, self._taken, strict=True) if taken]
        device = candidates[0].param.device
        self._buckets = make_buckets(members)
        self._grad_bases = [m.grad.data_ptr() for m in members]
        self._values = _GroupValues(unique_groups(members), self._buckets, device)
        self._peaks = _GradientPeaks(self._buckets, len(members), device)
        self._captured: list[Tensor] = []
        # 64 bits: the bucket and its first parameter above, the step below, counted on the device.
        step = max((m.group["step"] for m in members), default=0) - 1
        firsts = [members[bucket.members[0]].number for bucket in self._buckets]
        streams = [rounding_seed(0, number, k) >> 1 for k, number in enumerate(firsts)]
        seeds = [(stream << 32) + step for stream in streams]
        self._seeds = torch.tensor(seeds, dtype=torch.int64, device=device)

    def fits(self, candidates: list[Member]) -> bool:
        return self._signature == signature(candidates)

    def run(self, candidates: list[Member], stats: StepStats) -> list[Member]:
        """Step the members that the kernels support; returns the others, for the plain step."""
        pairs = list(zip(candidates, self._taken, strict=True))
        members, left = ([m for m, taken in pairs if taken is wanted] for wanted in (True, False))
        if not members:
            return left
        self._point_at_gradients(members)
        table = self._values.table()
        rates = self._values.per_bucket(table)
        seeds = self._seeds.add_(1).unbind()  # on the device, so that a replayed graph goes on
        peaks = self._peaks.find(self._buckets)
        for bucket, peak, rate, seed in zip(self._buckets, peaks, rates, seeds, strict=True):
            numbers = _run_bucket(bucket, peak, table[bucket.groups[0], 2], rate, seed)
            stats.lazy.append((bucket.names, *numbers))
        stats.finite.append(([m.group["name"] for m in members], self._peaks.finite(peaks)))
        return left

    def _point_at_gradients(self, members: list[Member]) -> None:
        bases = [m.grad.data_ptr() for m in members]
        if bases == self._grad_bases:
            return
        for bucket in self._buckets:
            pairs = zip(bucket.members, bucket.grad_offsets, strict=True)
            source = bucket.grads.rebase([bases[i] + offset for i, offset in pairs])
            copied = source.device.type != bucket.scale.device.type
            if copied and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                self._captured.append(source)  # replays read it again
        self._grad_bases = bases


def _run_bucket(
    bucket: Bucket, peak: Tensor, mu: Tensor, rates: tuple[Tensor, Tensor], seed: Tensor
) -> tuple[Callable[[], tuple[Filtered, Tensor, int]], Callable[[], Tensor]]:
    """Step a bucket; returns its statistics as `StepStats.lazy` keeps them."""
    shape = (2, len(bucket.members), *bucket.shape)
    X, spare = torch.empty(shape, dtype=WORK_DTYPE, device=peak.device).unbind()
    packed = elementwise.update_momentum(
        bucket.grads, bucket.momenta, X, mu, peak, bucket.momentum_peak, nesterov=bucket.nesterov
    )
    filtered, gain, squares = filter_blocks(X, packed, bucket.filter, spare)
    lr, decay = rates
    rounding = seed if bucket.weights.dtype == torch.bfloat16 else None
    energies = elementwise.write_back(
        bucket.weights, filtered, lr, decay, bucket.scale, peak, rounding, gain=gain
    )
    alignments = elementwise.sample_alignment(bucket.grads, filtered, peak)

    def blocks() -> tuple[Filtered, Tensor, int]:
        passed = energies.sum(1) / gain.square()
        seen = Filtered(energies, packed.sumsq.sqrt(), squares.sum(1), passed)
        return seen, lr * bucket.scale, math.prod(bucket.shape)

    return blocks, lambda: elementwise.alignment_cosine(alignments)


class _GroupValues:
    def __init__(
        self, groups: list[dict[str, Any]], buckets: list[Bucket], device: torch.device
    ) -> None:
        self._groups, self._device = groups, device
        self._index = torch.tensor([g for b in buckets for g in b.groups], device=device)
        self._sizes = [len(b.groups) for b in buckets]
        self._numbers: list[float] | None = None
        self._table = torch.empty(0)

    def table(self) -> Tensor:
        """[groups, 3]. Numbers are uploaded when they change; tensors are read where they are."""
        flat = [g[key] for g in self._groups for key in ("lr", "weight_decay", "momentum")]
        numbers = [0.0 if isinstance(x, Tensor) else float(x) for x in flat]
        if numbers != self._numbers:
            self._table = move(torch.tensor(numbers), self._device)
            self._numbers = numbers
        table = self._table
        tensors = {i: x for i, x in enumerate(flat) if isinstance(x, Tensor)}
        if tensors:
            table = table.clone()
            for i, x in tensors.items():
                table[i].copy_(x)
        return table.view(-1, 3)

    def per_bucket(self, table: Tensor) -> list[tuple[Tensor, Tensor]]:
        lr, decay = table.T[:2, self._index]
        return list(zip(lr.split(self._sizes), decay.split(self._sizes), strict=True))


class _GradientPeaks:
    """Peaks of the gradients; a non-finite one skips all blocks of its parameter."""

    def __init__(self, buckets: list[Bucket], num_members: int, device: torch.device) -> None:
        owners = [i for bucket in buckets for i in bucket.members]
        self._sizes = [len(bucket.members) for bucket in buckets]
        self._owners = torch.tensor(owners, device=device)
        firsts = {owner: at for at, owner in reversed(list(enumerate(owners)))}
        self._firsts = torch.tensor([firsts[i] for i in range(num_members)], device=device)
        self._shared = len(owners) > num_members

    def find(self, buckets: list[Bucket]) -> list[Tensor]:
        """The peak of each block; infinite for all blocks of a parameter with one bad block, so
        that the kernels leave it alone."""
        peaks = torch.empty(len(self._owners), dtype=torch.int32, device=self._owners.device)
        parts = list(peaks.split(self._sizes))
        for bucket, part in zip(buckets, parts, strict=True):
            elementwise.inspect(bucket.grads, part)
        if self._shared:
            bad = (peaks >= elementwise.INFINITY_BITS).int()
            worst = torch.zeros_like(self._firsts, dtype=torch.int32)
            worst.scatter_reduce_(0, self._owners, bad, "amax")
            peaks.copy_(torch.maximum(peaks, worst[self._owners] * elementwise.INFINITY_BITS))
        return parts

    def finite(self, peaks: list[Tensor]) -> Tensor:
        return torch.cat(peaks)[self._firsts] < elementwise.INFINITY_BITS


def filter_blocks(
    X: Tensor, packed: Packed, filter: Filter, spare: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Filter every block of a bucket by any filter but low-rank. X is [B, m, n] float16 with |X| <=
    1, any scale per block; X and `spare`, like it, are both overwritten. Returns gain * f(X), [B,
    m, n], in one of the two; the gain, [B], by which the reader divides; and [B, parts], to be
    summed: sum sigma^4 / (sum sigma^2)^2 of each input block."""
    num, m, n = X.shape
    if m <= LARGEST_M and filter.cutoff is None:
        gain = math.sqrt(n)  # keeps the entries of an orthogonal result near 1
        out, seen = filter_heads(X, _coefficients(filter, X.device), out=X, gain=gain)
        return out, _constant(gain, num, X.device), seen.concentration[:, None]
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
    return X, gain, squares


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
    """Keep cuBLAS from adding partial sums in float16, as PyTorch allows it by default."""
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
