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
    samples: list[tuple[str, Tensor]] = field(default_factory=list)
    finite: list[tuple[list[str], Tensor]] = field(default_factory=list)
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
        x, g = update.flatten().float(), gradient.flatten().float()
        g = g / g.abs().amax().clamp_min(
            torch.finfo(torch.float32).tiny
        )  # 1e30 squared is not a float32
        self.samples.append((group, torch.stack([x.dot(g), x.dot(x), g.dot(g)])))

    def add_update(self, group: str, update: Tensor) -> None:
        """Record a sample of an elementwise rule's update (the change of the weights)."""
        self.updates.append((group, update.float().square().mean()))

    def add_finite(self, groups: list[str], finite: Tensor) -> None:
        """Record which parameters had a finite gradient and were stepped."""
        self.finite.append((groups, finite))

    def read(self) -> dict[str, float]:
        """Named floats, "<group>/<statistic>"; this is the only call that waits for the device."""
        out = self._read_blocks()
        for group, mean_square in self.updates:
            out[f"{group}/update_rms"] = mean_square.sqrt().item()
        cosines: dict[str, Tensor] = {}
        for group, sums in self.samples:
            cosines[group] = cosines.get(group, torch.zeros(3, device=sums.device)) + sums
        for group, (xg, xx, gg) in ((g, s.tolist()) for g, s in cosines.items()):
            # The step is minus the filtered direction: descent is a cosine of the two above zero.
            out[f"{group}/cosine"] = xg / (xx * gg) ** 0.5 if xx * gg > 0 else 0.0
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
            live = [b for b in blocks if b[0] > 0 and b[3] != 0] or [(0.0,) * 5]
            moved = sum(passed * size * size for _, _, passed, size, _ in blocks)
            out[f"{group}/update_rms"] = (moved / sum(b[4] for b in blocks)) ** 0.5
            out[f"{group}/concentration"] = sum(b[1] for b in live) / len(live)
            out[f"{group}/passed_rank"] = sum(b[2] for b in live) / len(live)
            out[f"{group}/dead_blocks"] = sum(b[2] < DEAD_NORM**2 for b in live) / len(live)
            out[f"{group}/blocks"] = float(len(blocks))
        return out

    def _read_skipped(self) -> dict[str, float]:
        out: dict[str, float] = {"skipped": 0.0}
        for groups, finite in self.finite:
            for group, ok in zip(groups, finite.tolist(), strict=True):
                key = f"{group}/skipped"
                out[key] = out.get(key, 0.0) + (not ok)
                out["skipped"] += not ok
        return out
