"""Who goes through which launches: buckets of equal blocks, as tables of addresses.

A plan depends on addresses, shapes and settings only, so it is made once and kept until one of them
changes. It is the host's whole share of a fused step.

Legend: a bucket holds B blocks, each m x n with m <= n.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesotron.optim import triton
from mesotron.optim.step import Member, group_filter
from mesotron.optim.triton.filter import WORK_DTYPE
from mesotron.optim.views import View
from mesotron.spectral import Filter
from mesotron.spectral.scale import step_scale

# A larger bucket is cut, since two copies of it are live; shorter ones fill the last wave of a
# product worse (4% of a step from 640 to 256 MiB on Qwen2.5-0.5B).
_PART_BYTES = 640 * 2**20
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SETTINGS = (
    "view", "filter", "steps", "promote", "cutoff", "rank", "nesterov", "scale", "name", "batched",
    "dtype", "fused",
)  # fmt: skip


class Layout(NamedTuple):
    """Where the blocks of a window start (in elements of the tensor) and their strides."""

    offsets: tuple[int, ...]
    row_stride: int
    column_stride: int


@dataclass
class Bucket:
    """Blocks that go through one sequence of launches. Lists and tensors have one entry a block."""

    filter: Filter
    shape: tuple[int, int]
    nesterov: bool
    members: list[int]
    groups: list[int]
    names: list[str]
    weights: Any  # WindowTables, whose module needs Triton
    grads: Any
    momenta: Any
    grad_offsets: list[int]
    scale: Tensor
    momentum_peak: Tensor


class _Block(NamedTuple):
    """One block while planning: whose it is, and (offset, row stride, column stride) in W, G, M."""

    member: int
    placed: tuple[tuple[int, int, int], ...]
    rows: int
    cols: int


def can_fuse(member: Member) -> bool:
    """Whether this parameter takes the kernels; the plain step is always correct instead."""
    p, group = member.param, member.group
    if group["fused"] is False or not triton.available(p.device):
        return False
    if group_filter(group).rank is not None or group["dtype"] is not None:
        return False
    tensors = (p, member.grad, member.momentum)
    if any(t.dtype not in _DTYPES for t in tensors):
        return False
    weight, grad, momentum = (_orientation(group["view"], p.shape, t.stride()) for t in tensors)
    return weight is not None and grad is not None and grad == momentum


@lru_cache(maxsize=4096)
def _orientation(
    view: str, shape: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[bool, ...] | None:
    """For each window of the view, whether its rows are contiguous; None if some block is not a
    plain strided matrix with one unit stride. Gradient and momentum share a kernel's tile, so
    theirs must agree."""
    tensor = torch.empty_strided(shape, stride, device="meta")
    layouts = [block_layout(window.wide) for window in View.parse(view).windows(tensor)]
    return tuple(x.column_stride == 1 for x in layouts if x) if all(layouts) else None


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


def signature(members: list[Member]) -> list:
    """Everything a plan depends on, cheap enough to compare at every step. Of a gradient's address
    that is its alignment: views into a communication bucket can start anywhere."""
    # The dict itself too: a plan reads lr, momentum and decay from the groups that it was made for.
    settings = {id(group): (id(group), *_settings(group)) for group in unique_groups(members)}
    return [
        (p.data_ptr(), M.data_ptr(), G.data_ptr() % 16, G.dtype, G.stride(), settings[id(group)])
        for p, G, M, group, _ in members
    ]


def _settings(group: dict[str, Any]) -> tuple:
    return (*(group[key] for key in _SETTINGS), _identity(group["momentum"]))


def _identity(value: float | Tensor) -> float | int:
    """Blocks share a launch if they share a momentum: the same number, or the same tensor."""
    return id(value) if isinstance(value, Tensor) else value


def unique_groups(members: list[Member]) -> list[dict[str, Any]]:
    """The groups of the members, in order."""
    return list({id(m.group): m.group for m in members}.values())


def make_buckets(members: list[Member]) -> list[Bucket]:
    """Buckets of all blocks of all members."""
    from mesotron.optim.triton.windows import LARGEST_GRID

    found: dict[tuple, list[_Block]] = defaultdict(list)
    for number, member in enumerate(members):
        group = member.group
        view = View.parse(group["view"])
        tensors = (member.param, member.grad, member.momentum)
        settings = (group_filter(group), group["nesterov"], _identity(group["momentum"]))
        dtypes = tuple(t.dtype for t in tensors)
        alone = None if group["batched"] else number
        for windows in zip(*(view.windows(t) for t in tensors), strict=True):
            key = (*settings, windows[0].block_shape, dtypes, alone)
            found[key] += _blocks(number, tensors, windows)
    buckets = []
    for (filter, nesterov, _, (m, n), _, _), blocks in found.items():
        size = min(max(1, _PART_BYTES // (m * n * WORK_DTYPE.itemsize)), LARGEST_GRID)
        count = -(-len(blocks) // size)
        for part in range(count):  # parts of equal size
            cut = slice(part * len(blocks) // count, (part + 1) * len(blocks) // count)
            buckets.append(_make_bucket(filter, (m, n), nesterov, blocks[cut], members))
    return buckets


def _blocks(number: int, tensors: tuple[Tensor, ...], windows: tuple) -> list[_Block]:
    layouts = []
    for window, tensor in zip(windows, tensors, strict=True):
        layout = block_layout(window.wide, int(tensor.storage_offset()))
        assert layout is not None  # `can_fuse` has looked
        layouts.append(layout)
    strides = [(layout.row_stride, layout.column_stride) for layout in layouts]
    blocks = []
    for offsets in zip(*(layout.offsets for layout in layouts), strict=True):
        placed = tuple((o, *s) for o, s in zip(offsets, strides, strict=True))
        blocks.append(_Block(number, placed, windows[0].rows, windows[0].cols))
    return blocks


def _make_bucket(
    filter: Filter,
    shape: tuple[int, int],
    nesterov: bool,
    blocks: list[_Block],
    members: list[Member],
) -> Bucket:
    from mesotron.optim.triton.pack import inspect
    from mesotron.optim.triton.windows import tabulate

    weights, grads, momenta = (
        tabulate([_view(members[b.member], which, b.placed[which], shape) for b in blocks])
        for which in range(3)
    )
    owners = [members[block.member].group for block in blocks]
    number = {id(group): i for i, group in enumerate(unique_groups(members))}
    scales = [step_scale(g["scale"], b.rows, b.cols) for g, b in zip(owners, blocks, strict=True)]
    itemsize = members[blocks[0].member].grad.element_size()
    return Bucket(
        filter=filter,
        shape=shape,
        nesterov=nesterov,
        members=[block.member for block in blocks],
        groups=[number[id(group)] for group in owners],
        names=[group["name"] for group in owners],
        weights=weights,
        grads=grads,
        momenta=momenta,
        grad_offsets=[block.placed[1][0] * itemsize for block in blocks],
        scale=torch.tensor(scales, device=members[0].param.device),
        momentum_peak=inspect(momenta),
    )


def _view(
    member: Member, which: int, placed: tuple[int, int, int], shape: tuple[int, int]
) -> Tensor:
    tensor = (member.param, member.grad, member.momentum)[which]
    offset, row, column = placed
    return tensor.as_strided(shape, (row, column), tensor.storage_offset() + offset)
