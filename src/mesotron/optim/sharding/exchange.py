"""Who filters which matrix, and what travels: the plan of a sharded step.

Each rank of a mesh holds a box of every parameter. A parameter is cut into pieces that can be
filtered alone (stacked experts and heads apart, everything else whole), each piece gets one owner,
and two all-to-all exchanges carry the boxes to the owners and back. The plan is plain arithmetic on
shapes: every rank computes the same one and nothing is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

from mesotron.optim.sharding.mesh import Box, Coordinate, Team, extent, local_box
from mesotron.optim.views import View
from mesotron.spectral import Filter, cheapest_plan, plan_flops

# A piece stays with a rank that already holds it unless that rank would then have this many times
# its fair share of the work: moving a matrix costs less than waiting for a busy rank.
_HOME_SLACK = 1.1
_SVD_FLOPS = 20  # per m m n, of the exact low-rank reference


class Member(NamedTuple):
    """One sharded matrix parameter, as plain hashable data."""

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
    """What one rank sends or receives: `region` (slices) of item number `item`, `numel` elements.

    On the holder's side items are members (their local tensors), on the owner's side pieces."""

    item: int
    region: tuple[slice, ...]
    numel: int


@dataclass(frozen=True)
class Plan:
    """The exchanges from one rank's side; each list has one entry per rank of the group.

    Args:
        pieces: all pieces, in an order common to all ranks.
        owners: the rank that filters each piece.
        out: parcels of my local tensors for each owner.
        gathered: parcels of the pieces I own, from each holder.
        returned: parcels of the pieces I own, for every rank that holds a copy of them.
        back: parcels of my local tensors, from each owner.
        copies: for each member, the first of the ranks that hold my box.
    """

    me: int
    pieces: tuple[Piece, ...]
    owners: tuple[int, ...]
    out: list[list[Parcel]]
    gathered: list[list[Parcel]]
    returned: list[list[Parcel]]
    back: list[list[Parcel]]
    copies: tuple[int, ...]

    @property
    def owned(self) -> list[int]:
        """Numbers of the pieces that this rank filters."""
        return [k for k, owner in enumerate(self.owners) if owner == self.me]


@lru_cache(maxsize=32)
def make_plan(
    members: tuple[Member, ...],
    mesh_shape: tuple[int, ...],
    coordinates: tuple[Coordinate, ...],
    me: int,
) -> Plan:
    """Plan the exchanges of one step for the rank `me` of a group.

    Args:
        members: the matrices that step, in an order common to all ranks.
        mesh_shape: of the device mesh.
        coordinates: of each rank of the group in that mesh.
        me: the rank for which the parcels are listed.
    """
    num_ranks = len(coordinates)
    boxes = [
        [local_box(m.shape, m.placements, mesh_shape, place) for place in coordinates]
        for m in members
    ]
    pieces = tuple(
        piece for number, m in enumerate(members) for piece in _cut(number, m, num_ranks)
    )
    owners = assign_owners(pieces, boxes, num_ranks)
    out, gathered, returned, back = ([[] for _ in range(num_ranks)] for _ in range(4))
    for number, (piece, owner) in enumerate(zip(pieces, owners, strict=True)):
        for region, holders in _holders(piece, boxes[piece.member]).items():
            sender = max(holders, key=lambda r: _nearness(coordinates[r], coordinates[owner]))
            at_owner = _parcel(number, region, piece.box)
            at_holder = _parcel(piece.member, region, boxes[piece.member][me])
            if me == sender:
                out[owner].append(at_holder)
            if me in holders:
                back[owner].append(at_holder)
            if me == owner:
                gathered[sender].append(at_owner)
                for holder in holders:
                    returned[holder].append(at_owner)
    copies = tuple(held.index(held[me]) for held in boxes)
    return Plan(me, pieces, owners, out, gathered, returned, back, copies)


def assign_owners(
    pieces: Sequence[Piece], boxes: Sequence[Sequence[Box]], num_ranks: int
) -> tuple[int, ...]:
    """One owner per piece: the longest work first, each to a rank that holds it whole while that
    rank has room, else to the rank with the least to do.

    Args:
        pieces: what is to be filtered.
        boxes: [member][rank], the box that each rank holds.
        num_ranks: of the group.
    """
    fair = sum(piece.flops for piece in pieces) / num_ranks
    load = [0] * num_ranks
    owners = [0] * len(pieces)
    for number in sorted(range(len(pieces)), key=lambda k: (-pieces[k].flops, k)):
        piece = pieces[number]
        homes = [r for r in range(num_ranks) if _contains(boxes[piece.member][r], piece.box)]
        owner = min(homes or range(num_ranks), key=lambda r: (load[r], r))
        if load[owner] + piece.flops > _HOME_SLACK * fair:
            owner = min(range(num_ranks), key=lambda r: (load[r], r))
        owners[number] = owner
        load[owner] += piece.flops
    return tuple(owners)


def exchange(
    sources: Sequence[Tensor | None],
    out: list[list[Parcel]],
    targets: Sequence[Tensor | None],
    into: list[list[Parcel]],
    team: Team,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Cut parcels from `sources`, send all of them in one all-to-all, write those that arrive into
    `targets`.

    Args:
        sources: the tensors that the items of `out` number.
        out: parcels for each rank.
        targets: the tensors that the items of `into` number; written.
        into: parcels from each rank, in the order in which that rank cuts them.
        team: the ranks.
        dtype: in which the elements travel.
        device: of all the tensors.
    """
    send = torch.empty(sum(_sizes(out)), dtype=dtype, device=device)
    for region, part in _parts(sources, out, send):
        part.copy_(region)
    received = send
    if len(team.coordinates) > 1:
        received = torch.empty(sum(_sizes(into)), dtype=dtype, device=device)
        dist.all_to_all_single(received, send, _sizes(into), _sizes(out), group=team.group)
    for region, part in _parts(targets, into, received):
        region.copy_(part)


