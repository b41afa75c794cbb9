"""Device meshes as boxes: which part of a DTensor each rank holds, and the group of all its ranks.

Plain arithmetic on shapes and placements; nothing is communicated except to make a process group
where PyTorch has none. Placements that leave no single box on a rank are refused.

Legend: a box is a (start, stop) per dimension, in the coordinates of the whole parameter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

Box = tuple[tuple[int, int], ...]
Coordinate = tuple[int, ...]


class Team(NamedTuple):
    """The ranks of a mesh as one process group, with their mesh coordinates in group order."""

    group: dist.ProcessGroup
    coordinates: tuple[Coordinate, ...]
    mesh_shape: tuple[int, ...]
    me: int


def team_of(mesh: DeviceMesh) -> Team:
    """The process group over all ranks of a mesh, of whatever number of dimensions.

    All ranks of the mesh must call it the first time, since it may have to make the group.
    """
    ranks = tuple(mesh.mesh.flatten().tolist())
    if mesh.ndim == 1:
        group = mesh.get_group()
    elif len(ranks) == dist.get_world_size():
        group = dist.group.WORLD
    else:
        group = _new_group(ranks, dist.group.WORLD)
    assert group is not None
    # A group orders its ranks by number, a mesh need not.
    shape = tuple(mesh.mesh.shape)
    places = dict(zip(ranks, itertools.product(*map(range, shape)), strict=True))
    order = dist.get_process_group_ranks(group)
    return Team(group, tuple(places[r] for r in order), shape, order.index(dist.get_rank()))


@cache
def _new_group(ranks: tuple[int, ...], world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Made once for each set of ranks; `world` is in the key because its end is the group's end."""
    return dist.new_group(ranks, use_local_synchronization=True)  # pyright: ignore


def local_box(
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Coordinate,
) -> Box:
    """The box of a DTensor that the rank at `coordinate` of the mesh holds.

    Example:
        >>> local_box((7, 4), (Shard(0),), (4,), (3,))  # chunks of 2, 2, 2 and 1
        ((6, 7), (0, 4))
    """
    box = [(0, n) for n in shape]
    # FSDP over tensor parallelism cuts what the inner parallelism has cut: strided goes last.
    order = sorted(range(len(placements)), key=lambda d: isinstance(placements[d], _StridedShard))
    for d in order:
        placement = placements[d]
        if placement.is_replicate():
            continue
        dim = _shard_dim(d, placements, mesh_shape)
        start, stop = box[dim]
        length = math.ceil((stop - start) / mesh_shape[d])
        start = min(start + length * coordinate[d], stop)
        box[dim] = (start, min(start + length, stop))
    return tuple(box)


def _shard_dim(d: int, placements: Sequence[Placement], mesh_shape: Sequence[int]) -> int:
    """The tensor dimension that mesh dimension `d` cuts into contiguous boxes, or a refusal."""
    placement = placements[d]
    if isinstance(placement, Shard):
        return placement.dim
    if isinstance(placement, _StridedShard):
        inner = [
            size
            for size, other in zip(mesh_shape[d + 1 :], placements[d + 1 :], strict=True)
            if isinstance(other, Shard) and other.dim == placement.dim
        ]
        if math.prod(inner) == placement.split_factor:
            return placement.dim
    raise ValueError(
        f"a parameter with placements {tuple(placements)} cannot be stepped: {placement} does not "
        "leave one contiguous box on each rank; use Shard and Replicate, as fully_shard does"
    )


def extent(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)
