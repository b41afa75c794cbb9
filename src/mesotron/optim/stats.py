"""Statistics of a step, kept as tensors on the device and read on demand.

They come from quantities that the step computes anyway (the Gram matrix, the filtered matrix) and
from small samples, so they cost less than one percent of a step and force no synchronization.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from mesotron.optim.matrix import Filtered

# A block whose filtered norm is below this made practically no step (a full direction has norm 1).
DEAD_NORM = 1e-3
# Samples for the cosine: rows of a block, and blocks of a shape. Each sample is a dozen small
# operations, which at 192 x 576 on a CPU are as long as one product: sixteen cost 4% of a step.
SAMPLE_ROWS = 16
SAMPLE_WINDOWS = 4
SAMPLE_TENSORS = 16
SAMPLE_ELEMENTS = 1024


class _BlockRecord(NamedTuple):
    groups: list[str]
    filtered: Filtered
    step_size: Tensor
    numel: int

    def columns(self) -> Tensor:
        """[B, 7]: the first columns of `StepStats.totals` for each block."""
        passed = self.filtered.passed.double()
        step_size = move(self.step_size.double(), passed.device)
        one = torch.ones_like(passed)
        is_dead = passed < DEAD_NORM**2

        # A block without a gradient (an expert without tokens) says nothing about the filter.
        is_live = self.filtered.norm > 0
        of_live = []
        for x in (one, self.filtered.concentration.double(), passed, is_dead):
            of_live.append(torch.where(is_live, x, 0.0))

        moved = passed * step_size.square()
        return torch.stack([moved, one * self.numel, one, *of_live], dim=1)


@dataclass
class StepStats:
    """Collects the records of one step; `read` turns them into named floats."""

    blocks: list[_BlockRecord] = field(default_factory=list)
    updates: list[tuple[str, Tensor, int]] = field(default_factory=list)
    # The groups of a batch with the flags or the cosines of its members, [B].
    finite: list[tuple[list[str], Tensor]] = field(default_factory=list)
    cosines: list[tuple[list[str], Tensor]] = field(default_factory=list)
    # The groups with their `totals` over all ranks.
    shared: list[tuple[list[str], Tensor]] = field(default_factory=list)
    # A batch whose numbers are computed at each `read` and not in the step, so that they follow a
    # replayed graph: its groups, the arguments of `add_blocks` after them, and its cosines.
    lazy: list[tuple[list[str], Callable, Callable]] = field(default_factory=list)

    def extend(self, other: "StepStats") -> None:
        for name in ("blocks", "updates", "finite", "cosines", "shared", "lazy"):
            getattr(self, name).extend(getattr(other, name))

    def add_blocks(
        self,
        groups: list[str],
        filtered: Filtered,
        step_size: Tensor,
        numel: int,
    ) -> None:
        small = filtered._replace(X=filtered.norm)
        self.blocks.append(_BlockRecord(groups, small, step_size, numel))

    def add_sample(self, group: str, update: Tensor, gradient: Tensor) -> None:
        # In float64, where the square of 1e30 is an ordinary number.
        x = update.flatten().double()
        g = gradient.flatten().double()
        length = torch.linalg.vector_norm(x) * torch.linalg.vector_norm(g)
        cosine = (x.dot(g) / length).masked_fill(length == 0, 0.0)
        self.cosines.append(([group], cosine[None]))

    def add_update(self, group: str, update: Tensor) -> None:
        largest = update.abs().amax().float()
        # Divided by the largest, since the square of 1e30 is not a float32; zero stays zero.
        x = update.float() / largest.clamp_min(torch.finfo(torch.float32).tiny)
        self.updates.append((group, x.square().mean().sqrt() * largest, update.numel()))

    def totals(self, names: list[str], device: torch.device) -> Tensor:
        """[groups, 11] sums in float64, without waiting for the device. Columns, over a group's
        blocks: squared change, elements, number; over those with a gradient: number, concentration,
        passed directions, dead ones; of its elementwise updates: sum of squares, elements; of its
        cosines: sum, number."""
        sums = torch.zeros(len(names), 11, dtype=torch.float64, device=device)
        row = {name: k for k, name in enumerate(names)}

        def add(groups: list[str], first: int, columns: Tensor) -> None:
            index = move(torch.tensor([row[group] for group in groups]), device)
            part = sums[:, first : first + columns.shape[1]]
            part.index_add_(0, index, columns.to(device, torch.float64))

        for record in self.blocks:
            add(record.groups, 0, record.columns())

        for groups, blocks, _ in self.lazy:
            add(groups, 0, _BlockRecord(groups, *blocks()).columns())

        for group, rms, count in self.updates:
            square = rms.double().square() * count
            columns = torch.stack([square, torch.full_like(square, count)])
            add([group], 7, columns[None])

        for groups, cosines in self._all_cosines():
            add(groups, 9, torch.stack([cosines, torch.ones_like(cosines)], dim=1))

        for groups, totals in self.shared:
            add(groups, 0, totals)

        return sums

    def _all_cosines(self) -> Iterator[tuple[list[str], Tensor]]:
        yield from self.cosines
        for groups, _, cosines in self.lazy:
            yield groups, cosines()

    def read(self) -> dict[str, float]:
        named: dict[str, float] = {}
        names = self._names()
        rows = self.totals(names, torch.device("cpu")).tolist()
        for name, row in zip(names, rows, strict=True):
            for key, value in _means(row).items():
                named[f"{name}/{key}"] = value

        named["skipped"] = 0.0
        for groups, finite in self.finite:
            for group, ok in zip(groups, finite.tolist(), strict=True):
                for key in ("skipped", f"{group}/skipped"):
                    named[key] = named.get(key, 0.0) + (not ok)

        return named

    def _names(self) -> list[str]:
        """The groups that have records, sorted."""
        names = {group for group, *_ in self.updates}
        for groups, *_ in (*self.blocks, *self.cosines, *self.shared, *self.lazy):
            names.update(groups)

        return sorted(names)


def _means(row: list[float]) -> dict[str, float]:
    moved, elements, blocks, live, concentration, passed, dead, square, count, cosine, pairs = row
    means: dict[str, float] = {}
    if blocks:
        live = max(live, 1)
        means["update_rms"] = (moved / elements) ** 0.5
        means["concentration"] = concentration / live
        means["passed_rank"] = passed / live
        means["dead_blocks"] = dead / live
        means["blocks"] = blocks

    if count:
        means["update_rms"] = (square / count) ** 0.5

    if pairs:
        # The step is minus the update, so descent is a cosine above zero.
        means["cosine"] = cosine / pairs

    return means


def move(x: Tensor, device: torch.device) -> Tensor:
    if x.device.type == "cpu" and device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
