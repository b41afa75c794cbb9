"""What `stats()` costs a step. The library has no switch for it, so the collectors are replaced.

On a CPU they are timed inside a step; on CUDA, where they only queue work, a step with collectors
that do nothing is compared. The two sums that the filter takes for them are timed apart and added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from mesotron.bench.shapes import Projection
from mesotron.bench.timing import Step, seconds
from mesotron.optim.device import filter_dtype
from mesotron.optim.stats import StepStats

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
    pairs = [(*measure(step, device), seconds(sums, device)) for _ in range(repeats)]
    whole, collectors, reductions = (median(column) for column in zip(*pairs, strict=True))
    return (collectors + reductions) / whole


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
