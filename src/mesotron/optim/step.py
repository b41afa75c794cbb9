"""The spectral step: momentum, one batch per block shape, filter, write back.

Matrices of one shape, transposes included, go through the filter together, whatever layer, head or
group they come from. Momentum lives on the whole parameter; only the filter looks at the blocks of
its view. Nothing here waits for the device, and `p.grad` is never written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mesotron.optim.device import filter_dtype, round_stochastically, rounding_seed
from mesotron.optim.matrix import apply_filter
from mesotron.optim.stats import SAMPLE_ROWS, SAMPLE_WINDOWS, StepStats
from mesotron.optim.views import View, Window
from mesotron.spectral import Filter, make_filter
from mesotron.spectral.scale import step_scale

Group = dict[str, Any]
# A batch larger than this is filtered in parts: the products are long enough by then, and memory is
# not free.
_BATCH_BYTES = 256 * 2**20


class Member(NamedTuple):
    """One parameter that lies whole on its device; `number` is its place in the optimizer."""

    param: Tensor
    grad: Tensor
    momentum: Tensor
    group: Group
    number: int


class Job(Protocol):
    """One parameter's share of a step: a source of directions and a sink of filtered ones, window
    by window."""

    group: Group
    windows: list[Window]

    def pack(self, index: int, out: Tensor) -> None:
        """Write the direction of window `index` into `out`, in the window's wide orientation."""
        ...

    def apply(self, index: int, filtered: Tensor, step_size: float | Tensor) -> None:
        """Take the filtered window, [like pack], and step by `step_size` times it."""
        ...

    def sample(self, index: int, rows: slice) -> Tensor | None:
        """Some rows of the gradient of window `index`, for the cosine; None where there is none to
        compare."""
        ...


@dataclass
class LocalJob:
    """A parameter that lies whole on this device.

    Args:
        member: its weights are written by `apply`, its gradient is read only, its momentum is
            already updated by `update_momentum`.
        finite: a 0-d bool tensor that masks the step, or None if the gradient is known to be
            finite.
    """

    member: Member
    finite: Tensor | None = None
    group: Group = field(init=False)
    windows: list[Window] = field(init=False)

    def __post_init__(self) -> None:
        self.group = self.member.group
        view = View.parse(self.group["view"])
        self.windows = view.windows(self.member.param)
        self._grads = view.windows(self.member.grad)
        self._momenta = view.windows(self.member.momentum)

    def pack(self, index: int, out: Tensor) -> None:
        G, M = self._grads[index].wide, self._momenta[index].wide
        out.copy_(direction(G, M, self.group, self.finite))

    def apply(self, index: int, filtered: Tensor, step_size: float | Tensor) -> None:
        seed = rounding_seed(self.group["step"], self.member.number, index)
        step_weights(self.windows[index].wide, filtered, step_size, self.group, self.finite, seed)

    def sample(self, index: int, rows: slice) -> Tensor | None:
        G = self._grads[index].wide[:, :, :, rows]
        return G if self.finite is None else torch.where(self.finite, G, 0.0)


def update_momentum(
    grad: Tensor, momentum: Tensor, mu: float | Tensor, finite: Tensor | None
) -> None:
    """M <- mu M + (1 - mu) G in place; M stays as it is where the gradient is not finite."""
    G = grad.to(momentum.dtype)
    if finite is not None:
        G = torch.where(finite, G, momentum)
    momentum.lerp_(G, 1 - mu)


def direction(grad: Tensor, momentum: Tensor, group: Group, finite: Tensor | None) -> Tensor:
    """What the filter sees: U = (1 - mu) G + mu M with Nesterov, else M itself; after
    `update_momentum`."""
    if not group["nesterov"]:
        return momentum
    G = grad.to(momentum.dtype)
    if finite is not None:
        G = torch.where(finite, G, momentum)
    return G.lerp(momentum, group["momentum"])


def step_weights(
    W: Tensor,
    filtered: Tensor,
    step_size: float | Tensor,
    group: Group,
    finite: Tensor | None,
    seed: int,
) -> None:
    """W <- (1 - lr wd) W - step_size X in place, where `finite`; bfloat16 is rounded at random."""
    decay = group["lr"] * group["weight_decay"]
    if finite is not None:
        step_size, decay = step_size * finite, decay * finite
    if W.dtype == torch.bfloat16:
        values = W.float() * (1 - decay) - filtered.float() * step_size
        round_stochastically(values, W, seed)
        return
    W.mul_(1 - decay)
    if isinstance(step_size, float):
        W.add_(filtered, alpha=-step_size)
    else:
        W.sub_(filtered * step_size)


def dense_grad(p: Tensor) -> Tensor:
    """The gradient; ValueError if it is sparse."""
    assert p.grad is not None
    if p.grad.layout != torch.strided:
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} has a sparse gradient: build its "
            "embedding with sparse=False"
        )
    return p.grad


