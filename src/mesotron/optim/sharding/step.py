"""The sharded step: DTensor parameters (FSDP2, HSDP, tensor parallel), each matrix filtered once.

State lives on the shards. Directions go to the owner of each matrix and filtered updates come back,
one all-to-all each (`exchange`). Before that one all-reduce agrees on which gradients exist and are
finite (a rank without a gradient must not leave the others waiting, and one rank's NaN must stop
the matrix on all of them), and afterwards one adds up the statistics, so every rank makes the same
calls whatever it holds. FSDP1 and ZeRO are rejected (`groups`): flat shards are not matrices.
"""

import logging
from collections import Counter
from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mesotron.optim.auxiliary import NEW_STATE, STEPS, Batch
from mesotron.optim.device import rounding_seed
from mesotron.optim.groups import AUXILIARY_RULES, Place
from mesotron.optim.leash import keep_start, pull
from mesotron.optim.sharding.exchange import (
    Member,
    Team,
    block_shapes,
    exchange,
    extent,
    local_box,
    make_plan,
    team_of,
)
from mesotron.optim.stats import SAMPLE_ROWS, StepStats, move
from mesotron.optim.step import (
    filter_and_apply,
    group_filter,
    momentum_of,
    on_host,
    step_weights,
    update_momentum,
    work_dtype,
)
from mesotron.optim.views import View
from mesotron.spectral.scale import step_scale

Group = dict[str, Any]
States = MutableMapping[Tensor, dict[str, Any]]
_log = logging.getLogger("mesotron")


class Part(NamedTuple):
    param: DTensor
    group: Group
    number: int  # in the optimizer
    weight: Tensor  # local, as the gradient
    grad: Tensor | None

    @property
    def auxiliary(self) -> bool:
        return self.group["rule"] in AUXILIARY_RULES

    def gradient(self) -> Tensor:
        """The local gradient; zeros where only other ranks have one."""
        return torch.zeros_like(self.weight) if self.grad is None else self.grad

    def reference_scale(self) -> float:
        shapes = block_shapes(self.group["view"], tuple(self.param.shape))
        return max(step_scale(self.group["scale"], rows, cols) for _, rows, cols in shapes)


class Agreement(NamedTuple):
    """What the ranks know together; one entry per part."""

    present: Tensor  # whether any rank has a gradient
    largest: Tensor  # the gradient's largest magnitude; infinite if it is not finite

    @property
    def finite(self) -> Tensor:
        return self.largest.isfinite()

    @property
    def ok(self) -> Tensor:
        return self.present & self.finite

    @property
    def on_host(self) -> bool:
        return on_host(self.largest)


class OwnerJob:
    """A whole piece on its owner: `pack` reads the direction in it, `apply` overwrites it. The
    ratio of a window's scale to `reference` is applied here, the rest of the step size by the
    holders, in the precision of their weights."""

    def __init__(self, whole: Tensor, group: Group, view: str, reference: float) -> None:
        self.group = group
        self.reference = reference
        self.lines = None
        self.finite = None
        self.windows = View.parse(view).windows(whole)

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
    """Step all sharded parameters; every rank that holds a part of any of them must call it."""
    meshes: dict[DeviceMesh, list[Part]] = {}
    for p, group, number in members:
        assert isinstance(p, DTensor)
        if p.device_mesh.get_coordinate() is None:
            continue

        grad = p.grad
        if grad is not None:
            assert isinstance(grad, DTensor)
            if grad.placements != p.placements:  # tensor parallel: pending sums
                grad = grad.redistribute(placements=p.placements)
            grad = grad.to_local()

        meshes.setdefault(p.device_mesh, []).append(
            Part(
                p,
                group,
                number,
                p.to_local(),
                grad,
            )
        )
        # State for every parameter, gradient or not: a distributed checkpoint needs equal keys on
        # all ranks.
        if group["rule"] not in AUXILIARY_RULES:
            momentum_of(states[p], p, group)
            keep_start(states[p], p, group)
        elif not states[p]:
            states[p].update(NEW_STATE[group["rule"]](p))

    for mesh, parts in meshes.items():
        _step_mesh(states, parts, team_of(mesh), names, stats)


