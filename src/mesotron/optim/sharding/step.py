"""The sharded step: DTensor parameters (FSDP2, HSDP, tensor parallel), each matrix filtered once.

State lives on the shards. The ranks of a mesh step their parameters together:

    _agree             one all-reduce: which gradients exist, and which are finite
    _step_auxiliary    AdamW or SGD on each rank's own elements
    _step_spectral     directions go to the owner of each matrix, filtered updates come back, by one
                       all-to-all each (`exchange`)
    _share_statistics  one all-reduce

So every rank makes the same calls whatever it holds: a rank without a gradient must not leave the
others waiting, and one rank's NaN must stop the matrix on all of them. FSDP1 and ZeRO are rejected
(`groups`): flat shards are not matrices.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mesotron.config.rules import AUXILIARY_RULES
from mesotron.optim.device import rounding_seed
from mesotron.optim.elementwise import step_auxiliary
from mesotron.optim.finite import on_host
from mesotron.optim.leash import keep_start, pull
from mesotron.optim.registry import AuxiliaryBatch, Group, State
from mesotron.optim.sharding.exchange import (
    ExchangePlan,
    ShardedMatrix,
    Team,
    block_shapes,
    exchange,
    extent,
    local_box,
    make_plan,
    team_of,
)
from mesotron.optim.state import ParamStep, local_part, momentum_of
from mesotron.optim.stats import SAMPLE_ROWS, StepStats, move
from mesotron.optim.step import (
    filter_and_apply,
    group_filter,
    step_weights,
    update_momentum,
    work_dtype,
)
from mesotron.optim.views import View
from mesotron.spectral.scale import step_scale

_log = logging.getLogger("mesotron")


class Part(NamedTuple):
    """One parameter's share on this rank."""

    param: DTensor
    group: Group
    state: State
    number: int  # in the optimizer
    weight: Tensor  # local, as the gradient
    grad: Tensor | None

    @property
    def auxiliary(self) -> bool:
        return self.group["rule"] in AUXILIARY_RULES

    def gradient(self) -> Tensor:
        """The local gradient; zeros where only other ranks have one."""
        if self.grad is None:
            return torch.zeros_like(self.weight)

        return self.grad

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


class OwnedBlocks:
    """A whole piece on its owner: `pack` reads the direction in it, `apply` overwrites it. The
    ratio of a window's scale to `reference` is applied here, the rest of the step size by the
    holders, in the precision of their weights."""

    def __init__(self, whole: Tensor, part: Part, view: str) -> None:
        self.group = part.group
        self.number = part.number
        self.reference = part.reference_scale()
        self.lines: list[Tensor] | None = None
        self.finite: Tensor | None = None
        self.windows = View.parse(view).windows(whole)

    def pack(self, index: int, out: Tensor) -> None:
        out.copy_(self.windows[index].wide)

    def apply(self, index: int, filtered: Tensor, step_size: float | Tensor) -> None:
        window = self.windows[index]
        ratio = step_scale(self.group["scale"], window.rows, window.cols) / self.reference
        window.wide.copy_(filtered if ratio == 1 else filtered * ratio)

    def sample(self, index: int, rows: slice) -> Tensor | None:
        return None


def sharded_step(steps: Sequence[ParamStep], names: list[str], stats: StepStats) -> None:
    """Step all sharded parameters; every rank that holds a part of any of them must call it.
    `names` are those of all groups, for the statistics."""
    meshes: dict[DeviceMesh, list[Part]] = {}
    for step in steps:
        p = step.param
        assert isinstance(p, DTensor)
        if p.device_mesh.get_coordinate() is None:
            continue

        _prepare(step)
        meshes.setdefault(p.device_mesh, []).append(_part(step, p))

    for mesh, parts in meshes.items():
        _step_mesh(parts, team_of(mesh), names, stats)


def _part(step: ParamStep, p: DTensor) -> Part:
    grad = p.grad
    if grad is not None:
        assert isinstance(grad, DTensor)
        if grad.placements != p.placements:  # tensor parallel: pending sums
            grad = grad.redistribute(placements=p.placements)
        grad = grad.to_local()

    return Part(
        p,
        step.group,
        step.state,
        step.number,
        p.to_local(),
        grad,
    )


def _prepare(step: ParamStep) -> None:
    """State for every parameter, gradient or not: a distributed checkpoint needs equal keys on all
    ranks."""
    if step.group["rule"] not in AUXILIARY_RULES:
        momentum_of(step.state, step.param, step.group)
        keep_start(step.state, step.param, step.group)
    elif not step.state:
        step.state.update(AUXILIARY_RULES[step.group["rule"]].new_state(step.param))