def gradients_finite(grads: Sequence[Tensor]) -> Tensor:
    """One bool per gradient, on the device: no NaN and no infinity in it. Reads each gradient
    once."""
    largest = torch._foreach_norm(list(grads), float("inf"))  # pyright: ignore
    return torch.stack(list(largest)).isfinite()  # a float64 beyond float32's range is finite


def filter_and_apply(jobs: Iterable[Job], stats: StepStats) -> None:
    """Filter all windows of all jobs, batched by shape, and let each job apply its own."""
    buckets: dict[tuple, list[tuple[Job, int]]] = defaultdict(list)
    for order, job in enumerate(jobs):
        for index, window in enumerate(job.windows):
            alone = order if not job.group["batched"] else None
            dtype = work_dtype(job.group, window.strided.dtype, window.strided.device)
            key = (group_filter(job.group), *window.block_shape, dtype, alone)
            buckets[key, window.strided.device].append((job, index))
    for ((filter, m, n, dtype, _), device), members in buckets.items():
        for part in _parts(members, m * n * dtype.itemsize):
            _run_batch(part, filter, (m, n), dtype, device, stats)


def group_filter(group: Group) -> Filter:
    """The filter that a param group's plain values describe."""
    return make_filter(
        group["filter"],
        steps=group["steps"],
        promote=group["promote"],
        cutoff=group["cutoff"],
        rank=group["rank"],
    )


def momentum_dtype(group: Group, weights: torch.dtype) -> torch.dtype:
    """Of a group's momentum buffers for weights of this dtype: float32 or wider unless it says."""
    named = group["momentum_dtype"]
    return getattr(torch, named) if named else torch.promote_types(weights, torch.float32)


def momentum_of(state: dict[str, Any], p: Tensor, group: Group) -> Tensor:
    """The momentum buffer in a matrix parameter's state, made on first use; like the parameter,
    DTensor or not."""
    if not state:
        dtype = momentum_dtype(group, p.dtype)
        state["momentum_buffer"] = torch.zeros_like(p, dtype=dtype)
    return state["momentum_buffer"]


def work_dtype(group: Group, weights: torch.dtype, device: torch.device) -> torch.dtype:
    """In which a group's filter multiplies, for weights (or directions) of this dtype."""
    if group["dtype"] is not None:
        return getattr(torch, group["dtype"])
    if weights == torch.float64:
        return torch.float64
    if group_filter(group).rank is not None:
        return torch.float32  # an SVD has no use for fewer bits
    return filter_dtype(device)


def _parts(members: list[tuple[Job, int]], block_bytes: int) -> Iterable[list[tuple[Job, int]]]:
    part, size = [], 0
    for job, index in members:
        added = job.windows[index].num * block_bytes
        if part and size + added > _BATCH_BYTES:
            yield part
            part, size = [], 0
        part.append((job, index))
        size += added
    yield part


def _run_batch(
    members: list[tuple[Job, int]],
    filter: Filter,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    stats: StepStats,
) -> None:
    counts = [job.windows[index].num for job, index in members]
    X = torch.empty(sum(counts), *shape, dtype=dtype, device=device)
    for (job, index), block in zip(members, X.split(counts), strict=True):
        job.pack(index, block.view(job.windows[index].wide.shape))
    filtered = apply_filter(X, filter)
    sizes: list[float | Tensor] = []
    sampled = _spread(members)
    for (job, index), block in zip(members, filtered.X.split(counts), strict=True):
        window = job.windows[index]
        size = job.group["lr"] * step_scale(job.group["scale"], window.rows, window.cols)
        wide = block.view(window.wide.shape)
        job.apply(index, wide, size)
        if (id(job), index) in sampled:
            _sample_cosine(job, index, wide, stats)
        sizes += [size] * window.num
    names = [
        job.group["name"]
        for (job, _), count in zip(members, counts, strict=True)
        for _ in range(count)
    ]
    stats.add_blocks(names, filtered, _vector(sizes, device), shape[0] * shape[1])


def _vector(sizes: list[float | Tensor], device: torch.device) -> Tensor:
    """Numbers stay on the host, where making them into a tensor waits for nothing."""
    if any(isinstance(size, Tensor) for size in sizes):
        return torch.stack([torch.as_tensor(size, device=device) for size in sizes])
    return torch.tensor(sizes)


def _spread(members: list[tuple[Job, int]]) -> set[tuple[int, int]]:
    """At most `SAMPLE_WINDOWS` windows of each group, evenly spaced over the layers."""
    by_group: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for job, index in members:
        by_group[job.group["name"]].append((id(job), index))
    return {x for all_ in by_group.values() for x in all_[:: -(-len(all_) // SAMPLE_WINDOWS)]}


def _sample_cosine(job: Job, index: int, filtered: Tensor, stats: StepStats) -> None:
    stride = max(1, filtered.shape[3] // SAMPLE_ROWS)
    rows = slice(None, None, stride)
    gradient = job.sample(index, rows)
    if gradient is not None:
        stats.add_sample(job.group["name"], filtered[:, :, :, rows], gradient)