def _step_mesh(
    states: States, parts: list[Part], team: Team, names: list[str], stats: StepStats
) -> None:
    agreed = _agree(parts, team)
    _report_skipped(parts, agreed, team, stats)
    local = StepStats()
    _step_auxiliary(states, parts, agreed, team, local)
    by_dtype: dict[torch.dtype, list[int]] = {}

    ok = agreed.ok.tolist() if agreed.on_host else [True] * len(parts)
    for k, part in enumerate(parts):
        if not part.auxiliary and ok[k]:
            by_dtype.setdefault(_wire_dtype(part), []).append(k)

    groups = []
    alignments = []
    for dtype, numbers in by_dtype.items():
        alignments.append(
            _step_spectral(
                states,
                parts,
                numbers,
                dtype,
                agreed,
                team,
                local,
            )
        )

        groups += [parts[k].group["name"] for k in numbers]

    # Statistics are summed inside the step, so that reading them needs no other rank.
    totals = local.totals(names, parts[0].weight.device)
    table = torch.cat([totals.flatten(), *(a.flatten() for a in alignments)])
    dist.all_reduce(table, group=team.group)
    stats.shared.append((names, table[: totals.numel()].view_as(totals)))

    if groups:
        xg, xx, gg = table[totals.numel() :].view(-1, 3).unbind(1)
        length = (xx * gg).sqrt()
        stats.cosines.append((groups, torch.where(length > 0, xg / length, 0.0)))


def _agree(parts: list[Part], team: Team) -> Agreement:
    num = len(parts)
    device = parts[0].weight.device
    table = torch.zeros(2 * num, dtype=torch.float64, device=device)
    present = [k for k, part in enumerate(parts) if part.grad is not None]
    filled = [k for k in present if parts[k].weight.numel()]

    if present:
        table.index_fill_(0, move(torch.tensor(present), device), 1.0)

    if filled:
        grads = [parts[k].grad for k in filled]
        peaks = torch.stack(list(torch._foreach_norm(grads, float("inf"))))  # pyright: ignore
        peaks = torch.where(peaks.isfinite(), peaks.double(), float("inf"))
        table.index_copy_(0, move(torch.tensor(filled) + num, device), peaks)

    dist.all_reduce(table, dist.ReduceOp.MAX, group=team.group)
    return Agreement(table[:num] > 0, table[num:])


def _report_skipped(parts: list[Part], agreed: Agreement, team: Team, stats: StepStats) -> None:
    """Record which gradients were finite; on the CPU, the first rank logs which were not."""
    finite = agreed.finite
    names = [part.group["name"] for part in parts]
    if agreed.on_host:
        bad = Counter(name for name, ok in zip(names, finite.tolist(), strict=True) if not ok)
        for name, count in bad.items() if team.me == 0 else ():
            text = "%d gradients in group %r are not finite on some rank: all ranks skip these"
            _log.warning(text, count, name)

        present = agreed.present.tolist()
        names = [name for name, here in zip(names, present, strict=True) if here]
        finite = finite[agreed.present]

    stats.finite.append((names, finite))


def _step_auxiliary(
    states: States, parts: list[Part], agreed: Agreement, team: Team, stats: StepStats
) -> None:
    """AdamW or SGD on each rank's own elements; a group's parts are stepped together."""
    groups: dict[str, list[int]] = {}
    for k, part in enumerate(parts):
        if part.auxiliary:
            groups.setdefault(part.group["name"], []).append(k)

    for numbers in groups.values():
        if agreed.on_host:
            ok = agreed.ok.tolist()
            found_inf = None
            kept = [k for k in numbers if ok[k]]
        else:  # a flag on the device that stops the whole group
            index = move(torch.tensor(numbers), agreed.finite.device)
            found_inf = (~agreed.finite.index_select(0, index).all()).float()
            kept = [k for k in numbers if parts[k].grad is not None]

        kept = [k for k in kept if parts[k].weight.numel()]
        if not kept:
            continue

        chosen = [parts[k] for k in kept]
        local = [{key: _local(x) for key, x in states[part.param].items()} for part in chosen]
        group = chosen[0].group
        weights = [part.weight for part in chosen]
        grads = [part.gradient() for part in chosen]
        streams = [rounding_seed(0, part.number, _first_holder(part, team)) for part in chosen]

        batch = Batch(
            weights,
            grads,
            local,
            group,
            found_inf,
            streams,
        )

        STEPS[group["rule"]](batch, stats)


