"""What a step did, kept as tensors on the device and read only when asked for.

The numbers come from quantities that the step computes anyway (the Gram matrix, the filtered
matrix) and from small samples, so that they cost less than one percent of a step and force no
synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mesotron.optim.matrix import Filtered

# A block whose filtered norm is below this made no step to speak of (spec: a full direction has
# norm 1).
DEAD_NORM = 1e-3
SAMPLE_ROWS = 64
SAMPLE_TENSORS = 16
SAMPLE_ELEMENTS = 1024


@dataclass
class _Blocks:
    """One batch of filtered matrices; everything is [B], `groups` names each block's group."""

    groups: list[str]
    norm: Tensor
    concentration: Tensor
    passed: Tensor
    step_size: Tensor
    numel: int


@dataclass
class StepStats:
    """Collects the records of one step; `read` turns them into named floats."""

    blocks: list[_Blocks] = field(default_factory=list)
    finite: list[tuple[list[str], Tensor]] = field(default_factory=list)
    cosines: list[tuple[list[str], Tensor]] = field(default_factory=list)
    updates: list[tuple[str, Tensor]] = field(default_factory=list)

    def add_blocks(
        self, groups: list[str], filtered: Filtered, step_size: Tensor, numel: int
    ) -> None:
        """Record a filtered batch (a `mesotron.optim.matrix.Filtered`) and the factor of its
        step."""
        self.blocks.append(
            _Blocks(
                groups, filtered.norm, filtered.concentration, filtered.passed, step_size, numel
            )
        )

    def add_sample(self, group: str, update: Tensor, gradient: Tensor) -> None:
        """Record the cosine of update and gradient over equal-shaped samples of the two."""
        x, g = _largest_one(update.flatten().float()), _largest_one(gradient.flatten().float())
        length = (x.dot(x) * g.dot(g)).sqrt()
        self.add_cosines([group], torch.where(length > 0, x.dot(g) / length, 0.0)[None])

    def add_cosines(self, groups: list[str], cosines: Tensor) -> None:
        """Record the cosine of each block of a batch, [B]."""
        self.cosines.append((groups, cosines))

    def add_update(self, group: str, update: Tensor) -> None:
        """Record a sample of an elementwise rule's update (the change of the weights)."""
        largest = update.abs().amax().float()
        rms = _largest_one(update.float()).square().mean().sqrt()
        self.updates.append((group, rms * largest))

    def add_finite(self, groups: list[str], finite: Tensor) -> None:
        """Record which parameters had a finite gradient and were stepped."""
        self.finite.append((groups, finite))

    def read(self) -> dict[str, float]:
        """Named floats, "<group>/<statistic>"; this is the only call that waits for the device."""
        out = self._read_blocks()
        for group, rms in self.updates:
            out[f"{group}/update_rms"] = rms.item()
        out |= self._read_cosines()
        out |= self._read_skipped()
        return out

    def _read_blocks(self) -> dict[str, float]:
        rows: dict[str, list[tuple[float, ...]]] = {}
        for record in self.blocks:
            columns = (record.norm, record.concentration, record.passed, record.step_size)
            for group, *values in zip(record.groups, *(c.tolist() for c in columns), strict=True):
                rows.setdefault(group, []).append((*values, record.numel))
        out: dict[str, float] = {}
        for group, blocks in rows.items():
            # A block without a gradient (an expert without tokens) says nothing about the filter.
            live = [b for b in blocks if b[0] > 0]
            count = max(len(live), 1)
            moved = sum(passed * size * size for _, _, passed, size, _ in blocks)
            out[f"{group}/update_rms"] = (moved / sum(b[4] for b in blocks)) ** 0.5
            out[f"{group}/concentration"] = sum(b[1] for b in live) / count
            out[f"{group}/passed_rank"] = sum(b[2] for b in live) / count
            out[f"{group}/dead_blocks"] = sum(b[2] < DEAD_NORM**2 for b in live) / count
            out[f"{group}/blocks"] = float(len(blocks))
        return out

    def _read_cosines(self) -> dict[str, float]:
        """Mean over the group's blocks; the step is minus the update, so descent is above zero."""
        found: dict[str, list[float]] = {}
        for groups, cosines in self.cosines:
            for group, cosine in zip(groups, cosines.tolist(), strict=True):
                found.setdefault(group, []).append(cosine)
        return {f"{group}/cosine": sum(all_) / len(all_) for group, all_ in found.items()}

    def _read_skipped(self) -> dict[str, float]:
        out: dict[str, float] = {"skipped": 0.0}
        for groups, finite in self.finite:
            for group, ok in zip(groups, finite.tolist(), strict=True):
                key = f"{group}/skipped"
                out[key] = out.get(key, 0.0) + (not ok)
                out["skipped"] += not ok
        return out


def _largest_one(x: Tensor) -> Tensor:
    """x over its largest magnitude, since the square of 1e30 is not a float32; zero stays zero."""
    return x / x.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
