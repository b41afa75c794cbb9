"""The spectral step on a CUDA GPU: few launches, no waiting, capturable in a CUDA graph.

The same step as `mesotron.optim.step`. Momentum, Nesterov, scaling, cast and packing are one launch
for a bucket, decay and write-back another; both run at memory speed.

In the filter every segment of the plan is in Gram form (one of length 1 is the standard step):
R = X X^T, a chain of m x m products that gives Q, then Q X. X is never divided by its norm: R is,
and the step size at the end. Blocks of at most 128 rows stay on chip instead.

Legend: X is [B, m, n] with m <= n; R, Z, Q are [B, m, m]; all are float16, summed in float32.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from itertools import chain, compress, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesotron.optim.device import rounding_seed
from mesotron.optim.matrix import Filtered, largest_eigenvalue
from mesotron.optim.registry import Group, State
from mesotron.optim.state import ParamStep
from mesotron.optim.stats import StepStats
from mesotron.optim.triton import adamw, elementwise
from mesotron.optim.triton.heads import filter_heads, largest_m
from mesotron.optim.triton.plan import (
    WORK_DTYPE,
    Bucket,
    can_fuse,
    group_settings,
    make_buckets,
    unique_groups,
)
from mesotron.optim.triton.symmetric import gram, num_parts, symmetric_product
from mesotron.spectral import SYMMETRIC, Filter, Segment, cheapest_plan, noise_edge
from mesotron.spectral.filters import aim

# Allowed growth of R's rounding error inside a Gram segment: [3, 2] for Muon's steps, [2, 2, 1] for
# Polar Express. With [2, 3] its error on a 1/k spectrum of 384 x 2048 was 2e-2, three quarters of
# the plain bfloat16 iteration's and growing with the size.
GRAM_TOLERANCE = 0.07

_log = logging.getLogger("mesotron")


class FusedStep:
    """Plans a step for a set of parameters once and runs it many times. What changes from step to
    step, the gradients' addresses and the groups' numbers, is in one small buffer that one copy
    refreshes; device tensors are read on the device. So the launches can be captured in a CUDA
    graph, and from the second run on the host only replays it."""

    def __init__(
        self,
        candidates: list[ParamStep],
        beside: list[list[ParamStep]],
        patience: int = 1,
    ) -> None:
        self._signature = _signature(candidates, beside)
        self._taken = [can_fuse(step) for step in candidates]
        self.beside = [all(map(adamw.can_fuse, steps)) for steps in beside]

        members = list(compress(candidates, self._taken))
        groups = [sorted(steps, key=_dtypes) for steps in compress(beside, self.beside)]
        device = candidates[0].param.device
        self._names = [m.group["name"] for m in members]
        self._buckets = make_buckets(members)
        self._entries = _shared_entries(self._buckets, device)
        self._adamw = _make_batches(groups, len(self._entries), len(unique_groups(members)))

        self._windows = _gradient_windows(self._buckets, members, groups)
        self._inputs = _Inputs(
            unique_groups(members) + [steps[0].group for steps in groups],
            len(self._windows),
            device,
        )

        owners = chain.from_iterable(bucket.groups for bucket in self._buckets)
        self._owners = torch.tensor(list(owners), device=device)
        self._peaks = _GradientPeaks(self._buckets, len(members), device)
        self._seeds = _first_seeds(self._buckets, members, device)

        # Runs before the capture; negative: never. What is left for the plain step cannot join.
        whole = all(self._taken) and all(self.beside) and device.type == "cuda"
        self._patience = patience if whole and members else -1
        self._graph: torch.cuda.CUDAGraph | None = None
        self._recorded = StepStats()

    def fits(self, candidates: list[ParamStep], beside: list[list[ParamStep]]) -> bool:
        return self._signature == _signature(candidates, beside)

    def run(
        self,
        candidates: list[ParamStep],
        beside: list[list[ParamStep]],
        stats: StepStats,
    ) -> list[ParamStep]:
        """Step the parameters that the kernels support, and the groups that `beside` marks; returns
        the other parameters, for the plain step."""
        everything = chain(candidates, chain.from_iterable(beside))
        self.refresh({step.number: step.grad.data_ptr() for step in everything})

        capturing = self._patience >= 0 and torch.cuda.is_current_stream_capturing()
        if self._graph is None and self._patience == 0 and not capturing:
            self._capture()

        if self._graph is not None and not capturing:
            self.replay(stats)
        else:
            self._launch(stats)
            self._patience -= self._patience > 0

        left = []
        for step, taken in zip(candidates, self._taken, strict=True):
            if not taken:
                left.append(step)

        return left

    def replayed(self, groups: list[Group], states: Mapping) -> "StepReplay | None":
        """For an optimizer whose steps are all in this plan; None before it is captured."""
        if self._graph is not None:
            return StepReplay(self, groups, states)

        return None

    def refresh(self, bases: Mapping[int, int] | Sequence[int]) -> None:
        """Upload the gradients' addresses, by the parameters' numbers, and the groups' numbers."""
        self._inputs.refresh([bases[number] + offset for number, offset in self._windows])

    def replay(self, stats: StepStats) -> None:
        self._graph.replay()
        stats.extend(self._recorded)

    def _launch(self, stats: StepStats, branch: torch.cuda.Stream | None = None) -> None:
        """On a second stream, if given, AdamW waits for memory while the filter computes."""
        numbers = self._inputs.numbers()
        main = torch.cuda.current_stream() if branch is not None else None
        if branch is not None:
            branch.wait_stream(main)  # pyright: ignore

        with torch.cuda.stream(branch) if branch is not None else nullcontext():
            for batches in self._adamw:
                adamw.run(batches, self._inputs.addresses, numbers[batches[0].group], stats)

        if self._buckets:
            self._launch_buckets(numbers[:, :3].float(), stats)

        if main is not None:
            main.wait_stream(branch)  # pyright: ignore

    def _launch_buckets(self, table: Tensor, stats: StepStats) -> None:
        """`table` has lr, weight decay and momentum of each group, float32 [groups, 3]."""
        self._entries[:, 0].copy_(self._inputs.addresses[: len(self._entries)])
        lr, decay = table.T[:2, self._owners]
        sizes = [len(bucket.groups) for bucket in self._buckets]
        rates = list(zip(lr.split(sizes), decay.split(sizes), strict=True))
        seeds = self._seeds.add_(1).unbind()  # on the device, so that a replay goes on

        peaks = self._peaks.find(self._buckets)
        for k, bucket in enumerate(self._buckets):
            mu = table[bucket.groups[0], 2]
            blocks = _run_bucket(
                bucket,
                peaks[k],
                mu,
                rates[k],
                seeds[k],
            )
            stats.lazy.append((bucket.names, *blocks))

        stats.finite.append((self._names, self._peaks.finite(peaks)))

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        recorded = StepStats()
        current = torch.cuda.current_stream()
        side = torch.cuda.Stream()
        side.wait_stream(current)

        try:
            with torch.cuda.stream(side):
                # Other threads may allocate or copy meanwhile.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._launch(recorded, branch=torch.cuda.Stream())
                finally:
                    graph.capture_end()
        except RuntimeError as error:  # also when memory is short
            _log.warning("the optimizer's step is not captured in a CUDA graph: %s", error)
            self._patience = -1
        else:
            self._graph = graph
            self._recorded = recorded

        current.wait_stream(side)


