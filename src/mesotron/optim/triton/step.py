"""The spectral step on a CUDA GPU: few launches, nothing that waits, capturable in a CUDA graph.

The same step as `spectral_step`. Momentum, Nesterov, scaling, cast and packing are one launch for a
bucket, decay and write-back another; both run at the speed of memory. Putting them on a second
stream beside the products gained nothing (benchmarks/LOG.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mesotron.optim.device import rounding_seed
from mesotron.optim.matrix import Filtered
from mesotron.optim.stats import StepStats, move
from mesotron.optim.step import Member
from mesotron.optim.triton.filter import WORK_DTYPE, filter_blocks
from mesotron.optim.triton.packed import Packed
from mesotron.optim.triton.plan import (
    Bucket,
    can_fuse,
    make_buckets,
    signature,
    unique_groups,
)


class FusedStep:
    """Plans a step for a set of parameters once and runs it many times.

    Fresh gradients only refresh one table of addresses. Learning rate, momentum and decay are read
    from the groups at every step: numbers are uploaded when they change, device tensors are read on
    the device, so a captured graph follows them.
    """

    def __init__(self, candidates: list[Member]) -> None:
        self._signature = signature(candidates)
        self._taken = [can_fuse(member) for member in candidates]
        members = self.taken(candidates)
        device = candidates[0].param.device
        self._buckets = make_buckets(members)
        self._grad_bases = [m.grad.data_ptr() for m in members]
        self._values = _GroupValues(unique_groups(members), self._buckets, device)
        self._tie = _Tie(self._buckets, len(members), device)
        self._captured: list[Tensor] = []
        # 64 bits: which bucket of whose parameters above, the step below, where it is counted on.
        step = max((m.group["step"] for m in members), default=0) - 1
        firsts = [members[bucket.members[0]].number for bucket in self._buckets]
        streams = [rounding_seed(0, number, k) >> 1 for k, number in enumerate(firsts)]
        seeds = [(stream << 32) + step for stream in streams]
        self._seeds = torch.tensor(seeds, dtype=torch.int64, device=device)

    def fits(self, candidates: list[Member]) -> bool:
        """Whether this plan is still the right one."""
        return self._signature == signature(candidates)

    def taken(self, candidates: list[Member]) -> list[Member]:
        """Those that the kernels step."""
        return [m for m, taken in zip(candidates, self._taken, strict=True) if taken]

    def left(self, candidates: list[Member]) -> list[Member]:
        """Those that the plain step must take."""
        return [m for m, taken in zip(candidates, self._taken, strict=True) if not taken]

    def run(self, candidates: list[Member], stats: StepStats) -> None:
        """One step of the taken ones."""
        members = self.taken(candidates)
        if not members:
            return
        self._point_at_gradients(members)
        table = self._values.table()
        rates = self._values.per_bucket(table)
        seeds = self._seeds.add_(1).unbind()  # on the device, so that a replayed graph goes on
        peaks = self._tie.peaks(self._buckets)
        for bucket, peak, rate, seed in zip(self._buckets, peaks, rates, seeds, strict=True):
            record = _run_bucket(bucket, peak, table[bucket.groups[0], 2], rate, seed)
            stats.add_lazily(bucket.names, record.blocks, record.cosines)
        stats.add_finite([m.group["name"] for m in members], self._tie.finite(peaks))

    def _point_at_gradients(self, members: list[Member]) -> None:
        bases = [m.grad.data_ptr() for m in members]
        if bases == self._grad_bases:
            return
        for bucket in self._buckets:
            pairs = zip(bucket.members, bucket.grad_offsets, strict=True)
            source = bucket.grads.rebase([bases[i] + offset for i, offset in pairs])
            if source.device.type != bucket.scale.device.type and _is_capturing():
                self._captured.append(source)  # replays read it again
        self._grad_bases = bases


def _run_bucket(
    bucket: Bucket, peak: Tensor, mu: Tensor, rates: tuple[Tensor, Tensor], seed: Tensor
) -> _Record:
    from mesotron.optim.triton.pack import update_momentum
    from mesotron.optim.triton.writeback import sample_alignment, write_back

    shape = (2, len(bucket.members), *bucket.shape)
    X, spare = torch.empty(shape, dtype=WORK_DTYPE, device=peak.device).unbind()
    packed = update_momentum(
        bucket.grads, bucket.momenta, X, mu, peak, bucket.momentum_peak, nesterov=bucket.nesterov
    )
    filtered, gain, squares = filter_blocks(X, packed, bucket.filter, spare)
    lr, decay = rates
    rounding = seed if bucket.weights.dtype == torch.bfloat16 else None
    energies = write_back(
        bucket.weights, filtered, lr, decay, bucket.scale, peak, rounding, gain=gain
    )
    alignments = sample_alignment(bucket.grads, filtered, peak)
    return _Record(bucket, packed, gain, squares, energies, alignments, lr)


@dataclass
class _Record:
    """What a bucket's step left for the statistics; added up only when they are read."""

    bucket: Bucket
    packed: Packed
    gain: Tensor
    squares: Tensor
    energies: Tensor
    alignments: Tensor
    lr: Tensor

    def blocks(self) -> tuple[Filtered, Tensor, int]:
        """As `StepStats.add_blocks` takes them."""
        passed = self.energies.sum(1) / self.gain.square()
        seen = Filtered(self.energies, self.packed.sumsq.sqrt(), self.squares.sum(1), passed)
        return seen, self.lr * self.bucket.scale, self.bucket.shape[0] * self.bucket.shape[1]

    def cosines(self) -> Tensor:
        """One for each block."""
        from mesotron.optim.triton.writeback import alignment_cosine

        return alignment_cosine(self.alignments)


class _GroupValues:
    """lr, weight decay and momentum of each group, on the device."""

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
        """lr and weight decay of every block, bucket by bucket."""
        lr, decay = table.T[:2, self._index]
        return list(zip(lr.split(self._sizes), decay.split(self._sizes), strict=True))


class _Tie:
    """Blocks of one parameter share their fate: a non-finite gradient skips all of them."""

    def __init__(self, buckets: list[Bucket], num_members: int, device: torch.device) -> None:
        owners = [i for bucket in buckets for i in bucket.members]
        self._sizes = [len(bucket.members) for bucket in buckets]
        self._owners = torch.tensor(owners, device=device)
        firsts = {owner: at for at, owner in reversed(list(enumerate(owners)))}
        self._firsts = torch.tensor([firsts[i] for i in range(num_members)], device=device)
        self._needed = len(owners) > num_members

    def peaks(self, buckets: list[Bucket]) -> list[Tensor]:
        """The largest magnitude of each block's gradient; infinite for all blocks of a parameter
        that has one bad block, so that the kernels leave it alone."""
        from mesotron.optim.triton.pack import INFINITY_BITS, inspect

        found = torch.empty(len(self._owners), dtype=torch.int32, device=self._owners.device)
        parts = list(found.split(self._sizes))
        for bucket, part in zip(buckets, parts, strict=True):
            inspect(bucket.grads, part)
        if self._needed:
            bad = (found >= INFINITY_BITS).int()
            worst = torch.zeros_like(self._firsts, dtype=torch.int32)
            worst.scatter_reduce_(0, self._owners, bad, "amax")
            found.copy_(torch.maximum(found, worst[self._owners] * INFINITY_BITS))
        return parts

    def finite(self, peaks: list[Tensor]) -> Tensor:
        """One bool per member."""
        from mesotron.optim.triton.pack import is_finite

        return is_finite(torch.cat(peaks)[self._firsts])


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
