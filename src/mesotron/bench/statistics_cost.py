"""What `stats()` costs: a step with its statistics against the same step without them.

The library has no switch for this. Here the collectors are replaced by functions that do nothing,
and the two sums that the filter takes for them are timed by themselves and added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import torch

from mesotron.bench.shapes import Projection
from mesotron.bench.timing import Step, seconds
from mesotron.optim.precision import filter_dtype
from mesotron.optim.stats import StepStats


@contextmanager
def no_collectors() -> Iterator[None]:
    """Inside, the `add_` methods of StepStats do nothing."""
    kept = {name: f for name, f in vars(StepStats).items() if name.startswith("add_")}
    try:
        for name in kept:
            setattr(StepStats, name, lambda self, *values: None)
        yield
    finally:
        for name, method in kept.items():
            setattr(StepStats, name, method)


def statistics_share(
    step: Step, shapes: list[Projection], repeats: int, device: torch.device
) -> float:
    """The share of a step that its statistics take, from interleaved medians.

    The difference of two noisy times can come out slightly negative; it is reported as measured.
    """

    def without() -> None:
        with no_collectors():
            step()

    sums = filter_sums(shapes, device)
    times = [
        (seconds(step, device), seconds(without, device), seconds(sums, device))
        for _ in range(repeats)
    ]
    full, bare, reductions = (median(column) for column in zip(*times, strict=True))
    return (full - bare + reductions) / full


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
