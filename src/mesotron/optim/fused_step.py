"""The spectral step on a CUDA GPU: few launches, nothing that waits, capturable in a CUDA graph.

The same step as `spectral_step`, with Triton kernels where they pay: momentum, Nesterov, scaling,
cast and packing are one launch for a bucket, decay and write-back another, `fused_filter` runs
between them. What depends only on addresses and shapes is planned once.

Legend: a bucket holds B blocks, each m x n with m <= n. X is [B, m, n]; R, Z, Q are [B, m, m].
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesotron.optim import kernels
from mesotron.optim.fused_filter import WORK_DTYPE, filter_blocks
from mesotron.optim.matrix import Filtered
from mesotron.optim.scale import step_scale
from mesotron.optim.spectral_step import group_filter
from mesotron.optim.stats import StepStats
from mesotron.optim.views import View
from mesotron.spectral import Filter

_BATCH_BYTES = 512 * 2**20
_PLANNED = (
    "view", "filter", "steps", "promote", "cutoff", "rank", "nesterov", "scale", "name", "batched",
    "dtype", "fused",
)  # fmt: skip
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Member(NamedTuple):
    """One parameter of a spectral step."""

    param: Tensor
    grad: Tensor
    momentum: Tensor
    group: dict[str, Any]


def can_fuse(member: Member) -> bool:
    """Whether this parameter takes the kernels; the plain step is always correct instead."""
    p, group = member.param, member.group
    if group["fused"] is False or not kernels.available(p.device):
        return False
    if p.dtype not in _WEIGHT_DTYPES or group["rank"] is not None or group["dtype"] is not None:
        return False
    tensors = (p, member.grad, member.momentum)
    return all(_is_tabular(group["view"], p.shape, t.stride()) for t in tensors)


@lru_cache(maxsize=4096)
def _is_tabular(view: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Every block of the view is a plain strided matrix with one unit stride."""
    tensor = torch.empty_strided(shape, stride, device="meta")
    return all(block_layout(window.wide) for window in View.parse(view).windows(tensor))


class Layout(NamedTuple):
    """Where the blocks of a window start (in elements of the tensor) and their strides."""

    offsets: tuple[int, ...]
    row_stride: int
    column_stride: int


def block_layout(wide: Tensor, first: int = 0) -> Layout | None:
    """The layout of a window [stack, cut, r1, r2, c1, c2] of a tensor that starts at `first` in its
    storage; None if a block is not a plain strided matrix with a unit stride."""
    stack, cut, r1, r2, c1, c2 = wide.shape
    s = wide.stride()
    if (r1 > 1 and s[2] != r2 * s[3]) or (c1 > 1 and s[4] != c2 * s[5]):
        return None
    row = s[3] if r2 > 1 else s[2]
    column = s[5] if c2 > 1 else s[4]
    if 1 not in (row, column):
        return None
    start = int(wide.storage_offset()) - first
    offsets = tuple(start + i * s[0] + j * s[1] for i in range(stack) for j in range(cut))
    return Layout(offsets, row, column)


@dataclass
class _Block:
    """One block at planning time: whose it is and how it lies in the three tensors."""

    member: int
    layouts: tuple[tuple[int, int, int], ...]  # (offset, row stride, column stride) of W, G, M
    rows: int
    cols: int


@dataclass
class _Bucket:
    """Blocks that go through one sequence of launches."""

    filter: Filter
    shape: tuple[int, int]
    nesterov: bool
    members: list[int]
    group_of: list[int]
    weights: Any
    grads: Any
    momenta: Any
    grad_offsets: list[int]
    block_scale: Tensor
    group_index: Tensor
    momentum_peak: Tensor
    names: list[str]


