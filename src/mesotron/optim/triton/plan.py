"""Which blocks share a launch: buckets of equal blocks, m x n with m <= n, as tables of addresses.

A plan depends only on addresses, shapes and settings, so it is made once and kept until one of them
changes. It is the host's whole share of a fused step.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from mesotron.optim import triton
from mesotron.optim.registry import Group
from mesotron.optim.state import ParamStep
from mesotron.optim.step import group_filter
from mesotron.optim.triton import elementwise
from mesotron.optim.views import View
from mesotron.spectral import Filter
from mesotron.spectral.scale import step_scale

# 8 times closer to the exact filter than bfloat16 at the same speed, and in range once a block is
# scaled; the accuracy table of benchmarks/optim_step has both.
WORK_DTYPE = torch.float16
# A larger bucket is cut, since two copies of it are live; shorter ones fill the last wave of a
# product worse (4% of a step from 640 to 256 MiB on Qwen2.5-0.5B).
_PART_BYTES = 640 * 2**20
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SETTINGS = (
    "view",
    "filter",
    "steps",
    "promote",
    "cutoff",
    "rank",
    "nesterov",
    "scale",
    "name",
    "batched",
    "dtype",
    "fused",
)


@dataclass
class Bucket:
    """Blocks that go through one sequence of launches; lists and tensors have one entry a block."""

    filter: Filter
    shape: tuple[int, int]
    nesterov: bool
    members: list[int]
    groups: list[int]
    names: list[str]
    weights: elementwise.WindowTable
    grads: elementwise.WindowTable
    momenta: elementwise.WindowTable
    grad_offsets: list[int]
    scale: Tensor
    momentum_peak: Tensor


class _Block(NamedTuple):
    """One block: its parameter, its 2-D views of weight, gradient and momentum, and the size of
    the logical matrix."""

    member: int
    views: tuple[Tensor, ...]
    rows: int
    cols: int


def can_fuse(step: ParamStep) -> bool:
    p = step.param
    group = step.group
    if group["fused"] is False or step.lines is not None or not triton.available(p.device):
        return False
    if group_filter(group).rank is not None or group["dtype"] is not None:
        return False

    tensors = (p, step.grad, step.momentum)
    if any(t.dtype not in _DTYPES for t in tensors):
        return False

    weight, grad, momentum = (_orientation(group["view"], p.shape, t.stride()) for t in tensors)
    return weight is not None and grad is not None and grad == momentum


@lru_cache(maxsize=4096)
def _orientation(
    view: str, shape: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[bool, ...] | None:
    """For each window of the view, whether its rows are contiguous; None as in `_block_strides`.
    Gradient and momentum share a kernel's tile, so theirs must agree."""
    tensor = torch.empty_strided(shape, stride, device="meta")
    strides = [_block_strides(window.wide) for window in View.parse(view).windows(tensor)]
    if not all(strides):
        return None

    return tuple(s[1] == 1 for s in strides if s)


def _block_strides(wide: Tensor) -> tuple[int, int] | None:
    """Row and column stride of the blocks of a window [stack, cut, r1, r2, c1, c2]; None if a block
    is not a plain strided matrix with a unit stride."""
    _, _, r1, r2, c1, c2 = wide.shape
    s = wide.stride()
    if (r1 > 1 and s[2] != r2 * s[3]) or (c1 > 1 and s[4] != c2 * s[5]):
        return None

    row = s[3] if r2 > 1 else s[2]
    column = s[5] if c2 > 1 else s[4]

    if 1 not in (row, column):
        return None

    return row, column


def group_settings(group: Group) -> tuple:
    """What a plan takes from a group. Numbers are read at every step, from the dict the plan was
    made for; tensors are read on the device, so they must stay the same ones."""
    settings = [group[key] for key in _SETTINGS]
    values = (group["lr"], group["weight_decay"], *group["betas"], group["eps"])
    tensors = [id(value) if isinstance(value, Tensor) else None for value in values]

    return (id(group), *settings, _identity(group["momentum"]), *tensors)


