"""Snake in NumPy and Gymnasium's form: what a user of Stable-Baselines3 would write.

The rules and the observation are those of `mesotron.ppo.env`. It loads neither torch nor JAX, so
that many processes may each play a game; one step takes some ten microseconds.

Legend: T cells of the board, row by row; F features of a cell.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from mesotron.config import SnakeConfig

# body, head, tail, fruit, order from tail to head (0 to 1), steps until the cell is free / T
NUM_FEATURES = 6
MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))

Seen = dict[str, np.ndarray]


def observation_space(config: SnakeConfig) -> spaces.Dict:
    """Cells [T, F] and the mask of legal moves [4], both float32."""
    cells = spaces.Box(0.0, np.inf, (config.num_cells, NUM_FEATURES), np.float32)
    return spaces.Dict({"cells": cells, "mask": spaces.Box(0.0, 1.0, (len(MOVES),), np.float32)})


class SnakeNumpy(gymnasium.Env):
    """One game.

    Example:
        >>> env = SnakeNumpy(SnakeConfig(width=4, height=4))
        >>> seen, info = env.reset(seed=0)
        >>> seen["cells"].shape, seen["cells"][:, 0].sum()
        ((16, 6), np.float32(1.0))
    """

    def __init__(self, config: SnakeConfig) -> None:
        self.config = config
        self.observation_space = observation_space(config)
        self.action_space = spaces.Discrete(len(MOVES))
        self._free_in = np.zeros((config.height, config.width), np.int64)
        self._head = (0, 0)
        self.fruit = (0, 0)
        self._length = 1
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Seen, dict]:
        """A new game, of this seed if one is given."""
        super().reset(seed=seed)
        place = int(self.np_random.integers(self.config.num_cells))
        self.place(divmod(place, self.config.width))

        return self.observe(), {}

    def place(self, head: tuple[int, int], fruit: tuple[int, int] | None = None) -> None:
        """Begin with a snake of one cell here, and the fruit there or anywhere."""
        self._head = head
        self._free_in[:] = 0
        self._free_in[head] = 1
        self._length = 1
        self._steps = 0
        self.fruit = self._draw_fruit() if fruit is None else fruit

    def step(self, action: int) -> tuple[Seen, float, bool, bool, dict]:
        """One move; `info["fruit"]` counts the game's fruit so far."""
        config = self.config
        self._steps += 1
        place = (self._head[0] + MOVES[action][0], self._head[1] + MOVES[action][1])

        eaten = died = False
        if self._is_legal(place):
            eaten = place == self.fruit
            self._move(place, eaten)
        else:
            died = True

        full = self._length == config.num_cells
        reward = config.apple_reward * eaten + config.death_penalty * died + config.step_penalty
        ended = died or full
        cut = not ended and self._steps >= config.time_limit

        return self.observe(), float(reward), ended, cut, {"fruit": self._length - 1}

    def observe(self) -> Seen:
        """What the policy sees now."""
        free_in = self._free_in
        board = np.zeros((*free_in.shape, NUM_FEATURES), np.float32)
        board[..., 0] = free_in > 0
        board[*self._head, 1] = 1
        board[..., 2] = free_in == 1
        board[*self.fruit, 3] = 1
        board[..., 4] = free_in / self._length
        board[..., 5] = free_in / self.config.num_cells
        row, column = self._head
        legal = [self._is_legal((row + down, column + right)) for down, right in MOVES]
        cells = board.reshape(self.config.num_cells, NUM_FEATURES)

        return {"cells": cells, "mask": np.array(legal, np.float32)}

    def _move(self, place: tuple[int, int], eaten: bool) -> None:
        self._head = place
        if eaten:
            self._length += 1
        else:
            np.maximum(self._free_in - 1, 0, out=self._free_in)

        self._free_in[place] = self._length
        if eaten and self._length < self.config.num_cells:
            self.fruit = self._draw_fruit()

    def _is_legal(self, place: tuple[int, int]) -> bool:
        """On the board, and free by the time the head is there."""
        row, column = place
        inside = 0 <= row < self.config.height and 0 <= column < self.config.width
        return inside and self._free_in[place] <= 1

    def _draw_fruit(self) -> tuple[int, int]:
        free = np.flatnonzero(self._free_in == 0)
        return divmod(int(free[self.np_random.integers(len(free))]), self.config.width)