def _first_holder(part: Part, team: Team) -> int:
    """The first of the ranks that hold the same box as this one: copies must be rounded alike."""
    shape = part.param.shape
    placements = part.param.placements
    boxes = [local_box(shape, placements, team.mesh_shape, place) for place in team.coordinates]

    return boxes.index(boxes[team.me])


def _wire_dtype(part: Part) -> torch.dtype:
    """The filter's own dtype, so that nothing is lost or sent needlessly. On a CPU not the measured
    one: ranks might measure differently."""
    device = part.weight.device
    weights = part.weight.dtype
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
    stats: StepStats,
) -> Tensor:
    """Filter and step the parts `numbers`; returns their `_alignment`, [len(numbers), 3]."""
    chosen = [parts[k] for k in numbers]
    members = tuple(_member(part, team) for part in chosen)
    plan = make_plan(members, team.mesh_shape, team.coordinates, team.me)
    ok = agreed.ok
    masks = [None if agreed.on_host else ok[k] for k in numbers]

    wholes: list[Tensor | None] = [None] * len(plan.pieces)
    for k in plan.owned:
        wholes[k] = torch.empty(extent(plan.pieces[k].box), dtype=dtype, device=ok.device)

    directions = [_direct(states, *pair) for pair in zip(chosen, masks, strict=True)]
    exchange(
        directions,
        plan.out,
        wholes,
        plan.gathered,
        team,
        dtype,
        ok.device,
    )

    del directions  # as large as the shards
    jobs = []
    for k in plan.owned:
        whole = wholes[k]
        piece = plan.pieces[k]
        assert whole is not None
        part = chosen[piece.member]
        jobs.append(OwnerJob(whole, part.group, piece.view, part.reference_scale()))

    filter_and_apply(jobs, stats)
    updates: list[Tensor | None] = [torch.empty_like(p.weight, dtype=dtype) for p in chosen]
    exchange(
        wholes,
        plan.returned,
        updates,
        plan.back,
        team,
        dtype,
        ok.device,
    )

    alignments = []
    for k, (part, mask, update) in enumerate(zip(chosen, masks, updates, strict=True)):
        assert update is not None

        # The same for all holders of a copy, another for every other shard.
        seed = rounding_seed(part.group["step"], part.number, plan.copies[k])
        step_size = part.group["lr"] * part.reference_scale()
        step_weights(
            part.weight,
            update,
            step_size,
            part.group,
            mask,
            seed,
        )

        if part.group["leash"] is not None:
            pull(
                part.weight,
                states[part.param],
                part.group,
                mask,
                rounding_seed(seed, 0, 1),
            )

        alignments.append(_alignment(part, update, agreed.largest[numbers[k]], mask))

    return torch.stack(alignments)


def _member(part: Part, team: Team) -> Member:
    p = part.param
    group = part.group
    box = local_box(p.shape, p.placements, team.mesh_shape, team.coordinates[team.me])

    if extent(box) != tuple(part.weight.shape):
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} with placements {p.placements} has "
            f"{tuple(part.weight.shape)} on this rank, expected {extent(box)}: its shards are not "
            "even chunks; shard it with fully_shard or distribute_tensor"
        )

    return Member(tuple(p.shape), p.placements, group["view"], group_filter(group))


def _direct(states: States, part: Part, finite: Tensor | None) -> Tensor:
    """Update this rank's momentum; returns the direction, zero where nothing will be stepped."""
    grad = part.gradient()
    momentum = _local(states[part.param]["momentum_buffer"])
    U = update_momentum(grad, momentum, part.group, finite)

    return U if finite is None else torch.where(finite, U, 0.0)


def _alignment(part: Part, update: Tensor, largest: Tensor, finite: Tensor | None) -> Tensor:
    """[x g, x x, g g] over some rows of this rank's update and gradient, to be summed over ranks.
    Every element of a parameter has equally many copies, so the cosine is unaffected."""
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


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