def _shared_entries(buckets: list[Bucket], device: torch.device) -> Tensor:
    """One table of all buckets' gradients, int64 [blocks, 3], of which each bucket keeps a part."""
    tables = [bucket.grads.entries for bucket in buckets]
    if not tables:
        return torch.empty(0, 3, device=device)

    entries = torch.cat(tables)
    parts = entries.split([len(table) for table in tables])
    for bucket, part in zip(buckets, parts, strict=True):
        bucket.grads = replace(bucket.grads, entries=part)

    return entries


def _gradient_windows(
    buckets: list[Bucket], members: list[ParamStep], groups: list[list[ParamStep]]
) -> list[tuple[int, int]]:
    """For each block, and then for each parameter of AdamW, the parameter's number and where its
    gradient begins in that parameter's, in bytes."""
    windows = []
    for bucket in buckets:
        for member, offset in zip(bucket.members, bucket.grad_offsets, strict=True):
            windows.append((members[member].number, offset))

    for steps in groups:
        windows += [(step.number, 0) for step in steps]

    return windows


def _first_seeds(buckets: list[Bucket], members: list[ParamStep], device: torch.device) -> Tensor:
    """64 bits for each bucket: it and its first parameter above, the step below, counted on the
    device."""
    step = max((m.group["step"] for m in members), default=0) - 1
    seeds = []
    for k, bucket in enumerate(buckets):
        first = members[bucket.members[0]].number
        stream = rounding_seed(0, first, k) >> 1
        seeds.append((stream << 32) + step)

    return torch.tensor(seeds, dtype=torch.int64, device=device)


