"""Random numbers as a function of a key: the same in a plain step and in a replayed CUDA graph.

A `torch.Generator` keeps its place on the host, where a recorded graph does not look; here the
place is a tensor, so that a step's noise follows from (seed, step) however the step is run.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# SplitMix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators") in the wrapping
# arithmetic of signed 64 bits.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
_BITS = 24  # of a uniform number: what float32 holds exactly


class Draws:
    """Numbers drawn one tensor after another, each other than the last.

    Args:
        key: int64 [1], on the device that draws; equal keys draw equal numbers.

    Example:
        >>> one, same = Draws(torch.tensor([7])), Draws(torch.tensor([7]))
        >>> first = one.uniform((3,))
        >>> torch.equal(first, same.uniform((3,))), torch.equal(first, one.uniform((3,)))
        (True, False)
    """

    def __init__(self, key: Tensor) -> None:
        self._key, self._drawn = key, 0

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """float32 numbers between 0 and 1, neither of which is drawn."""
        size = math.prod(shape)
        count = torch.arange(self._drawn, self._drawn + size, device=self._key.device)
        self._drawn += size
        bits = (_scramble(_scramble(self._key) + count) >> (64 - _BITS)) & (2**_BITS - 1)
        return ((bits.float() + 0.5) * 2.0**-_BITS).reshape(shape)

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """float32 standard normal numbers, by Box and Muller."""
        radius = (-2 * self.uniform(shape).log()).sqrt()
        return radius * (2 * math.pi * self.uniform(shape)).cos()


def _scramble(x: Tensor) -> Tensor:
    """SplitMix64's output for each state; shifts are made logical by masks."""
    x = (x + 1) * _GOLDEN
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _FIRST
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _SECOND
    return x ^ ((x >> 31) & (2**33 - 1))