def _step_mesh(parts: list[Part], team: Team, names: list[str], stats: StepStats) -> None:
    agreed = _agree(parts, team)
    _report_skipped(parts, agreed, team, stats)

    local = StepStats()
    for numbers in _auxiliary_groups(parts).values():
        _step_auxiliary([parts[k] for k in numbers], _among(agreed, numbers), team, local)

    groups = []
    alignments = []
    for dtype, numbers in _spectral_dtypes(parts, agreed).items():
        chosen = [parts[k] for k in numbers]
        alignments.append(
            _step_spectral(
                chosen,
                dtype,
                _among(agreed, numbers),
                team,
                local,
            )
        )
        groups += [part.group["name"] for part in chosen]

    totals = local.totals(names, parts[0].weight.device)
    _share_statistics(totals, names, alignments, groups, team, stats)


def _share_statistics(
    totals: Tensor,
    names: list[str],
    alignments: list[Tensor],
    groups: list[str],
    team: Team,
    stats: StepStats,
) -> None:
    """Sum the statistics inside the step, so that reading them needs no other rank."""
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

    present: list[int] = []
    filled: list[int] = []  # with elements on this rank
    grads: list[Tensor] = []
    for k, part in enumerate(parts):
        if part.grad is None:
            continue

        present.append(k)
        if part.weight.numel():
            filled.append(k)
            grads.append(part.grad)

    if present:
        table.index_fill_(0, move(torch.tensor(present), device), 1.0)

    if filled:
        peaks = torch.stack(list(torch._foreach_norm(grads, float("inf"))))  # pyright: ignore
        peaks = torch.where(peaks.isfinite(), peaks.double(), float("inf"))
        table.index_copy_(0, move(torch.tensor(filled) + num, device), peaks)

    dist.all_reduce(table, dist.ReduceOp.MAX, group=team.group)
    return Agreement(table[:num] > 0, table[num:])


def _among(agreed: Agreement, numbers: list[int]) -> Agreement:
    """What is agreed on some of the parts."""
    index = move(torch.tensor(numbers), agreed.largest.device)
    return Agreement(agreed.present.index_select(0, index), agreed.largest.index_select(0, index))


def _report_skipped(parts: list[Part], agreed: Agreement, team: Team, stats: StepStats) -> None:
    """Record which gradients were finite; on the CPU, the first rank logs which were not."""
    finite = agreed.finite
    names = [part.group["name"] for part in parts]
    if agreed.on_host:
        if team.me == 0:
            _log_skipped(names, finite)

        names = list(compress(names, agreed.present.tolist()))
        finite = finite[agreed.present]

    stats.finite.append((names, finite))


def _log_skipped(names: list[str], finite: Tensor) -> None:
    skipped = Counter(compress(names, (~finite).tolist()))
    for name, count in skipped.items():
        text = "%d gradients in group %r are not finite on some rank: all ranks skip these"
        _log.warning(text, count, name)


def _auxiliary_groups(parts: list[Part]) -> dict[str, list[int]]:
    """The numbers of the parts of each auxiliary group, which are stepped together."""
    groups: dict[str, list[int]] = {}
    for k, part in enumerate(parts):
        if part.auxiliary:
            groups.setdefault(part.group["name"], []).append(k)

    return groups


def _spectral_dtypes(parts: list[Part], agreed: Agreement) -> dict[torch.dtype, list[int]]:
    """The numbers of the matrices to step, by the dtype in which they travel."""
    ok = agreed.ok.tolist() if agreed.on_host else [True] * len(parts)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for k, part in enumerate(parts):
        if not part.auxiliary and ok[k]:
            by_dtype.setdefault(_wire_dtype(part), []).append(k)

    return by_dtype


def _step_auxiliary(parts: list[Part], agreed: Agreement, team: Team, stats: StepStats) -> None:
    """AdamW or SGD on this rank's own elements of one group."""
    if agreed.on_host:
        found_inf = None
        usable = agreed.ok.tolist()
    else:  # a flag on the device that stops the whole group
        found_inf = (~agreed.finite.all()).float()
        usable = [part.grad is not None for part in parts]

    chosen = [part for part in compress(parts, usable) if part.weight.numel()]
    if not chosen:
        return

    batch = AuxiliaryBatch(
        params=[part.weight for part in chosen],
        grads=[part.gradient() for part in chosen],
        states=[_local_state(part.state) for part in chosen],
        group=chosen[0].group,
        found_inf=found_inf,
        streams=[rounding_seed(0, part.number, _first_holder(part, team)) for part in chosen],
    )
    step_auxiliary(batch, stats)


