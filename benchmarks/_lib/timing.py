"""Measuring a step: interleaved repeats, the bare products as a floor, memory, launches, graphs.

Times are seconds. On CUDA they come from events around a synchronised step, so that a step that
waits for the host is charged for it; on a CPU from the wall clock, or with one thread from that
thread's own clock, which other programs on the machine do not lengthen.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks._lib.shapes import Projection
from mesotron.optim.device import filter_dtype
from mesotron.optim.stats import StepStats

Step = Callable[[], object]
NUM_STEPS = 5  # of the plain iteration, three products each


def host_clock(device: torch.device) -> Callable[[], float]:
    """The clock for work on this device."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def seconds(step: Step, device: torch.device) -> float:
    """One timed call."""
    if device.type != "cuda":
        clock = host_clock(device)
        start = clock()
        step()
        return clock() - start

    first = torch.cuda.Event(enable_timing=True)
    last = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    first.record()
    step()
    last.record()
    torch.cuda.synchronize(device)
    return first.elapsed_time(last) / 1e3


def interleave(
    steps: Mapping[str, Step], repeats: int, device: torch.device, say: Callable[[str], None]
) -> dict[str, list[float]]:
    """Warm up, then time all steps in turn, so that a slow minute affects all of them."""
    for name, step in steps.items():
        say(f"{name}: warm-up")
        for _ in range(3 if device.type == "cuda" else 1):
            step()

    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats):
        for name, step in steps.items():
            say(f"{name}: {repeat + 1} of {repeats}")
            times[name].append(seconds(step, device))

    return times


def bare_products(shapes: list[Projection], dtype: torch.dtype, device: torch.device) -> Step:
    """The products of the plain iteration and nothing else: 15 for each matrix, batched by shape.

    Outputs are allocated once; the values are ordinary random numbers, since zeros would let a GPU
    draw less power and clock higher.
    """
    work: list[tuple[Tensor, ...]] = []
    for (m, n), count in Counter(shape.wide for shape in shapes).items():
        X = torch.randn(count, m, n, device=device).div_(n**0.5).to(dtype)
        A = torch.empty(count, m, m, device=device, dtype=dtype)
        work.append((X, A, torch.empty_like(A), torch.empty_like(X)))

    def run() -> None:
        for X, A, S, Y in work:
            for _ in range(NUM_STEPS):
                torch.bmm(X, X.mT, out=A)
                torch.bmm(A, A, out=S)
                torch.bmm(S, X, out=Y)

    return run


def peak_flops(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of one large product, the best median of two sizes."""
    best = 0.0
    for size in (4096, 8192) if device.type == "cuda" else (512, 1024):
        X = torch.randn(size, size, device=device).to(dtype)
        Y = torch.randn(size, size, device=device).to(dtype)
        product = partial(torch.mm, X, Y, out=torch.empty_like(X))
        times = [seconds(product, device) for _ in range(9)]
        best = max(best, 2 * size**3 / median(times[2:]))

    return best


def state_bytes(*optimizers: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in the optimizers' state."""
    total = 0
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    total += value.numel() * value.element_size()
    return total


def peak_extra_bytes(step: Step, device: torch.device) -> int:
    """Memory that one step takes beyond what is held before it, by the allocator's own count."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()

    assert recorded.profiler is not None
    assert recorded.profiler.kineto_results is not None

    events: list[Any] = list(recorded.profiler.kineto_results.events())
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")

    return max(accumulate((change for _, change in changes), initial=0))


def count_launches(step: Step, device: torch.device) -> int | None:
    """Kernels, copies and fills that one step puts on the GPU; None on a CPU, or where the
    profiler is not allowed to see them."""
    if device.type != "cuda":
        return None

    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        step()
        torch.cuda.synchronize(device)

    events = recorded.events() or []
    return sum(event.device_type.name == "CUDA" for event in events) or None


def captured_seconds(step: Step, repeats: int, device: torch.device) -> float | str | None:
    """Median time of the step replayed as a CUDA graph; the reason, if it cannot be captured."""
    if device.type != "cuda":
        return None

    graph = torch.cuda.CUDAGraph()
    try:
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))

        with torch.cuda.stream(side):
            step()

        torch.cuda.current_stream(device).wait_stream(side)
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        torch.cuda.synchronize(device)
        return str(error).splitlines()[0]

    graph.replay()
    return median(seconds(graph.replay, device) for _ in range(max(5, repeats)))


# --- what the optimizer's statistics cost ---

Method = Callable[..., Any]


@contextmanager
def replaced_collectors(replace: Callable[[Method], Method]) -> Iterator[None]:
    """Inside, each `add_` method of StepStats is `replace(method)`."""
    kept = {name: f for name, f in vars(StepStats).items() if name.startswith("add_")}
    try:
        for name, method in kept.items():
            setattr(StepStats, name, replace(method))
        yield
    finally:
        for name, method in kept.items():
            setattr(StepStats, name, method)


def statistics_share(
    step: Step, shapes: list[Projection], repeats: int, device: torch.device
) -> float:
    """The share of a step that its statistics take, from medians.

    On CUDA it is a difference of two times and can come out slightly negative.
    """
    measure = _difference if device.type == "cuda" else _inside
    sums = filter_sums(shapes, device)
    wholes = []
    collectors = []
    reductions = []
    for _ in range(repeats):
        whole, collected = measure(step, device)
        wholes.append(whole)
        collectors.append(collected)
        reductions.append(seconds(sums, device))
    return (median(collectors) + median(reductions)) / median(wholes)


def _inside(step: Step, device: torch.device) -> tuple[float, float]:
    """(time of a step, time its collectors took of it)."""
    spent: list[float] = []
    depth = 0

    def timed(method: Method) -> Method:
        def run(*values: Any) -> None:
            nonlocal depth
            depth += 1
            time = seconds(lambda: method(*values), device)
            depth -= 1

            if depth == 0:  # a collector may call another
                spent.append(time)

        return run

    with replaced_collectors(timed):
        whole = seconds(step, device)

    return whole, sum(spent)


def _difference(step: Step, device: torch.device) -> tuple[float, float]:
    """(time of a step, by how much it exceeds one whose collectors do nothing)."""
    whole = seconds(step, device)
    with replaced_collectors(lambda method: lambda *values: None):
        return whole, whole - seconds(step, device)


def filter_sums(shapes: list[Projection], device: torch.device) -> Step:
    """The squared norms of A and of the filtered X, for every shape."""
    dtype = filter_dtype(device)
    work = []
    for (m, n), count in Counter(shape.wide for shape in shapes).items():
        work += [torch.randn(count, m, k, device=device).to(dtype) for k in (m, n)]

    def run() -> None:
        for X in work:
            torch.linalg.vector_norm(X, dim=(1, 2), dtype=torch.float32).square()

    return run
