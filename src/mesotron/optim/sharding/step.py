"""The sharded step: DTensor parameters (FSDP2, HSDP, tensor parallel), every matrix filtered once.

State lives on the shards. Directions travel to the owner of each matrix and filtered updates travel
back, one all-to-all each (`exchange`). Before that the ranks agree on which gradients are there and
finite, and afterwards they add up their statistics, so that every rank makes the same calls
whatever it holds. FSDP1 and ZeRO are refused (`groups`): flat shards are not matrices.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mesotron.optim.auxiliary import NEW_STATE, STEPS
from mesotron.optim.device import rounding_seed
from mesotron.optim.groups import Place
from mesotron.optim.sharding.agreement import Agreement, Part, agree, part_of, report_skipped
from mesotron.optim.sharding.exchange import Member, Plan, block_shapes, exchange, make_plan
from mesotron.optim.sharding.mesh import Team, extent, local_box, team_of
from mesotron.optim.stats import SAMPLE_ROWS, StepStats, move
from mesotron.optim.step import (
    direction,
    filter_and_apply,
    group_filter,
    momentum_of,
    step_weights,
    update_momentum,
    work_dtype,
)
from mesotron.optim.views import View, Window
from mesotron.spectral.scale import step_scale

Group = dict[str, Any]
States = MutableMapping[Tensor, dict[str, Any]]


@dataclass
class OwnerJob:
    """A whole piece on its owner: `pack` reads the direction in `whole`, `apply` overwrites it.

    Windows of unlike shape have unlike scales; their ratio to `reference` is applied here, and the
    rest of the step size by the holders, in the precision of their weights.
    """

    whole: Tensor
    group: Group
    view: str
    reference: float
    windows: list[Window] = field(init=False)

    def __post_init__(self) -> None:
        self.windows = View.parse(self.view).windows(self.whole)

    def pack(self, index: int, out: Tensor) -> None:
        out.copy_(self.windows[index].wide)

    def apply(self, index: int, filtered: Tensor, step_size: float | Tensor) -> None:
        window = self.windows[index]
        ratio = step_scale(self.group["scale"], window.rows, window.cols) / self.reference
        window.wide.copy_(filtered if ratio == 1 else filtered * ratio)

    def sample(self, index: int, rows: slice) -> Tensor | None:
        return None


def sharded_step(
    states: States, names: list[str], members: Sequence[Place], stats: StepStats
) -> None:
    """Step all sharded parameters; every rank that holds a part of any of them must call it.

    Args:
        states: of every parameter, as the optimizer keeps it.
        names: of all groups, in order.
        members: DTensor parameters, also those without a gradient here, in an order common to all
            ranks.
        stats: receives what a single process would have recorded, the same on every rank of a mesh.
    """
    meshes: dict[DeviceMesh, list[Part]] = {}
    for p, group, number in members:
        assert isinstance(p, DTensor)
        if p.device_mesh.get_coordinate() is not None:
            meshes.setdefault(p.device_mesh, []).append(part_of(p, group, number))
    for mesh, parts in meshes.items():
        _step_mesh(states, parts, team_of(mesh), names, stats)


def _step_mesh(
    states: States, parts: list[Part], team: Team, names: list[str], stats: StepStats
) -> None:
    for part in parts:
        _make_state(states, part)
    agreed = agree(parts, team)
    report_skipped(parts, agreed, team, stats)
    mine = StepStats()
    _step_auxiliary(states, parts, agreed, team, mine)
    groups, alignments = [], []
    for dtype, numbers in _spectral_parts(parts, agreed).items():
        alignments.append(_step_spectral(states, parts, numbers, dtype, agreed, team, mine))
        groups += [parts[k].group["name"] for k in numbers]
    totals = mine.totals(names, parts[0].weight.device)
    _share(totals, names, groups, alignments, team, stats)


def _make_state(states: States, part: Part) -> None:
    """State for every parameter, gradient or not: a distributed checkpoint wants equal keys on all
    ranks."""
    if not part.auxiliary:
        momentum_of(states[part.param], part.param, part.group)
    elif not states[part.param]:
        states[part.param].update(NEW_STATE[part.group["rule"]](part.param))


def _step_auxiliary(
    states: States,
    parts: list[Part],
    agreed: Agreement,
    team: Team,
    mine: StepStats,
) -> None:
    """AdamW or SGD on each rank's own elements; a group's parts are stepped together."""
    groups: dict[str, list[int]] = {}
    for k, part in enumerate(parts):
        if part.auxiliary:
            groups.setdefault(part.group["name"], []).append(k)
    for numbers in groups.values():
        kept, found_inf = _steppable(parts, numbers, agreed)
        kept = [k for k in kept if parts[k].weight.numel()]
        if not kept:
            continue
        local = [
            {key: _local(value) for key, value in states[parts[k].param].items()} for k in kept
        ]
        group = parts[kept[0]].group
        step = STEPS[group["rule"]]
        weights, grads = [parts[k].weight for k in kept], [parts[k].gradient() for k in kept]
        streams = [rounding_seed(0, parts[k].number, _first_holder(parts[k], team)) for k in kept]
        step(weights, grads, local, group, found_inf, mine, streams)


def _first_holder(part: Part, team: Team) -> int:
    """The first of the ranks that hold what this one holds: copies must be rounded alike."""
    shape, placements = part.param.shape, part.param.placements
    boxes = [local_box(shape, placements, team.mesh_shape, place) for place in team.coordinates]
    return boxes.index(boxes[team.me])


def _steppable(
    parts: list[Part], numbers: list[int], agreed: Agreement
) -> tuple[list[int], Tensor | None]:
    """Which auxiliary parts step; on devices that the host does not wait for, those with a gradient
    here, and a flag that stops the whole group."""
    if agreed.on_host:
        ok = agreed.ok.tolist()
        return [k for k in numbers if ok[k]], None
    finite = agreed.finite
    bad = ~finite.index_select(0, move(torch.tensor(numbers), finite.device)).all()
    return [k for k in numbers if parts[k].grad is not None], bad.float()


def _spectral_parts(parts: list[Part], agreed: Agreement) -> dict[torch.dtype, list[int]]:
    """The numbers of the parts to filter, by the dtype in which they travel."""
    known = agreed.ok.tolist() if agreed.on_host else [True] * len(parts)
    found: dict[torch.dtype, list[int]] = {}
    for k, part in enumerate(parts):
        if not part.auxiliary and known[k]:
            found.setdefault(_wire_dtype(part), []).append(k)
    return found


def _wire_dtype(part: Part) -> torch.dtype:
    """The filter's own dtype, so that nothing is lost or sent for nothing. Not the measured one of
    a CPU: ranks might measure differently."""
    device, weights = part.weight.device, part.weight.dtype
    if device.type == "cpu" and part.group["dtype"] is None:
        return torch.promote_types(weights, torch.float32)
    return work_dtype(part.group, weights, device)


def _step_spectral(
    states: States,
    parts: list[Part],
    numbers: list[int],
    dtype: torch.dtype,
    agreed: Agreement,
    team: Team,
    mine: StepStats,
) -> Tensor:
    """Filter and step the parts `numbers`; returns their `_alignment`, [len(numbers), 3]."""
    chosen = [parts[k] for k in numbers]
    plan = make_plan(
        tuple(_member(part, team) for part in chosen), team.mesh_shape, team.coordinates, team.me
    )
    ok = agreed.ok
    masks = [None if agreed.on_host else ok[k] for k in numbers]
    wholes: list[Tensor | None] = [None] * len(plan.pieces)
    for k in plan.owned:
        wholes[k] = torch.empty(extent(plan.pieces[k].box), dtype=dtype, device=ok.device)
    # Not kept in a variable: the directions are as large as the shards and no longer needed.
    exchange(
        [_direct(states, *pair) for pair in zip(chosen, masks, strict=True)],
        plan.out,
        wholes,
        plan.gathered,
        team,
        dtype,
        ok.device,
    )
    filter_and_apply(_jobs(plan, wholes, chosen), mine)
    updates: list[Tensor | None] = [torch.empty_like(p.weight, dtype=dtype) for p in chosen]
    exchange(wholes, plan.returned, updates, plan.back, team, dtype, ok.device)
    alignments = []
    for k, (part, mask, update) in enumerate(zip(chosen, masks, updates, strict=True)):
        assert update is not None
        # The same for all holders of a copy, another for every other shard.
        seed = rounding_seed(part.group["step"], part.number, plan.copies[k])
        step_size = part.group["lr"] * _reference_scale(part)
        step_weights(part.weight, update, step_size, part.group, mask, seed)
        alignments.append(_alignment(part, update, agreed.largest[numbers[k]], mask))
    return torch.stack(alignments)


def _member(part: Part, team: Team) -> Member:
    p, group = part.param, part.group
    box = local_box(p.shape, p.placements, team.mesh_shape, team.coordinates[team.me])
    if extent(box) != tuple(part.weight.shape):
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} with placements {p.placements} has "
            f"{tuple(part.weight.shape)} on this rank where {extent(box)} was expected: its "
            "shards are not even chunks; shard it with fully_shard or distribute_tensor"
        )
    return Member(tuple(p.shape), p.placements, group["view"], group_filter(group))


def _direct(states: States, part: Part, finite: Tensor | None) -> Tensor:
    """Update this rank's momentum; returns the direction, zero where nothing will be stepped."""
    grad, momentum = part.gradient(), _local(states[part.param]["momentum_buffer"])
    update_momentum(grad, momentum, part.group["momentum"], finite)
    U = direction(grad, momentum, part.group, finite)
    return U if finite is None else torch.where(finite, U, 0.0)


