"""Who filters which matrix, and what is sent: the plan of a sharded step.

Each rank of a mesh holds a box of every parameter. A parameter is cut into pieces that can be
filtered alone (stacked experts and heads separately, everything else whole), each piece gets one
owner, and two all-to-all exchanges carry the boxes to the owners and back. The plan is plain
arithmetic on shapes and placements, so every rank computes the same one without communication.

Legend: a box is a (start, stop) per dimension, in the coordinates of the whole parameter.
"""

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from mesotron.optim.views import View
from mesotron.spectral import Filter, cheapest_plan, plan_flops

Box = tuple[tuple[int, int], ...]
Coordinate = tuple[int, ...]
# A piece stays with a rank that already holds it unless that rank would then have this many times
# its fair share of the work: moving a matrix costs less than waiting for a busy rank.
_HOME_SLACK = 1.1
_SVD_FLOPS = 20  # per m m n, of the exact low-rank reference


class Team(NamedTuple):
    """The ranks of a mesh as one process group."""

    group: dist.ProcessGroup
    coordinates: tuple[Coordinate, ...]  # in the mesh, in group order
    mesh_shape: tuple[int, ...]
    me: int  # this rank's index in the group


def team_of(mesh: DeviceMesh) -> Team:
    """The process group over all ranks of a mesh of any number of dimensions. All ranks of the mesh
    must call it the first time, since it may have to create the group."""
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
    # `world` is in the cache key because the group ends with it.
    return dist.new_group(ranks, use_local_synchronization=True)  # pyright: ignore


def local_box(
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Coordinate,
) -> Box:
    box = [(0, n) for n in shape]

    # FSDP over tensor parallelism cuts what the inner parallelism has cut: strided goes last.
    order = sorted(range(len(placements)), key=lambda d: isinstance(placements[d], _StridedShard))
    for d in order:
        if placements[d].is_replicate():
            continue

        dim = _shard_dim(d, placements, mesh_shape)
        start, stop = box[dim]
        length = math.ceil((stop - start) / mesh_shape[d])
        start = min(start + length * coordinate[d], stop)
        box[dim] = (start, min(start + length, stop))

    return tuple(box)


def _shard_dim(d: int, placements: Sequence[Placement], mesh_shape: Sequence[int]) -> int:
    """The tensor dimension that mesh dimension `d` cuts into contiguous boxes."""
    placement = placements[d]
    if isinstance(placement, Shard):
        return placement.dim

    if isinstance(placement, _StridedShard):
        inner = 1
        for size, other in zip(mesh_shape[d + 1 :], placements[d + 1 :], strict=True):
            if isinstance(other, Shard) and other.dim == placement.dim:
                inner *= size

        if inner == placement.split_factor:
            return placement.dim

    raise ValueError(
        f"a parameter with placements {tuple(placements)} cannot be stepped: {placement} does not "
        "leave one contiguous box on each rank; use Shard and Replicate, as fully_shard does"
    )