def _local_state(state: State) -> State:
    return {key: local_part(value) for key, value in state.items()}


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
    parts: list[Part],
    dtype: torch.dtype,
    agreed: Agreement,
    team: Team,
    stats: StepStats,
) -> Tensor:
    """Filter and step the matrices of one dtype; returns their `_alignment`, [len(parts), 3]."""
    members = tuple(_member(part, team) for part in parts)
    plan = make_plan(members, team.mesh_shape, team.coordinates, team.me)
    device = agreed.largest.device
    masks = [None] * len(parts) if agreed.on_host else list(agreed.ok)

    wholes = _empty_pieces(plan, dtype, device)
    directions = [_direct(*pair) for pair in zip(parts, masks, strict=True)]
    exchange(
        directions,
        plan.out,
        wholes,
        plan.gathered,
        team,
        dtype,
        device,
    )
    del directions  # as large as the shards

    filter_and_apply(_owned_blocks(plan, wholes, parts), stats)

    updates = [torch.empty_like(part.weight, dtype=dtype) for part in parts]
    exchange(
        wholes,
        plan.returned,
        updates,
        plan.back,
        team,
        dtype,
        device,
    )

    alignments = []
    for k, (part, mask, update) in enumerate(zip(parts, masks, updates, strict=True)):
        _apply(part, update, mask, plan.copies[k])
        alignments.append(_alignment(part, update, agreed.largest[k], mask))

    return torch.stack(alignments)


def _empty_pieces(
    plan: ExchangePlan, dtype: torch.dtype, device: torch.device
) -> list[Tensor | None]:
    """Room for the pieces that this rank owns; None for those of others."""
    wholes: list[Tensor | None] = [None] * len(plan.pieces)
    for k in plan.owned:
        wholes[k] = torch.empty(extent(plan.pieces[k].box), dtype=dtype, device=device)

    return wholes


def _owned_blocks(
    plan: ExchangePlan, wholes: list[Tensor | None], parts: list[Part]
) -> list[OwnedBlocks]:
    blocks = []
    for k in plan.owned:
        whole = wholes[k]
        assert whole is not None

        piece = plan.pieces[k]
        blocks.append(OwnedBlocks(whole, parts[piece.member], piece.view))

    return blocks


def _apply(part: Part, update: Tensor, finite: Tensor | None, holder: int) -> None:
    """Step this rank's weights; `holder` is the first rank with a copy of them."""
    # The same for all holders of a copy, another for every other shard.
    seed = rounding_seed(part.group["step"], part.number, holder)
    step_size = part.group["lr"] * part.reference_scale()
    step_weights(
        part.weight,
        update,
        step_size,
        part.group,
        finite,
        seed,
    )

    if part.group["leash"] is not None:
        pull(
            part.weight,
            part.state,
            part.group,
            finite,
            rounding_seed(seed, 0, 1),
        )


def _member(part: Part, team: Team) -> ShardedMatrix:
    p = part.param
    group = part.group
    box = local_box(p.shape, p.placements, team.mesh_shape, team.coordinates[team.me])

    if extent(box) != tuple(part.weight.shape):
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} with placements {p.placements} has "
            f"{tuple(part.weight.shape)} on this rank, expected {extent(box)}: its shards are not "
            "even chunks; shard it with fully_shard or distribute_tensor"
        )

    return ShardedMatrix(tuple(p.shape), p.placements, group["view"], group_filter(group))


def _direct(part: Part, finite: Tensor | None) -> Tensor:
    """Update this rank's momentum; returns the direction, zero where nothing will be stepped."""
    momentum = local_part(part.state["momentum_buffer"])
    U = update_momentum(part.gradient(), momentum, part.group, finite)

    if finite is None:
        return U

    return torch.where(finite, U, 0.0)


def _alignment(part: Part, update: Tensor, largest: Tensor, finite: Tensor | None) -> Tensor:
    """[x g, x x, g g] over some rows of this rank's update and gradient, to be summed over ranks.
    Every element of a parameter has equally many copies, so the cosine is unaffected."""
    if not update.numel():
        return torch.zeros(3, dtype=torch.float64, device=update.device)

    if View.parse(part.group["view"]).layout == "stack":
        dim = part.param.ndim - 2
    else:
        dim = 0

    stride = max(1, part.param.shape[dim] // SAMPLE_ROWS)
    rows = (*[slice(None)] * dim, slice(None, None, stride))

    x = update[rows].flatten().double()
    g = part.gradient()[rows].flatten().double()
    g = g / largest.clamp_min(torch.finfo(torch.float32).tiny)
    if finite is not None:
        g = torch.where(finite, g, 0.0)

    return torch.stack([x.dot(g), x.dot(x), g.dot(g)])