def _jobs(plan: Plan, wholes: list[Tensor | None], parts: list[Part]) -> list[OwnerJob]:
    jobs = []
    for k in plan.owned:
        whole, piece = wholes[k], plan.pieces[k]
        assert whole is not None
        part = parts[piece.member]
        jobs.append(OwnerJob(whole, part.group, piece.view, _reference_scale(part)))
    return jobs


def _reference_scale(part: Part) -> float:
    shapes = block_shapes(part.group["view"], tuple(part.param.shape))
    return max(step_scale(part.group["scale"], rows, cols) for _, rows, cols in shapes)


def _alignment(part: Part, update: Tensor, largest: Tensor, finite: Tensor | None) -> Tensor:
    """[x g, x x, g g] over some rows of this rank's update and gradient, to be added over ranks.

    Every element of a parameter has equally many copies, which leaves the cosine as it is."""
    if not update.numel():
        return torch.zeros(3, dtype=torch.float64, device=update.device)
    dim = part.param.ndim - 2 if View.parse(part.group["view"]).layout == "stack" else 0
    stride = max(1, part.param.shape[dim] // SAMPLE_ROWS)
    rows = (*[slice(None)] * dim, slice(None, None, stride))
    x, g = (t[rows].flatten().double() for t in (update, part.gradient()))
    g = g / largest.clamp_min(torch.finfo(torch.float32).tiny)
    if finite is not None:
        g = torch.where(finite, g, 0.0)
    return torch.stack([x.dot(g), x.dot(x), g.dot(g)])


def _share(
    totals: Tensor,
    names: list[str],
    groups: list[str],
    alignments: list[Tensor],
    team: Team,
    stats: StepStats,
) -> None:
    """Add the ranks' statistics up inside the step, so that reading them needs no other rank."""
    table = torch.cat([totals.flatten(), *(a.flatten() for a in alignments)])
    dist.all_reduce(table, group=team.group)
    stats.add_totals(names, table[: totals.numel()].view_as(totals))
    if groups:
        xg, xx, gg = table[totals.numel() :].view(-1, 3).unbind(1)
        length = (xx * gg).sqrt()
        stats.add_cosines(groups, torch.where(length > 0, xg / length, 0.0))


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
