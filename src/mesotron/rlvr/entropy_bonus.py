"""The weight of the entropy bonus: constant, or adapted to a target as in TRL."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class EntropyBonus:
    """Pays for entropy below a target, and moves the weight by a little at each update."""

    coef: float
    target: float | None = None  # nats per token; None for a constant weight
    delta: float = 0.0  # by which the weight moves
    lowest: float = 0.0
    highest: float = 1.0
    entropy: float = torch.inf  # of the last update
    sums: Tensor | None = None  # [2] of this update so far: sum of entropies, tokens

    @classmethod
    def of(cls, args: Any) -> "EntropyBonus | None":
        """As the fields of `GRPOConfig` say; None for a loss without a bonus."""
        if not args.use_adaptive_entropy:
            if args.entropy_coef:
                return cls(args.entropy_coef)

            return None

        return cls(
            args.entropy_coef,
            args.entropy_target,
            args.entropy_coef_delta,
            args.entropy_coef_min,
            args.entropy_coef_max,
        )

    def weight(self) -> float:
        """Of the bonus in this update: 0 while the last update was above the target."""
        if self.target is None or self.entropy <= self.target:
            return self.coef

        return 0.0

    def observe(self, sums: Tensor) -> None:
        """Add a micro-batch to this update."""
        self.sums = sums if self.sums is None else self.sums + sums

    def end_update(self, gather: Callable[[Tensor], Tensor]) -> None:
        """Move the weight toward the target; an update in which no token trained says nothing."""
        assert self.sums is not None
        total, count = gather(self.sums[None]).sum(dim=0)
        self.sums = None
        if self.target is None or not count:
            return

        self.entropy = (total / count).item()
        step = self.delta if self.entropy <= self.target else -self.delta
        self.coef = min(max(self.coef + step, self.lowest), self.highest)
