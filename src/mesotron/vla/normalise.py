"""Means and spreads of states and actions, kept among the policy's weights.

They belong to a checkpoint: a policy without them would act in another unit than it was trained in.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from mesotron.vla.interface import Demos

# A number that never changes in the demonstrations has no unit of its own; this is its floor, in
# units of actions (-1 to 1) and metres.
LEAST_SPREAD = 1e-2


class Normaliser(nn.Module):
    """x -> (x - mean) / spread, number by number, and back.

    Args:
        size: how many numbers.

    Example:
        >>> unit = Normaliser(2)
        >>> unit.fit(np.array([[0.0, 1.0], [2.0, 1.0]]))
        >>> unit(torch.tensor([[2.0, 1.0]])).tolist()
        [[1.0, 0.0]]
    """

    mean: Tensor
    spread: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("spread", torch.ones(size))

    def fit(self, values: np.ndarray) -> None:
        """Take mean and standard deviation from values [N, size]."""
        self.mean.copy_(torch.from_numpy(values.mean(axis=0)))
        self.spread.copy_(torch.from_numpy(np.maximum(values.std(axis=0), LEAST_SPREAD)))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return (x - self.mean) / self.spread

    def back(self, x: Tensor) -> Tensor:
        """The inverse of `forward`."""
        return x * self.spread + self.mean


def fit_all(units: nn.ModuleDict, demos: Demos) -> None:
    """Fit the normalisers of a policy ("state", "action" and "where") to demonstrations."""
    found = {"state": demos.state, "action": demos.action, "where": demos.where}
    for name, unit in units.items():
        values = found[name]
        if values is not None and isinstance(unit, Normaliser):
            unit.fit(np.asarray(values, dtype=np.float64))
