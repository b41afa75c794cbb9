"""The spectral step: momentum, one batch per block shape, filter, write back.

Matrices of one shape, transposes included, go through the filter together, whatever layer, head or
group they come from. Momentum lives on the whole parameter; only the filter looks at the blocks of
its view. Nothing here waits for the device, and `p.grad` is never written.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mesotron.optim.device import filter_dtype, round_stochastically, rounding_seed, wide_dtype
from mesotron.optim.matrix import apply_filter
from mesotron.optim.stats import SAMPLE_ROWS, SAMPLE_WINDOWS, StepStats
from mesotron.optim.views import View, Window
from mesotron.spectral import Filter, make_filter
from mesotron.spectral.scale import step_scale

Group = dict[str, Any]
# Larger batches are filtered in parts: their products are long enough, and memory is not free.
_BATCH_BYTES = 256 * 2**20
_LINE_EPS = 1e-8


class Member(NamedTuple):
    """One unsharded parameter; `number` is its index in the optimizer."""

    param: Tensor
    grad: Tensor
    momentum: Tensor
    group: Group
    number: int
    lines: Tensor | None = None  # NorMuon's second moments, one per line of each block


class Job(Protocol):
    """One parameter's share of a step, window by window: `pack` writes a direction in the window's
    wide orientation, `apply` steps by a filtered one, `sample` has rows of the gradient."""

    group: Group
    windows: list[Window]
    lines: list[Tensor] | None  # NorMuon's state of each window, [num, long side]
    finite: Tensor | None

    def pack(self, index: int, out: Tensor) -> None: ...

    def apply(self, index: int, filtered: Tensor, step_size: float | Tensor) -> None: ...

    def sample(self, index: int, rows: slice) -> Tensor | None: ...


class LocalJob:
    """An unsharded parameter; `pack` also updates the window's momentum. `finite` is a 0-d bool
    that masks the step, None if the gradient is known to be finite."""

    def __init__(self, member: Member, finite: Tensor | None) -> None:
        self.group = member.group
        self.number = member.number
        self.finite = finite
        view = View.parse(member.group["view"])
        tensors = (member.param, member.grad, member.momentum)
        self.windows, self._grads, self._momenta = (view.windows(tensor) for tensor in tensors)
        self.lines = None

        if member.lines is not None:
            shapes = [(w.num, w.block_shape[1]) for w in self.windows]
            parts = member.lines.split([num * long for num, long in shapes])
            self.lines = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def pack(self, index: int, out: Tensor) -> None:
        G = self._grads[index].wide
        M = self._momenta[index].wide
        out.copy_(update_momentum(G, M, self.group, self.finite))

    def apply(self, index: int, filtered: Tensor, step_size: float | Tensor) -> None:
        seed = rounding_seed(self.group["step"], self.number, index)
        step_weights(
            self.windows[index].wide,
            filtered,
            step_size,
            self.group,
            self.finite,
            seed,
        )

    def sample(self, index: int, rows: slice) -> Tensor | None:
        G = self._grads[index].wide[:, :, :, rows]
        return G if self.finite is None else torch.where(self.finite, G, 0.0)


def update_momentum(grad: Tensor, momentum: Tensor, group: Group, finite: Tensor | None) -> Tensor:
    """M <- mu M + (1 - mu) G in place; M is unchanged where the gradient is not finite. Returns
    `direction`."""
    G = grad.to(momentum.dtype)
    if finite is not None:
        G = torch.where(finite, G, momentum)

    momentum.lerp_(G, 1 - group["momentum"])
    return direction(G, momentum, group)


def direction(grad: Tensor, momentum: Tensor, group: Group) -> Tensor:
    """The filter's input: U = (1 - mu) G + mu M with Nesterov, else M; M is updated already."""
    mu = group["momentum"]
    nesterov = group["nesterov"]
    return grad.to(momentum.dtype).lerp(momentum, mu) if nesterov else momentum


def step_weights(
    W: Tensor, X: Tensor, step_size: float | Tensor, group: Group, finite: Tensor | None, seed: int
) -> None:
    """W <- (1 - lr wd) W - step_size X in place, where `finite`; bfloat16 rounds at random."""
    decay = group["lr"] * group["weight_decay"]
    if W.dtype == torch.bfloat16:
        mask = 1 if finite is None else finite
        values = W.float() * (1 - decay * mask) - X.float() * (step_size * mask)
        round_stochastically(values, W, seed)
        return

    if isinstance(decay, Tensor) or decay:
        W.mul_(1 - (decay if finite is None else decay * finite))

    if isinstance(step_size, Tensor):
        W.addcmul_(X, step_size if finite is None else step_size * finite, value=-1)
    elif finite is None:
        W.add_(X, alpha=-step_size)
    else:
        W.addcmul_(X, finite, value=-step_size)


def dense_grad(p: Tensor) -> Tensor:
    assert p.grad is not None
    if p.grad.layout != torch.strided:
        raise ValueError("a parameter has a sparse gradient: build its embedding with sparse=False")
    return p.grad


def on_host(flags: Tensor) -> bool:
    """Whether reading the flags does not make the host wait for a device."""
    return flags.device.type == "cpu"


def gradients_finite(grads: Sequence[Tensor]) -> Tensor:
    largest = torch._foreach_norm(list(grads), float("inf"))  # pyright: ignore
    return torch.stack(list(largest)).isfinite()  # a float64 beyond float32's range is finite


def group_filter(group: Group) -> Filter:
    keys = ("steps", "promote", "cutoff", "rank")
    return make_filter(group["filter"], **{key: group[key] for key in keys})