def _parts(
    items: Sequence[Tensor | None], parcels: list[list[Parcel]], buffer: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parcel as a region of its item and as a part of the flat buffer, in equal shapes."""
    flat = [parcel for per_rank in parcels for parcel in per_rank]
    for parcel, part in zip(flat, buffer.split([p.numel for p in flat]), strict=True):
        item = items[parcel.item]
        assert item is not None
        region = item[parcel.region]
        yield region, part.view(region.shape)


@cache
def block_shapes(view: str, shape: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """(number, rows, cols) of the matrices that a view finds in a tensor of this shape."""
    windows = View.parse(view).windows(torch.empty(shape, device="meta"))
    return tuple((w.num, w.rows, w.cols) for w in windows)


def _cut(number: int, member: Member, num_ranks: int) -> list[Piece]:
    """Cut a parameter along its first dimension into at most `num_ranks` pieces, where its blocks
    are apart along it. Sharded along it, each rank's box is then a piece if the blocks fit."""
    view, length = View.parse(member.view), member.shape[0]
    slabs = _slabs(view, length)
    size = length // slabs
    per_piece = math.ceil(slabs / num_ranks)
    pieces = []
    for first in range(0, slabs, per_piece):
        count = min(per_piece, slabs - first)
        box = ((first * size, (first + count) * size), *((0, n) for n in member.shape[1:]))
        part = view if view.layout == "stack" or slabs == 1 else replace(view, num=count)
        flops = sum(
            num * _flops(member.filter, min(rows, cols), max(rows, cols))
            for num, rows, cols in block_shapes(str(part), extent(box))
        )
        pieces.append(Piece(number, box, str(part), flops))
    return pieces


def _slabs(view: View, length: int) -> int:
    """Into how many equal slabs, independent of one another, the first dimension falls."""
    if view.layout == "stack":
        return length
    along_first = view.axis == ("cols" if view.transposed else "rows")
    even = view.num > 1 and not view.sizes and not view.groups
    return view.num if along_first and even else 1


@cache
def _flops(filter: Filter, m: int, n: int) -> int:
    if filter.rank is not None:
        return _SVD_FLOPS * m * m * n
    roundoff = torch.finfo(torch.float32).eps / 2
    return plan_flops(m, n, cheapest_plan(m, n, filter.steepest_steps(m, n), roundoff))


def _holders(piece: Piece, boxes: Sequence[Box]) -> dict[Box, list[int]]:
    """The parts of a piece that lie on different ranks, each with the ranks that hold it."""
    found: dict[Box, list[int]] = {}
    for rank, box in enumerate(boxes):
        region = tuple(
            (max(a, c), min(b, d)) for (a, b), (c, d) in zip(piece.box, box, strict=True)
        )
        if all(start < stop for start, stop in region):
            found.setdefault(region, []).append(rank)
    return found


def _parcel(item: int, region: Box, origin: Box) -> Parcel:
    """A region in coordinates of the box that it is read from or written to."""
    slices = tuple(
        slice(a - start, b - start) for (a, b), (start, _) in zip(region, origin, strict=True)
    )
    return Parcel(item, slices, math.prod(extent(region)))


def _nearness(a: Coordinate, b: Coordinate) -> int:
    return sum(x == y for x, y in zip(a, b, strict=True))


def _contains(outer: Box, inner: Box) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def _sizes(parcels: list[list[Parcel]]) -> list[int]:
    return [sum(p.numel for p in per_rank) for per_rank in parcels]