class FusedStep:
    """Plans a step for a set of parameters once and runs it many times.

    A plan holds addresses, so it is made anew when a parameter, its momentum or its group changes;
    fresh gradients only refresh one table. Learning rate, momentum and decay are read from the
    groups at every step: floats are uploaded when they change, device tensors are read on the
    device, so a captured graph follows them.
    """

    def __init__(self, candidates: list[Member]) -> None:
        self._signature = _signature(candidates)
        self._taken = [can_fuse(member) for member in candidates]
        members = self.taken(candidates)
        self._groups = _unique_groups(members)
        self._buckets = _plan(members, self._groups)
        self._grad_bases = [m.grad.data_ptr() for m in members]
        self._values: tuple | None = None
        self._captured: list[Tensor] = []
        self._table = torch.empty(0)
        self._tie = _Tie(self._buckets, len(members), candidates[0].param.device)

    def fits(self, candidates: list[Member]) -> bool:
        """Whether this plan is still the right one."""
        return self._signature == _signature(candidates)

    def taken(self, candidates: list[Member]) -> list[Member]:
        """Those that the kernels step."""
        return [m for m, taken in zip(candidates, self._taken, strict=True) if taken]

    def left(self, candidates: list[Member]) -> list[Member]:
        """Those that the plain step must take."""
        return [m for m, taken in zip(candidates, self._taken, strict=True) if not taken]

    def run(self, candidates: list[Member], stats: StepStats) -> None:
        """One step of the taken ones."""
        from mesotron.optim.kernels.pack import inspect

        members = self.taken(candidates)
        if not members:
            return
        self._point_at_gradients(members)
        values = self._group_values()
        peaks = self._tie.agree([inspect(bucket.grads) for bucket in self._buckets])
        stats.add_finite([m.group["name"] for m in members], self._tie.finite(peaks))
        seeds = torch.randint(2**62, (len(self._buckets),), device=values.device)
        for bucket, peak, seed in zip(self._buckets, peaks, seeds.unbind(), strict=True):
            _run_bucket(bucket, peak, values, seed, stats)

    def _point_at_gradients(self, members: list[Member]) -> None:
        bases = [m.grad.data_ptr() for m in members]
        if bases == self._grad_bases:
            return
        for bucket in self._buckets:
            pairs = zip(bucket.members, bucket.grad_offsets, strict=True)
            self._keep(bucket.grads.rebase([bases[i] + offset for i, offset in pairs]))
        self._grad_bases = bases

    def _keep(self, source: Tensor) -> None:
        """Keep a pinned source alive where a captured copy will read it again."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._captured.append(source)

    def _group_values(self) -> Tensor:
        """[groups, 3] on the device: lr, weight decay, momentum."""
        rows = [(g["lr"], g["weight_decay"], g["momentum"]) for g in self._groups]
        device = self._buckets[0].block_scale.device
        flat = [x for row in rows for x in row]
        if any(isinstance(x, Tensor) for x in flat):
            parts = [torch.as_tensor(x, dtype=torch.float32).to(device).reshape(()) for x in flat]
            return torch.stack(parts).view(len(rows), 3)
        if self._values != tuple(flat):
            host = torch.tensor(flat, dtype=torch.float32).view(len(rows), 3)
            host = host.pin_memory() if device.type == "cuda" else host
            self._keep(host)
            self._table, self._values = host.to(device, non_blocking=True), tuple(flat)
        return self._table


class _Tie:
    """Blocks of one parameter share their fate: a non-finite gradient skips all of them."""

    def __init__(self, buckets: list[_Bucket], num_members: int, device: torch.device) -> None:
        owners = [i for bucket in buckets for i in bucket.members]
        self._sizes = [len(bucket.members) for bucket in buckets]
        self._owners = torch.tensor(owners, device=device)
        firsts = {owner: at for at, owner in reversed(list(enumerate(owners)))}
        self._firsts = torch.tensor([firsts[i] for i in range(num_members)], device=device)
        self._needed = len(owners) > num_members

    def agree(self, peaks: list[Tensor]) -> list[Tensor]:
        """Raise the peaks of a bad parameter to infinity, so that the kernels leave it alone."""
        from mesotron.optim.kernels.pack import INFINITY_BITS

        if not self._needed:
            return peaks
        joined = torch.cat(peaks)
        bad = (joined >= INFINITY_BITS).int()
        worst = torch.zeros_like(self._firsts, dtype=torch.int32)
        worst.scatter_reduce_(0, self._owners, bad, "amax")
        return list(torch.maximum(joined, worst[self._owners] * INFINITY_BITS).split(self._sizes))

    def finite(self, peaks: list[Tensor]) -> Tensor:
        """One bool per member."""
        from mesotron.optim.kernels.pack import is_finite

        return is_finite(torch.cat(peaks)[self._firsts])


def _run_bucket(
    bucket: _Bucket, peak: Tensor, values: Tensor, seed: Tensor, stats: StepStats
) -> None:
    from mesotron.optim.kernels.pack import update_momentum
    from mesotron.optim.kernels.writeback import alignment_cosine, sample_alignment, write_back

    m, n = bucket.shape
    per_block = values[bucket.group_index]  # [B, 3]
    lr, decay = per_block[:, 0], per_block[:, 1]
    X = torch.empty(len(bucket.members), m, n, dtype=WORK_DTYPE, device=values.device)
    mu = values[bucket.group_of[0], 2]
    sumsq = update_momentum(
        bucket.grads, bucket.momenta, X, mu, peak, bucket.momentum_peak, nesterov=bucket.nesterov
    )
    filtered, gain, concentration = filter_blocks(X, sumsq, bucket.filter)
    stochastic = bucket.weights.dtype == torch.bfloat16
    energy = write_back(
        bucket.weights,
        filtered,
        lr,
        decay,
        bucket.block_scale / gain,
        peak,
        seed if stochastic else None,
    )
    record = Filtered(filtered, sumsq.sqrt(), concentration, energy / gain.square())
    stats.add_blocks(bucket.names, record, lr * bucket.block_scale, m * n)
    cosines = alignment_cosine(sample_alignment(bucket.grads, filtered, peak))
    stats.add_cosines(bucket.names, cosines)


def _signature(members: list[Member]) -> list:
    """Everything a plan depends on, cheap enough to compare at every step."""
    settings = {id(group): _settings(group) for group in _unique_groups(members)}
    return [
        (p.data_ptr(), M.data_ptr(), G.dtype, G.stride(), settings[id(group)])
        for p, G, M, group in members
    ]


def _settings(group: dict[str, Any]) -> tuple:
    mu = group["momentum"]
    return (*(group[key] for key in _PLANNED), id(mu) if isinstance(mu, Tensor) else mu)


def _unique_groups(members: list[Member]) -> list[dict[str, Any]]:
    return list({id(m.group): m.group for m in members}.values())


def _plan(members: list[Member], groups: list[dict[str, Any]]) -> list[_Bucket]:
    number = {id(group): i for i, group in enumerate(groups)}
    found: dict[tuple, list[_Block]] = defaultdict(list)
    for i, member in enumerate(members):
        group = member.group
        view = View.parse(group["view"])
        tensors = (member.param, member.grad, member.momentum)
        for windows in zip(*(view.windows(t) for t in tensors), strict=True):
            placed = zip(windows, tensors, strict=True)
            layouts = [x for w, t in placed if (x := block_layout(w.wide, int(t.storage_offset())))]
            first = windows[0]
            mu = group["momentum"]
            key = (
                group_filter(group),
                first.block_shape,
                group["nesterov"],
                id(mu) if isinstance(mu, Tensor) else mu,
                tuple(t.dtype for t in tensors),
                i if not group["batched"] else None,
            )
            for offsets in zip(*(layout.offsets for layout in layouts), strict=True):
                strides = [(x.row_stride, x.column_stride) for x in layouts]
                placed = tuple((o, *s) for o, s in zip(offsets, strides, strict=True))
                found[key].append(_Block(i, placed, first.rows, first.cols))
    buckets = []
    for (filter, shape, nesterov, _, _, _), blocks in found.items():
        size = max(1, _BATCH_BYTES // (shape[0] * shape[1] * WORK_DTYPE.itemsize))
        for at in range(0, len(blocks), size):
            part = blocks[at : at + size]
            buckets.append(_make_bucket(filter, shape, nesterov, part, members, number))
    return buckets


def _make_bucket(
    filter: Filter,
    shape: tuple[int, int],
    nesterov: bool,
    blocks: list[_Block],
    members: list[Member],
    number: dict[int, int],
) -> _Bucket:
    from mesotron.optim.kernels.pack import inspect
    from mesotron.optim.kernels.windows import WindowTable, tabulate

    device = members[0].param.device

    def table(which: int) -> WindowTable:
        return tabulate([_view(members[b.member], which, b.layouts[which], shape) for b in blocks])

    owners = [members[block.member].group for block in blocks]
    scales = [step_scale(g["scale"], b.rows, b.cols) for g, b in zip(owners, blocks, strict=True)]
    group_of = [number[id(group)] for group in owners]
    momenta = table(2)
    itemsize = members[blocks[0].member].grad.element_size()
    return _Bucket(
        filter=filter,
        shape=shape,
        nesterov=nesterov,
        members=[block.member for block in blocks],
        group_of=group_of,
        weights=table(0),
        grads=table(1),
        momenta=momenta,
        grad_offsets=[block.layouts[1][0] * itemsize for block in blocks],
        block_scale=torch.tensor(scales, device=device),
        group_index=torch.tensor(group_of, device=device),
        momentum_peak=inspect(momenta),
        names=[group["name"] for group in owners],
    )


def _view(
    member: Member, which: int, placed: tuple[int, int, int], shape: tuple[int, int]
) -> Tensor:
    tensor = (member.param, member.grad, member.momentum)[which]
    offset, row, column = placed
    return tensor.as_strided(shape, (row, column), tensor.storage_offset() + offset)