def _identity(value: float | Tensor) -> float | int:
    # Blocks share a launch if they share a momentum: the same number, or the same tensor.
    return id(value) if isinstance(value, Tensor) else value


def unique_groups(members: list[ParamStep]) -> list[Group]:
    return list({id(m.group): m.group for m in members}.values())


class _StepKind(NamedTuple):
    """What the blocks of a bucket have in common."""

    filter: Filter
    nesterov: bool
    momentum: float | int
    shape: tuple[int, int]
    dtypes: tuple[torch.dtype, ...]
    alone: int | None


def make_buckets(members: list[ParamStep]) -> list[Bucket]:
    by_kind: dict[_StepKind, list[_Block]] = defaultdict(list)
    for number, member in enumerate(members):
        for kind, block in _blocks_of(member, number):
            by_kind[kind].append(block)

    buckets = []
    for kind, blocks in by_kind.items():
        m, n = kind.shape
        most = max(1, _PART_BYTES // (m * n * WORK_DTYPE.itemsize))
        count = -(-len(blocks) // min(most, elementwise.LARGEST_GRID))
        for part in range(count):  # parts of equal size
            cut = slice(part * len(blocks) // count, (part + 1) * len(blocks) // count)
            buckets.append(_make_bucket(kind, blocks[cut], members))

    return buckets


def _blocks_of(member: ParamStep, number: int) -> Iterator[tuple[_StepKind, _Block]]:
    group = member.group
    view = View.parse(group["view"])
    tensors = (member.param, member.grad, member.momentum)
    filter = group_filter(group)

    for windows in zip(*(view.windows(t) for t in tensors), strict=True):
        first = windows[0]
        kind = _StepKind(
            filter=filter,
            nesterov=group["nesterov"],
            momentum=_identity(group["momentum"]),
            shape=first.block_shape,
            dtypes=tuple(t.dtype for t in tensors),
            alone=None if group["batched"] else number,
        )

        blocks = [_block_views(window.wide) for window in windows]
        for views in zip(*blocks, strict=True):
            yield kind, _Block(number, views, first.rows, first.cols)


def _block_views(wide: Tensor) -> list[Tensor]:
    """The blocks of a window [stack, cut, r1, r2, c1, c2] as 2-D views."""
    stack, cut, r1, r2, c1, c2 = wide.shape
    strides = _block_strides(wide)
    assert strides is not None  # `can_fuse` has checked

    first = int(wide.storage_offset())
    s0, s1 = wide.stride()[:2]
    views = []
    for i in range(stack):
        for j in range(cut):
            offset = first + i * s0 + j * s1
            views.append(wide.as_strided((r1 * r2, c1 * c2), strides, offset))

    return views


def _make_bucket(kind: _StepKind, blocks: list[_Block], members: list[ParamStep]) -> Bucket:
    weights, grads, momenta = map(elementwise.tabulate, zip(*(block.views for block in blocks)))
    number = {id(group): i for i, group in enumerate(unique_groups(members))}

    groups = []
    names = []
    scales = []
    grad_offsets = []
    for block in blocks:
        member = members[block.member]
        groups.append(number[id(member.group)])
        names.append(member.group["name"])
        scales.append(step_scale(member.group["scale"], block.rows, block.cols))
        grad_offsets.append(block.views[1].data_ptr() - member.grad.data_ptr())

    return Bucket(
        filter=kind.filter,
        shape=kind.shape,
        nesterov=kind.nesterov,
        members=[block.member for block in blocks],
        groups=groups,
        names=names,
        weights=weights,
        grads=grads,
        momenta=momenta,
        grad_offsets=grad_offsets,
        scale=torch.tensor(scales, device=members[0].param.device),
        momentum_peak=elementwise.inspect(momenta),
    )
