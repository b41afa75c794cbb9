"""The search for each optimizer's best rate, and the ledger that lets it resume.

First every rate of a shared grid with the first seed; then neighbors are added until the best rate
has one on both sides; then the best and its neighbors run with every seed, again until the best by
mean has both. So no optimizer is judged at the edge of its grid, unless its loss is flat there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from scipy.stats import t as student_t

MAX_MOVES = 6  # of the best rate beyond the grid, or after more seeds
MIN_GAIN = 0.003  # nats per character; a search that gains less ends


class Point(NamedTuple):
    """A rate of the hidden matrices and one of the rest."""

    lr: float
    aux_lr: float | None


@dataclass
class Search:
    """One optimizer's search.

    Args:
        measure: (point, seed) -> held-out loss, infinite if the run diverged.
        lrs, aux_lrs: the grid; one aux rate means that it is not swept.
        seeds: the first one searches, all of them judge.
        extend: whether to go beyond the grid.
    """

    measure: Callable[[Point, int], float]
    lrs: tuple[float, ...]
    aux_lrs: tuple[float | None, ...]
    seeds: tuple[int, ...]
    extend: bool = True
    losses: dict[Point, dict[int, float]] = field(default_factory=dict)

    def run(self) -> Point:
        """Search; returns the point with the lowest mean loss over all seeds."""
        for aux_lr in self.aux_lrs:
            for lr in self.lrs:
                self._measure(Point(lr, aux_lr), self.seeds[:1])

        if self.extend:
            self._climb(self.seeds[:1])

        self._measure(self.best(self.seeds[:1]), self.seeds)
        if self.extend:
            self._climb(self.seeds)

        return self.best(self.seeds)

    def best(self, seeds: tuple[int, ...]) -> Point:
        """Lowest mean loss among the points that all these seeds have seen."""
        seen = [point for point, by_seed in self.losses.items() if set(seeds) <= set(by_seed)]
        return min(seen, key=lambda point: self._mean(point, seeds))

    def _mean(self, point: Point, seeds: tuple[int, ...]) -> float:
        return fmean(self.losses[point][seed] for seed in seeds)

    def _climb(self, seeds: tuple[int, ...]) -> None:
        for _ in range(MAX_MOVES):
            start = self.best(seeds)
            for point in self._neighbors(start):
                self._measure(point, seeds)

            best = self.best(seeds)
            if best == start or self._mean(start, seeds) - self._mean(best, seeds) < MIN_GAIN:
                return

    def _neighbors(self, point: Point) -> Iterable[Point]:
        for lr in beside(point.lr, {p.lr for p in self.losses}):
            yield Point(lr, point.aux_lr)

        if len(self.aux_lrs) > 1:
            known = {p.aux_lr for p in self.losses if p.aux_lr is not None}
            assert point.aux_lr is not None
            for aux_lr in beside(point.aux_lr, known):
                yield Point(point.lr, aux_lr)

    def _measure(self, point: Point, seeds: tuple[int, ...]) -> None:
        seen = self.losses.setdefault(point, {})
        for seed in seeds:
            if seed not in seen:
                seen[seed] = self.measure(point, seed)


def beside(value: float, known: Iterable[float]) -> tuple[float, float]:
    """The grid's values next to `value`; beyond the edge, as far as the last two are apart.

    Example:
        >>> beside(4.0, [1.0, 2.0, 4.0])
        (2.0, 8.0)
    """
    grid = sorted({*known})
    if len(grid) < 2:
        grid = [value / 2, value, value * 2]

    below = grid[0] ** 2 / grid[1]
    above = grid[-1] ** 2 / grid[-2]
    wide = [float(f"{below:.4g}"), *grid, float(f"{above:.4g}")]
    place = wide.index(value)
    return wide[place - 1], wide[place + 1]


def interval(values: list[float]) -> float | None:
    """Half the width of the 95% interval of the mean by Student's t; None for a single value.

    Example:
        >>> round(interval([1.0, 2.0, 3.0]), 3)
        2.484
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    return float(student_t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))


class Ledger:
    """Finished runs by their settings, appended to a JSONL file one by one.

    Args:
        path: the file, read at the start; None keeps results in memory only.
        fixed: values that belong to every key (corpus hash, device, versions).
    """

    def __init__(self, path: Path | None, fixed: dict[str, Any]) -> None:
        self.path = path
        self.fixed = fixed
        self.runs: dict[str, dict[str, Any]] = {}

        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                if line.endswith("}"):  # the last line of a killed run may be cut off
                    record = json.loads(line)
                    self.runs[record["key"]] = record

    def get_or_run(
        self, settings: dict[str, Any], run: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """The stored record of these settings, or a new one from `run`."""
        key = json.dumps({**settings, **self.fixed}, sort_keys=True)
        if key not in self.runs:
            self.runs[key] = {"key": key, **settings, **run()}
            self._append(self.runs[key])

        return self.runs[key]

    def _append(self, record: dict[str, Any]) -> None:
        if self.path is None:
            return

        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = self.path.read_bytes() if self.path.exists() else b""
        with self.path.open("a") as file:
            if written and not written.endswith(b"\n"):  # torn
                file.write("\n")
            file.write(json.dumps(record) + "\n")