def momentum_dtype(group: Group, weights: torch.dtype) -> torch.dtype:
    named = group["momentum_dtype"]
    return getattr(torch, named) if named else torch.promote_types(weights, torch.float32)


def momentum_of(state: dict[str, Any], p: Tensor, group: Group) -> Tensor:
    """The momentum buffer in a matrix parameter's state, created on first use; a DTensor if the
    parameter is one."""
    if not state:
        state["momentum_buffer"] = torch.zeros_like(p, dtype=momentum_dtype(group, p.dtype))
    return state["momentum_buffer"]


def lines_of(state: dict[str, Any], p: Tensor, group: Group) -> Tensor | None:
    """NorMuon's second moments, created on first use; one vector for all blocks."""
    if group["rule"] != "normuon":
        return None

    if "line_moment" not in state:
        windows = View.parse(group["view"]).windows(p)
        size = sum(w.num * w.block_shape[1] for w in windows)
        state["line_moment"] = torch.zeros(size, dtype=wide_dtype(p.dtype), device=p.device)

    return state["line_moment"]


def work_dtype(group: Group, weights: torch.dtype, device: torch.device) -> torch.dtype:
    if group["dtype"] is not None:
        return getattr(torch, group["dtype"])
    if weights == torch.float64:
        return torch.float64
    if group_filter(group).rank is not None:
        return torch.float32  # an SVD has no use for fewer bits

    return filter_dtype(device)


def filter_and_apply(jobs: Iterable[Job], stats: StepStats) -> None:
    buckets: dict[tuple, list[tuple[Job, int]]] = defaultdict(list)
    for order, job in enumerate(jobs):
        alone = order if not job.group["batched"] else None
        for index, window in enumerate(job.windows):
            device = window.strided.device
            dtype = work_dtype(job.group, window.strided.dtype, device)
            beta2 = None if job.lines is None else job.group["beta2"]
            key = (group_filter(job.group), window.block_shape, dtype, device, beta2, alone)
            buckets[key].append((job, index))

    for key, members in buckets.items():
        _, (m, n), dtype, *_ = key
        part = []

        size = 0
        for job, index in members:
            added = job.windows[index].num * m * n * dtype.itemsize
            if part and size + added > _BATCH_BYTES:
                _run_batch(part, key, stats)
                part = []
                size = 0

            part.append((job, index))
            size += added

        _run_batch(part, key, stats)


def _run_batch(members: list[tuple[Job, int]], key: tuple, stats: StepStats) -> None:
    filter, shape, dtype, device, beta2, _ = key
    counts = [job.windows[index].num for job, index in members]

    X = torch.empty(sum(counts), *shape, dtype=dtype, device=device)
    for (job, index), block in zip(members, X.split(counts), strict=True):
        job.pack(index, block.view(job.windows[index].wide.shape))

    filtered = apply_filter(X, filter)
    if beta2 is not None:
        filtered = filtered._replace(X=_normalize_lines(filtered.X, members, beta2))

    # The cosine is sampled on a few windows of each group, evenly spaced over the layers.
    by_group: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for job, index in members:
        by_group[job.group["name"]].append((id(job), index))

    sampled = {x for all_ in by_group.values() for x in all_[:: -(-len(all_) // SAMPLE_WINDOWS)]}
    sizes: list[float | Tensor] = []

    names: list[str] = []
    for (job, index), block in zip(members, filtered.X.split(counts), strict=True):
        window = job.windows[index]
        name = job.group["name"]
        size = job.group["lr"] * step_scale(job.group["scale"], window.rows, window.cols)
        wide = block.view(window.wide.shape)
        job.apply(index, wide, size)

        if (id(job), index) in sampled:
            rows = slice(None, None, max(1, wide.shape[3] // SAMPLE_ROWS))
            gradient = job.sample(index, rows)
            if gradient is not None:
                stats.add_sample(name, wide[:, :, :, rows], gradient)

        sizes += [size] * window.num
        names += [name] * window.num

    if any(isinstance(size, Tensor) for size in sizes):
        vector = torch.stack([torch.as_tensor(size, device=device) for size in sizes])
    else:
        vector = torch.tensor(sizes)  # stays on the host, where creating it waits for nothing

    stats.add_blocks(names, filtered, vector, shape[0] * shape[1])


def _normalize_lines(X: Tensor, members: list[tuple[Job, int]], beta2: float) -> Tensor:
    """NorMuon: divide each line of the longer side by the root of its running mean square, and keep
    the block's norm. The lines of the shorter side have equal norms already, since X X^T = I."""
    states = [job.lines[index] for job, index in members if job.lines is not None]
    masks = [job.finite for job, _ in members]
    V = torch.cat(states)  # [B, n]

    new = V.lerp(X.to(V.dtype).square().mean(1), 1 - beta2)
    if masks[0] is not None:
        each = [
            mask.expand(len(state))
            for mask, state in zip(masks, states, strict=True)
            if mask is not None
        ]
        new = torch.where(torch.cat(each)[:, None], new, V)

    torch._foreach_copy_(states, list(new.split([len(state) for state in states])))  # pyright: ignore
    scaled = X / (new.sqrt() + _LINE_EPS)[:, None, :].to(X.dtype)
    norms = [torch.linalg.vector_norm(x, dim=(1, 2), dtype=V.dtype) for x in (X, scaled)]
    ratio = torch.where(norms[1] > 0, norms[0] / norms[1], 0.0)

    return scaled * ratio[:, None, None].to(X.dtype)