def extent(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


class ShardedMatrix(NamedTuple):
    """One sharded matrix parameter, as hashable data."""

    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    view: str
    filter: Filter


class Piece(NamedTuple):
    """A part of a parameter that is filtered alone: `box` of member number `member`."""

    member: int
    box: Box
    view: str
    flops: int


class Parcel(NamedTuple):
    """What one rank sends or receives: `region` (slices) of item number `item`. On the holder's
    side items are members (their local tensors), on the owner's side pieces."""

    item: int
    region: tuple[slice, ...]
    numel: int


class ExchangePlan(NamedTuple):
    """The exchanges from one rank's side; each list of parcels has one entry per rank."""

    me: int
    pieces: tuple[Piece, ...]  # in an order common to all ranks
    owners: tuple[int, ...]  # the rank that filters each piece
    out: list[list[Parcel]]  # parcels of my local tensors, for each owner
    gathered: list[list[Parcel]]  # of the pieces I own, from each holder
    returned: list[list[Parcel]]  # of the pieces I own, for every rank that holds a copy of them
    back: list[list[Parcel]]  # of my local tensors, from each owner
    copies: tuple[int, ...]  # for each member, the first of the ranks that hold my box

    @property
    def owned(self) -> list[int]:
        return [k for k, owner in enumerate(self.owners) if owner == self.me]


@lru_cache(maxsize=32)
def make_plan(
    members: tuple[ShardedMatrix, ...],
    mesh_shape: tuple[int, ...],
    coordinates: tuple[Coordinate, ...],
    me: int,
) -> ExchangePlan:
    """Plan the exchanges of one step for the rank `me` of a group; `members` are the matrices that
    step, in an order common to all ranks."""
    num_ranks = len(coordinates)
    boxes = []
    pieces: list[Piece] = []
    for number, member in enumerate(members):
        boxes.append(_boxes(member, mesh_shape, coordinates))
        pieces += _cut(number, member, num_ranks)

    owners = _assign_owners(pieces, boxes, num_ranks)
    plan = ExchangePlan(
        me=me,
        pieces=tuple(pieces),
        owners=owners,
        out=[[] for _ in coordinates],
        gathered=[[] for _ in coordinates],
        returned=[[] for _ in coordinates],
        back=[[] for _ in coordinates],
        copies=tuple(held.index(held[me]) for held in boxes),
    )

    for number, (piece, owner) in enumerate(zip(pieces, owners, strict=True)):
        for region, holders in _holders(piece, boxes[piece.member]).items():
            sender = _nearest(holders, owner, coordinates)
            at_owner = _parcel(number, region, piece.box)
            at_holder = _parcel(piece.member, region, boxes[piece.member][me])
            _add_parcels(plan, sender, owner, holders, at_owner, at_holder)

    return plan


def _boxes(
    member: ShardedMatrix, mesh_shape: tuple[int, ...], coordinates: tuple[Coordinate, ...]
) -> list[Box]:
    """What each rank holds of a parameter."""
    shape = member.shape
    return [local_box(shape, member.placements, mesh_shape, place) for place in coordinates]


def _nearest(holders: Sequence[int], owner: int, coordinates: tuple[Coordinate, ...]) -> int:
    """The holder with most mesh coordinates in common with the owner."""
    place = coordinates[owner]
    return max(holders, key=lambda rank: sum(map(operator.eq, coordinates[rank], place)))


def _add_parcels(
    plan: ExchangePlan,
    sender: int,
    owner: int,
    holders: Sequence[int],
    at_owner: Parcel,
    at_holder: Parcel,
) -> None:
    """One region of a piece: one holder sends it to the owner, and all get it back."""
    if plan.me == sender:
        plan.out[owner].append(at_holder)

    if plan.me in holders:
        plan.back[owner].append(at_holder)

    if plan.me == owner:
        plan.gathered[sender].append(at_owner)
        for holder in holders:
            plan.returned[holder].append(at_owner)


def _assign_owners(
    pieces: Sequence[Piece], boxes: Sequence[Sequence[Box]], num_ranks: int
) -> tuple[int, ...]:
    """One owner per piece: largest first, each to a rank that holds it whole while that rank is
    below its share, else to the least loaded rank. `boxes` is [member][rank]."""
    fair = sum(piece.flops for piece in pieces) / num_ranks
    load = [0] * num_ranks
    owners = [0] * len(pieces)

    def least_loaded(ranks: Sequence[int]) -> int:
        return min(ranks, key=lambda rank: (load[rank], rank))

    for number in sorted(range(len(pieces)), key=lambda k: (-pieces[k].flops, k)):
        piece = pieces[number]
        held = boxes[piece.member]
        homes = [rank for rank in range(num_ranks) if _contains(held[rank], piece.box)]

        owner = least_loaded(homes or range(num_ranks))
        if load[owner] + piece.flops > _HOME_SLACK * fair:
            owner = least_loaded(range(num_ranks))

        owners[number] = owner
        load[owner] += piece.flops

    return tuple(owners)


def _contains(outer: Box, inner: Box) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def exchange(
    sources: Sequence[Tensor | None],
    out: list[list[Parcel]],
    targets: Sequence[Tensor | None],
    into: list[list[Parcel]],
    team: Team,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Cut the parcels `out` (one list per rank) from `sources`, send all of them in one all-to-all
    as `dtype`, and write the received parcels `into` into `targets`. Items number the tensors;
    `into` is in the order in which the sender cuts."""
    sent = _sizes(out)
    awaited = _sizes(into)
    send = torch.empty(sum(sent), dtype=dtype, device=device)
    for region, part in _parts(sources, out, send):
        part.copy_(region)

    received = send
    if len(team.coordinates) > 1:
        received = torch.empty(sum(awaited), dtype=dtype, device=device)
        dist.all_to_all_single(
            received,
            send,
            awaited,
            sent,
            group=team.group,
        )

    for region, part in _parts(targets, into, received):
        region.copy_(part)


def _sizes(parcels: list[list[Parcel]]) -> list[int]:
    """The number of elements for each rank."""
    return [sum(parcel.numel for parcel in per_rank) for per_rank in parcels]


def _parts(
    items: Sequence[Tensor | None], parcels: list[list[Parcel]], buffer: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parcel as a region of its item and as a part of the flat buffer, in equal shapes."""
    flat = list(itertools.chain.from_iterable(parcels))
    sizes = [parcel.numel for parcel in flat]
    for parcel, part in zip(flat, buffer.split(sizes), strict=True):
        item = items[parcel.item]
        assert item is not None
        region = item[parcel.region]
        yield region, part.view(region.shape)


@cache
def block_shapes(view: str, shape: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """(number, rows, cols) of the matrices of a view in a tensor of this shape."""
    windows = View.parse(view).windows(torch.empty(shape, device="meta"))
    return tuple((w.num, w.rows, w.cols) for w in windows)


def _cut(number: int, member: ShardedMatrix, num_ranks: int) -> list[Piece]:
    """Cut a parameter along its first dimension into at most `num_ranks` pieces, if its blocks are
    separate along it. Sharded along it, each rank's box is then a piece if the blocks fit."""
    view = View.parse(member.view)
    length = member.shape[0]
    slabs = _num_slabs(view, length)
    size = length // slabs
    per_piece = math.ceil(slabs / num_ranks)

    pieces = []
    for first in range(0, slabs, per_piece):
        count = min(per_piece, slabs - first)
        box = ((first * size, (first + count) * size), *((0, n) for n in member.shape[1:]))
        part = view
        if view.layout != "stack" and slabs > 1:
            part = replace(view, num=count)

        flops = 0
        for num, rows, cols in block_shapes(str(part), extent(box)):
            flops += num * _flops(member.filter, min(rows, cols), max(rows, cols))

        pieces.append(Piece(number, box, str(part), flops))

    return pieces


def _num_slabs(view: View, length: int) -> int:
    """Into how many parts the first dimension can be cut without cutting a block."""
    if view.layout == "stack":
        return length

    first_axis = "cols" if view.transposed else "rows"
    is_even = view.num > 1 and not view.sizes and not view.groups
    if view.axis != first_axis or not is_even:
        return 1

    return view.num


@cache
def _flops(filter: Filter, m: int, n: int) -> int:
    if filter.rank is not None:
        return _SVD_FLOPS * m * m * n
    roundoff = torch.finfo(torch.float32).eps / 2
    return plan_flops(m, n, cheapest_plan(m, n, filter.steepest_steps(m, n), roundoff))


def _holders(piece: Piece, boxes: Sequence[Box]) -> dict[Box, list[int]]:
    """The regions of a piece on different ranks, each with the ranks that hold it."""
    holders: dict[Box, list[int]] = {}
    for rank, box in enumerate(boxes):
        pairs = zip(piece.box, box, strict=True)
        region = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in pairs)
        if all(start < stop for start, stop in region):
            holders.setdefault(region, []).append(rank)

    return holders


def _parcel(item: int, region: Box, origin: Box) -> Parcel:
    """A region in coordinates of the box that it is read from or written to."""
    slices = tuple(
        slice(a - start, b - start) for (a, b), (start, _) in zip(region, origin, strict=True)
    )
    return Parcel(item, slices, math.prod(extent(region)))
