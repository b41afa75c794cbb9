"""The step of matrices, from gradients to weights.

    pack              M <- mu M + (1 - mu) G, and the direction U = (1 - mu) G + mu M of each block
    apply_filter      F = f(U), for all blocks of one shape together
    rule.finish       what the rule does to F, if anything
    apply             W <- (1 - lr wd) W - lr scale F

Blocks of one shape, transposes included, go through the filter together, whatever layer, head or
group they come from. Momentum lives on the whole parameter; only the filter looks at the blocks of
its view. Nothing here waits for the device, and `p.grad` is never written.

Legend: G gradient, M momentum, U direction, W weights, all of one parameter; X the directions of B
blocks, [B, m, n] with m <= n, and then the filtered ones.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mesotron.config.rules import SPECTRAL_RULES
from mesotron.optim.device import filter_dtype, round_stochastically, rounding_seed
from mesotron.optim.matrix import apply_filter, norm_bound
from mesotron.optim.registry import Finish, Group, Lines
from mesotron.optim.state import ParamStep
from mesotron.optim.stats import SAMPLE_ROWS, SAMPLE_WINDOWS, StepStats
from mesotron.optim.views import View, Window
from mesotron.spectral import Filter, make_filter
from mesotron.spectral.scale import step_scale

# Larger batches are filtered in parts: their products are long enough, and memory is not free.
_BATCH_BYTES = 256 * 2**20


class Blocks(Protocol):
    """The blocks of one parameter in a step, window by window: `pack` writes a direction in the
    window's wide orientation, `apply` steps by a filtered one, `sample` has rows of the
    gradient."""

    group: Group
    number: int  # of the parameter in the optimizer
    windows: list[Window]
    lines: list[Tensor] | None  # the rule's state of each window, [num, long side]
    finite: Tensor | None

    def pack(self, index: int, out: Tensor) -> None: ...

    def apply(self, index: int, filtered: Tensor, step_size: float | Tensor) -> None: ...

    def sample(self, index: int, rows: slice) -> Tensor | None: ...


class LocalBlocks:
    """Of an unsharded parameter; `pack` also updates the window's momentum. `finite` is a 0-d bool
    that masks the step, None if the gradient is known to be finite."""

    def __init__(self, step: ParamStep, finite: Tensor | None) -> None:
        self.group = step.group
        self.number = step.number
        self.finite = finite

        view = View.parse(step.group["view"])
        self.windows = view.windows(step.param)
        self._grads = view.windows(step.grad)
        self._momenta = view.windows(step.momentum)

        self.lines = None
        if step.lines is not None:
            self.lines = _split_lines(step.lines, self.windows)

    def pack(self, index: int, out: Tensor) -> None:
        G = self._grads[index].wide
        M = self._momenta[index].wide
        out.copy_(update_momentum(G, M, self.group, self.finite))

    def apply(self, index: int, filtered: Tensor, step_size: float | Tensor) -> None:
        W = self.windows[index].wide
        seed = rounding_seed(self.group["step"], self.number, index)
        step_weights(
            W,
            filtered,
            step_size,
            self.group,
            self.finite,
            seed,
        )

    def sample(self, index: int, rows: slice) -> Tensor | None:
        G = self._grads[index].wide[:, :, :, rows]
        if self.finite is None:
            return G

        return torch.where(self.finite, G, 0.0)


def _split_lines(lines: Tensor, windows: list[Window]) -> list[Tensor]:
    shapes = [(window.num, window.block_shape[1]) for window in windows]
    parts = lines.split([num * long_side for num, long_side in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


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
    if not group["nesterov"]:
        return momentum
    return grad.to(momentum.dtype).lerp(momentum, group["momentum"])


def step_weights(
    W: Tensor,
    X: Tensor,
    step_size: float | Tensor,
    group: Group,
    finite: Tensor | None,
    seed: int,
) -> None:
    """W <- (1 - lr wd) W - step_size X in place, where `finite`; bfloat16 rounds at random."""
    decay = group["lr"] * group["weight_decay"]
    if W.dtype == torch.bfloat16:
        mask = 1 if finite is None else finite
        values = W.float() * (1 - decay * mask) - X.float() * (step_size * mask)
        round_stochastically(values, W, seed)
        return

    if isinstance(decay, Tensor) or decay:
        W.mul_(1 - _masked(decay, finite))

    if isinstance(step_size, Tensor):
        W.addcmul_(X, _masked(step_size, finite), value=-1)
    elif finite is None:
        W.add_(X, alpha=-step_size)
    else:
        W.addcmul_(X, finite, value=-step_size)


def _masked(size: float | Tensor, finite: Tensor | None) -> Any:
    return size if finite is None else size * finite


def group_filter(group: Group) -> Filter:
    return make_filter(
        group["filter"],
        steps=group["steps"],
        promote=group["promote"],
        cutoff=group["cutoff"],
        rank=group["rank"],
    )


def work_dtype(group: Group, weights: torch.dtype, device: torch.device) -> torch.dtype:
    if group["dtype"] is not None:
        return getattr(torch, group["dtype"])
    if weights == torch.float64:
        return torch.float64
    if group_filter(group).rank is not None:
        return torch.float32  # an SVD has no use for fewer bits

    return filter_dtype(device)


class _Kind(NamedTuple):
    """What blocks must share to be filtered together."""

    filter: Filter
    shape: tuple[int, int]  # m, n
    dtype: torch.dtype
    device: torch.device
    finish: Finish | None
    beta2: float | None  # of `finish`
    alone: int | None  # a parameter that shares its batch with no other


class _Slot(NamedTuple):
    """One window of a parameter in a batch."""

    blocks: Blocks
    place: int  # of the window

    @property
    def window(self) -> Window:
        return self.blocks.windows[self.place]

    @property
    def step_size(self) -> float | Tensor:
        group = self.blocks.group
        return group["lr"] * step_scale(group["scale"], self.window.rows, self.window.cols)


def filter_and_apply(all_blocks: Iterable[Blocks], stats: StepStats) -> dict[int, Tensor]:
    """Step all blocks. Returns a bound on the spectral norm of the step of each leashed parameter
    whose rule has a finish: after it, the bound of the filter does not hold."""
    batches: dict[_Kind, list[_Slot]] = defaultdict(list)
    for order, blocks in enumerate(all_blocks):
        for index, window in enumerate(blocks.windows):
            batches[_kind(blocks, window, order)].append(_Slot(blocks, index))

    bounds: dict[int, Tensor] = {}
    for kind, slots in batches.items():
        for part in _parts(kind, slots):
            X = _step_batch(kind, part, stats)
            if kind.finish is not None:
                _keep_bounds(bounds, part, X)

    return bounds


def _keep_bounds(bounds: dict[int, Tensor], slots: list[_Slot], X: Tensor) -> None:
    if all(slot.blocks.group["leash"] is None for slot in slots):
        return

    counts = [slot.window.num for slot in slots]
    for slot, norms in zip(slots, norm_bound(X).split(counts), strict=True):
        bound = norms.amax() * slot.step_size
        number = slot.blocks.number
        bounds[number] = torch.maximum(bound, bounds.get(number, bound))


def _kind(blocks: Blocks, window: Window, order: int) -> _Kind:
    group = blocks.group
    device = window.strided.device
    has_lines = blocks.lines is not None

    return _Kind(
        filter=group_filter(group),
        shape=window.block_shape,
        dtype=work_dtype(group, window.strided.dtype, device),
        device=device,
        finish=SPECTRAL_RULES[group["rule"]].finish if has_lines else None,
        beta2=group["beta2"] if has_lines else None,
        alone=None if group["batched"] else order,
    )


def _parts(kind: _Kind, slots: list[_Slot]) -> Iterator[list[_Slot]]:
    m, n = kind.shape
    part: list[_Slot] = []
    size = 0

    for slot in slots:
        added = slot.window.num * m * n * kind.dtype.itemsize
        if part and size + added > _BATCH_BYTES:
            yield part
            part = []
            size = 0

        part.append(slot)
        size += added

    yield part


def _step_batch(kind: _Kind, slots: list[_Slot], stats: StepStats) -> Tensor:
    """Step the blocks of one batch; returns their filtered directions, [B, m, n]."""
    counts = [slot.window.num for slot in slots]
    X = torch.empty(sum(counts), *kind.shape, dtype=kind.dtype, device=kind.device)
    for slot, part in zip(slots, X.split(counts), strict=True):
        slot.blocks.pack(slot.place, part.view(slot.window.wide.shape))

    filtered = apply_filter(X, kind.filter)
    if kind.finish is not None and kind.beta2 is not None:
        filtered = filtered._replace(X=kind.finish(filtered.X, _lines(slots), kind.beta2))

    sizes: list[float | Tensor] = []
    names: list[str] = []
    sampled = _sampled(slots)
    for number, (slot, part) in enumerate(zip(slots, filtered.X.split(counts), strict=True)):
        size = slot.step_size
        slot.blocks.apply(slot.place, part.view(slot.window.wide.shape), size)
        if number in sampled:
            _sample_cosine(slot, part, stats)

        sizes += [size] * slot.window.num
        names += [slot.blocks.group["name"]] * slot.window.num

    m, n = kind.shape
    stats.add_blocks(names, filtered, _vector(sizes, kind.device), m * n)
    return filtered.X


def _lines(slots: list[_Slot]) -> list[Lines]:
    lines = []
    for blocks, place in slots:
        assert blocks.lines is not None
        lines.append(Lines(blocks.lines[place], blocks.finite))

    return lines


def _sampled(slots: list[_Slot]) -> set[int]:
    """Numbers of a few windows of each group, evenly spaced over the layers."""
    by_group: dict[str, list[int]] = defaultdict(list)
    for number, slot in enumerate(slots):
        by_group[slot.blocks.group["name"]].append(number)

    chosen = set()
    for numbers in by_group.values():
        stride = -(-len(numbers) // SAMPLE_WINDOWS)
        chosen.update(numbers[::stride])

    return chosen


def _sample_cosine(slot: _Slot, filtered: Tensor, stats: StepStats) -> None:
    wide = filtered.view(slot.window.wide.shape)
    rows = slice(None, None, max(1, wide.shape[3] // SAMPLE_ROWS))

    gradient = slot.blocks.sample(slot.place, rows)
    if gradient is not None:
        stats.add_sample(slot.blocks.group["name"], wide[:, :, :, rows], gradient)


def _vector(sizes: list[float | Tensor], device: torch.device) -> Tensor:
    if any(isinstance(size, Tensor) for size in sizes):
        return torch.stack([torch.as_tensor(size, device=device) for size in sizes])

    return torch.tensor(sizes)  # stays on the host, where creating it waits for nothing