class _Seen(NamedTuple):
    """What a replay depends on in one parameter."""

    param: Tensor
    address: int
    layout: tuple | None  # of its gradient; None without one
    state: State | None
    tensors: tuple  # of the state

    def is_unchanged(self, states: Mapping) -> bool:
        grad = self.param.grad
        layout = None if grad is None else _layout(grad)
        if layout != self.layout or self.param.data_ptr() != self.address:
            return False
        if grad is None:
            return True

        own = states[self.param]
        if own is not self.state:
            return False

        return all(x is y for x, y in zip(own.values(), self.tensors))


class StepReplay:
    """A captured step of a whole optimizer, replayed after a quick look at everything that it
    depends on: a tenth of a millisecond where planning looks for one."""

    def __init__(self, plan: FusedStep, groups: list[Group], states: Mapping) -> None:
        self._plan = plan
        self._groups = [(group, len(group["params"]), group_settings(group)) for group in groups]
        self._seen = [_look(p, states) for group in groups for p in group["params"]]

    def run(self, groups: list[Group], states: Mapping, stats: StepStats) -> bool:
        """Whether the step was made; if not, nothing was changed."""
        if not self._same_groups(groups):
            return False
        if not all(seen.is_unchanged(states) for seen in self._seen):
            return False
        if torch.cuda.is_current_stream_capturing():
            return False

        gradients = [seen.param.grad for seen in self._seen]
        self._plan.refresh([0 if grad is None else grad.data_ptr() for grad in gradients])
        self._plan.replay(stats)

        return True

    def _same_groups(self, groups: list[Group]) -> bool:
        if len(groups) != len(self._groups):
            return False

        for group, (old, size, settings) in zip(groups, self._groups):
            if group is not old or len(group["params"]) != size:
                return False
            if group_settings(group) != settings:
                return False

        return True


def _look(p: Tensor, states: Mapping) -> _Seen:
    layout = None if p.grad is None else _layout(p.grad)
    return _Seen(
        p,
        p.data_ptr(),
        layout,
        states.get(p),
        tuple(states.get(p, {}).values()),
    )


def _layout(grad: Tensor) -> tuple:
    # Of its address the alignment: views into a communication bucket can start anywhere.
    return grad.dtype, grad.stride(), grad.data_ptr() % 16


def _signature(members: list[ParamStep], beside: list[list[ParamStep]]) -> tuple[list, list]:
    """Everything a plan depends on, cheap enough to compare at every step."""
    settings = {id(group): group_settings(group) for group in unique_groups(members)}
    matrices = []
    for step in members:
        places = (step.param.data_ptr(), step.momentum.data_ptr())
        matrices.append((*places, *_layout(step.grad), settings[id(step.group)]))

    vectors: list[Any] = []
    for step in chain.from_iterable(beside):
        if step.group["rule"] == "adamw":
            tensors = (step.param, *(step.state[key] for key in ("exp_avg", "exp_avg_sq", "step")))
            places = [t.data_ptr() for t in tensors]
            vectors.append((*places, *_layout(step.grad), group_settings(step.group)))
        else:
            vectors.append(id(step.group))

    return matrices, vectors


def _dtypes(step: ParamStep) -> str:
    return f"{step.param.dtype} {step.grad.dtype}"


def _make_batches(
    groups: list[list[ParamStep]], first: int, number: int
) -> list[list[adamw.FusedBatch]]:
    """For each group its batches; their gradients' addresses begin at `first`, the groups' numbers
    at `number`."""
    all_batches = []
    for index, steps in enumerate(groups, start=number):
        batches = []
        for _, same in groupby(steps, key=_dtypes):
            batch = adamw.make_batch(list(same), index, first)
            batches.append(batch)
            first += len(batch.steps)

        all_batches.append(batches)

    return all_batches


