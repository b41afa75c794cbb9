"""What the ranks of a mesh agree on before a sharded step: which gradients exist and are finite.

One all-reduce of a few numbers per parameter. A rank without a gradient (an empty shard, an unused
expert) must not leave the others waiting, and one rank's NaN must stop the matrix on all of them.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from mesotron.optim.groups import AUXILIARY_RULES
from mesotron.optim.sharding.mesh import Team
from mesotron.optim.stats import StepStats, move

Group = dict[str, Any]
_log = logging.getLogger("mesotron")


class Part(NamedTuple):
    """A rank's part of one parameter: the DTensor, its place in the optimizer, its local weights
    and its local gradient."""

    param: DTensor
    group: Group
    number: int
    weight: Tensor
    grad: Tensor | None

    @property
    def auxiliary(self) -> bool:
        """Stepped by AdamW or SGD."""
        return self.group["rule"] in AUXILIARY_RULES

    def gradient(self) -> Tensor:
        """The local gradient; zeros where other ranks have one and this rank has not."""
        return torch.zeros_like(self.weight) if self.grad is None else self.grad


class Agreement(NamedTuple):
    """What the ranks know together.

    Args:
        present: whether any rank has a gradient for each part, [parts] bool.
        largest: the gradient's largest magnitude, [parts]; infinite for what is not finite.
    """

    present: Tensor
    largest: Tensor

    @property
    def finite(self) -> Tensor:
        """[parts] bool."""
        return self.largest.isfinite()

    @property
    def ok(self) -> Tensor:
        """Which parts are stepped, [parts] bool."""
        return self.present & self.finite

    @property
    def on_host(self) -> bool:
        """Whether reading the flags does not make the host wait for a device."""
        return self.largest.device.type == "cpu"


def part_of(p: DTensor, group: Group, number: int) -> Part:
    """What this rank holds of a parameter and of its gradient, brought to the same placements."""
    grad = None
    if p.grad is not None:
        grad = p.grad
        assert isinstance(grad, DTensor)
        if grad.placements != p.placements:  # tensor parallel: sums that are still to be made
            grad = grad.redistribute(placements=p.placements)
        grad = grad.to_local()
    return Part(p, group, number, p.to_local(), grad)


def agree(parts: list[Part], team: Team) -> Agreement:
    """One all-reduce: who has a gradient, and its largest magnitude, infinite for what is not
    finite."""
    num, device = len(parts), parts[0].weight.device
    table = torch.zeros(2 * num, dtype=torch.float64, device=device)
    present = [k for k, part in enumerate(parts) if part.grad is not None]
    filled = [k for k in present if parts[k].weight.numel()]
    if present:
        table.index_fill_(0, move(torch.tensor(present), device), 1.0)
    if filled:
        grads = [parts[k].grad for k in filled]
        peaks = torch.stack(list(torch._foreach_norm(grads, float("inf"))))  # pyright: ignore
        peaks = torch.where(peaks.isfinite(), peaks.double(), float("inf"))
        table.index_copy_(0, move(torch.tensor(filled) + num, device), peaks)
    dist.all_reduce(table, dist.ReduceOp.MAX, group=team.group)
    return Agreement(table[:num] > 0, table[num:])


def report_skipped(parts: list[Part], agreed: Agreement, team: Team, stats: StepStats) -> None:
    """Record which gradients were finite; on the CPU, the first rank says which were not."""
    finite, names = agreed.finite, [part.group["name"] for part in parts]
    if agreed.on_host:
        there = agreed.present.tolist()
        bad = Counter(name for name, ok in zip(names, finite.tolist(), strict=True) if not ok)
        for name, count in bad.items() if team.me == 0 else ():
            _log.warning(
                "%d gradients in group %r are not finite on some rank: their parameters keep "
                "values and state on all of them",
                count,
                name,
            )
        names = [name for name, here in zip(names, there, strict=True) if here]
        finite = finite[agreed.present]
    stats.add_finite(names, finite)
