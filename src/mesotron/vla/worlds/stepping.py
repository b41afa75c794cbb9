"""Actions one by one or several at once, written once for every world that can `move`."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from mesotron.vla.interface import Observation, Step


class Stepping(ABC):
    """Gives a world `step` and `advance`, which end with a look at what became of the actions."""

    @abstractmethod
    def move(self, action: np.ndarray) -> tuple[bool, bool]:
        """Take one action, (A,), without looking; success and done."""

    @abstractmethod
    def observe(self) -> Observation:
        """Look."""

    def step(self, action: np.ndarray) -> Step:
        """Take one action and look."""
        return self.advance(action[None])

    def advance(self, actions: np.ndarray) -> Step:
        """Take several actions, (K, A), until done; only the last observation is made."""
        success = done = False
        for action in actions:
            success, done = self.move(action)
            if done:
                break
        return Step(self.observe(), success, done)