class _Inputs:
    """The part of a step that the host decides: the gradients' addresses and, of each group, lr,
    weight decay, momentum, beta1, beta2 and eps."""

    def __init__(self, groups: list[Group], num_addresses: int, device: torch.device):
        self._groups = groups
        self._buffer = torch.zeros(num_addresses + 6 * len(groups), dtype=torch.int64).to(device)
        self.addresses = self._buffer[:num_addresses]
        self._last: list[float] | None = None
        self._captured: list[Tensor] = []

    def _settings(self) -> list[Any]:
        settings = []
        for group in self._groups:
            settings += [group["lr"], group["weight_decay"], group["momentum"]]
            settings += [*group["betas"], group["eps"]]

        return settings

    def refresh(self, addresses: list[int]) -> None:
        """Upload what has changed, without waiting."""
        numbers = [0.0 if isinstance(x, Tensor) else float(x) for x in self._settings()]
        if self._last == [*addresses, *numbers]:
            return

        self._last = [*addresses, *numbers]
        words = torch.tensor(numbers, dtype=torch.float64).view(torch.int64)

        source = torch.cat([torch.tensor(addresses, dtype=torch.int64), words])
        if self._buffer.is_cuda:
            source = source.pin_memory()
            if torch.cuda.is_current_stream_capturing():
                self._captured.append(source)  # replays read it again

        self._buffer.copy_(source, non_blocking=True)

    def numbers(self) -> Tensor:
        """[groups, 6] in float64; tensors are read where they are."""
        table = self._buffer[len(self.addresses) :].view(torch.float64)
        tensors = {i: x for i, x in enumerate(self._settings()) if isinstance(x, Tensor)}
        if tensors:
            table = table.clone()
            for i, x in tensors.items():
                table[i].copy_(x)

        return table.view(-1, 6)


def _run_bucket(
    bucket: Bucket,
    peak: Tensor,
    mu: Tensor,
    rates: tuple[Tensor, Tensor],
    seed: Tensor,
) -> tuple[Callable[[], tuple[Filtered, Tensor, int]], Callable[[], Tensor]]:
    """Step a bucket; returns its statistics as `StepStats.lazy` keeps them."""
    lr, decay = rates
    shape = (2, len(bucket.members), *bucket.shape)
    X, spare = torch.empty(shape, dtype=WORK_DTYPE, device=peak.device).unbind()

    packed = elementwise.update_momentum(
        bucket.grads,
        bucket.momenta,
        X,
        mu,
        peak,
        bucket.momentum_peak,
        nesterov=bucket.nesterov,
    )
    filtered, gain, squares = filter_blocks(X, packed, bucket.filter, spare)

    rounding = seed if bucket.weights.dtype == torch.bfloat16 else None
    energies = elementwise.write_back(
        bucket.weights,
        filtered,
        lr,
        decay,
        bucket.scale,
        peak,
        rounding,
        gain=gain,
    )

    alignments = elementwise.sample_alignment(bucket.grads, filtered, peak)

    def blocks() -> tuple[Filtered, Tensor, int]:
        passed = energies.sum(1) / gain.square()
        seen = Filtered(energies, packed.sumsq.sqrt(), squares.sum(1), passed)
        return seen, lr * bucket.scale, math.prod(bucket.shape)

    return blocks, lambda: elementwise.alignment_cosine(alignments)


class _GradientPeaks:
    """Peaks of the gradients, one per block; one that is not finite makes those of all blocks of
    its parameter infinite, so that the kernels leave it alone."""

    def __init__(self, buckets: list[Bucket], num_members: int, device: torch.device) -> None:
        owners: list[int] = []
        for bucket in buckets:
            owners += bucket.members

        self._sizes = [len(bucket.members) for bucket in buckets]
        self._owners = torch.tensor(owners, device=device)
        firsts = [owners.index(member) for member in range(num_members)]
        self._firsts = torch.tensor(firsts, device=device)
        self._shared = len(owners) > num_members

    def find(self, buckets: list[Bucket]) -> list[Tensor]:
        peaks = torch.empty(len(self._owners), dtype=torch.int32, device=self._owners.device)
        parts = list(peaks.split(self._sizes))
        for bucket, part in zip(buckets, parts, strict=True):
            elementwise.inspect(bucket.grads, part)

        if self._shared:
            bad = (peaks >= elementwise.INFINITY_BITS).int()
            worst = torch.zeros_like(self._firsts, dtype=torch.int32)
            worst.scatter_reduce_(0, self._owners, bad, "amax")
            peaks.copy_(torch.maximum(peaks, worst[self._owners] * elementwise.INFINITY_BITS))

        return parts

    def finite(self, peaks: list[Tensor]) -> Tensor:
        return torch.cat(peaks)[self._firsts] < elementwise.INFINITY_BITS


def filter_blocks(
    X: Tensor,
    packed: elementwise.Packed,
    filter: Filter,
    spare: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Filter every block of a bucket by any filter but low-rank. X is [B, m, n] float16 with |X| <=
    1, any scale per block; X and `spare`, like it, are both overwritten. Returns gain * f(X), [B,
    m, n], in one of the two; the gain, [B], by which the reader divides; and [B, parts], to be
    summed: sum sigma^4 / (sum sigma^2)^2 of each input block."""
    num, m, n = X.shape
    if m <= largest_m(X.device) and filter.cutoff is None:
        gain = math.sqrt(n)  # keeps the entries of an orthogonal result near 1
        out, seen = filter_heads(X, _coefficients(filter, X.device), out=X, gain=gain)
        return out, _constant(gain, num, X.device), seen.concentration[:, None]

    gain = packed.norm
    per_trace = packed.inverse_square
    squares = torch.empty(num, num_parts(num, m, X.device), dtype=torch.float32, device=X.device)
    R = gram(X, scale=per_trace, squares=squares)

    triples: Iterator = iter(filter.steps)
    if filter.cutoff is not None:
        R, gain, triples = _rescale_to_bound(R, gain, filter, (m, n))
        per_trace = gain.square().reciprocal()

    for k, segment in enumerate(fused_plan(m, n, filter)):
        # The kernel scales its float32 sums; cuBLAS would round them to float16 first and overflow.
        R = R if k == 0 else gram(X, scale=per_trace)
        with _exact_sums():
            torch.bmm(_chain(R, [next(triples) for _ in segment.steps]), X, out=spare)
        X, spare = spare, X

    return X, gain, squares


@lru_cache(maxsize=256)
def fused_plan(m: int, n: int, filter: Filter) -> tuple[Segment, ...]:
    """The cheapest segments in which float16 stays accurate; the standard form: one step each."""
    steps = filter.steepest_steps(m, n)
    roundoff = torch.finfo(WORK_DTYPE).eps / 2
    plan = cheapest_plan(
        m,
        n,
        steps,
        roundoff,
        SYMMETRIC,
        GRAM_TOLERANCE,
    )

    if plan[0].form == "standard":
        return tuple(Segment("gram", (step,)) for step in steps)

    return plan


@lru_cache(maxsize=64)
def _coefficients(filter: Filter, device: torch.device) -> Tensor:
    return torch.tensor(filter.steps, dtype=torch.float32, device=device)


@lru_cache(maxsize=64)
def _constant(value: float, num: int, device: torch.device) -> Tensor:
    return torch.full((num,), value, device=device)


@contextmanager
def _exact_sums() -> Iterator[None]:
    """Keep cuBLAS from adding partial sums in float16, as PyTorch allows it by default."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_fp16_reduced_precision_reduction
    settings.allow_fp16_reduced_precision_reduction = False

    try:
        yield
    finally:
        settings.allow_fp16_reduced_precision_reduction = before


def _chain(R: Tensor, triples: list[tuple]) -> Tensor:
    """Q with f(X) = Q X after these steps, Z = a I + b R + c R R in each. All factors commute, and
    the kernel keeps them symmetric: an unsymmetric part would grow from step to step."""
    Q = None
    for k, (a, b, c) in enumerate(triples):  # numbers, or [B] where each block has its own
        Z = symmetric_product(
            R,
            R,
            alpha=c,
            C=R,
            beta=b,
            diag=a,
        )

        Q = Z if Q is None else symmetric_product(Q, Z)
        if k < len(triples) - 1:
            R = symmetric_product(symmetric_product(R, Z), Z)

    return Q


def _rescale_to_bound(
    R: Tensor,
    gain: Tensor,
    filter: Filter,
    shape: tuple[int, int],
) -> tuple[Tensor, Tensor, Iterator]:
    """As in `matrix`: divide by the Schatten-8 norm and aim each block's own coefficients."""
    S = symmetric_product(R, R).float()
    bound = torch.linalg.vector_norm(S, dim=(1, 2)).pow(0.25)

    bound = torch.where(bound > 0, bound, 1.0)
    if filter.cutoff == "noise":
        t = noise_edge(*shape) / bound
    else:
        t = filter.cutoff * largest_eigenvalue(S).pow(0.25) / bound

    # In float32: a factor rounded to float16 would shift every threshold the same way.
    torch.mul(R, bound.square().reciprocal()[:, None, None], out=R)
    triples = []
    for _ in range(filter.num_steps(*shape)):
        triple, t = aim(t)
        triples.append(triple)

    return R, gain * bound, iter(triples)
