"""Snake in Gymnasium's form: the game of `mesotron.ppo.env` for trainers that live outside of JAX.

`SnakeGym` is one game; `SnakeVecEnv` plays many in one compiled call, the fastest form that
Stable-Baselines3 can be given, since a call from Python costs more than a step of the game.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

from benchmarks._lib.snake_numpy import Seen, observation_space
from mesotron.config import SnakeConfig
from mesotron.ppo.env import NUM_ACTIONS, EnvState, EnvStep, Observation, SnakeEnv


class SnakeGym(gymnasium.Env):
    """One game.

    Example:
        >>> env = SnakeGym(SnakeConfig(width=4, height=4))
        >>> seen, info = env.reset(seed=0)
        >>> seen["cells"].shape, seen["mask"].dtype
        ((16, 6), dtype('float32'))
    """

    def __init__(self, config: SnakeConfig) -> None:
        self.observation_space = observation_space(config)
        self.action_space = spaces.Discrete(NUM_ACTIONS)
        game = SnakeEnv(config)
        self._reset = jax.jit(game.reset)
        self._step = jax.jit(game.step)
        self._state: EnvState | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Seen, dict]:
        """A new game, of this seed if one is given."""
        super().reset(seed=seed)
        key = jax.random.PRNGKey(int(self.np_random.integers(2**31)))
        self._state, observation = self._reset(key)

        return as_numpy(observation), {}

    def step(self, action: int) -> tuple[Seen, float, bool, bool, dict]:
        """One move; `info["fruit"]` counts the game's fruit so far."""
        self._state, step = self._step(self._state, jnp.int32(action))
        ended = bool(step.terminated), bool(step.truncated)
        info = {"fruit": int(step.fruit)}

        return as_numpy(step.final_observation), float(step.reward), *ended, info


class SnakeVecEnv(VecEnv):
    """N games stepped by one compiled call; games that end start again by themselves.

    Example:
        >>> env = SnakeVecEnv(SnakeConfig(width=4, height=4, num_envs=3))
        >>> env.reset()["cells"].shape
        (3, 16, 6)
        >>> seen, rewards, dones, infos = env.step(np.zeros(3, int))
        >>> rewards.shape, len(infos)
        ((3,), 3)
    """

    def __init__(self, config: SnakeConfig) -> None:
        space = observation_space(config)
        self.config = config
        super().__init__(config.num_envs, space, spaces.Discrete(NUM_ACTIONS))
        game = SnakeEnv(config)
        self._reset = jax.jit(jax.vmap(game.reset))
        self._step = jax.jit(jax.vmap(game.step))
        self._state: EnvState | None = None
        self._actions = np.zeros(config.num_envs, np.int32)
        self._num_resets = 0

    def reset(self) -> Seen:
        """New games; the next reset gives others."""
        key = jax.random.fold_in(jax.random.PRNGKey(self.config.seed), self._num_resets)
        self._num_resets += 1
        self._state, observation = self._reset(jax.random.split(key, self.num_envs))

        return as_numpy(observation)

    def step_async(self, actions: np.ndarray) -> None:
        """Store the moves of all games."""
        self._actions = np.asarray(actions, np.int32)

    def step_wait(self) -> tuple[Seen, np.ndarray, np.ndarray, list[dict]]:
        """Play them. The info of a game that ended has its score and its last observation."""
        self._state, step = self._step(self._state, self._actions)
        step: EnvStep = jax.device_get(step)
        dones = np.asarray(step.terminated | step.truncated)
        infos: list[dict] = [{} for _ in range(self.num_envs)]

        final = as_numpy(step.final_observation)
        for k in np.flatnonzero(dones):
            infos[k] = {
                "terminal_observation": {name: x[k] for name, x in final.items()},
                "TimeLimit.truncated": bool(step.truncated[k]),
                "episode": {"r": float(step.fruit[k]), "l": int(step.length[k])},
            }

        rewards = np.array(step.reward, np.float32)  # a copy: Stable-Baselines3 adds to it
        return as_numpy(step.observation), rewards, dones, infos

    def close(self) -> None:
        """Nothing to release."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """An attribute of every game; Stable-Baselines3 asks for `render_mode`."""

        if attr_name == "render_mode":
            value = None
        else:
            value = getattr(self, attr_name)

        return [value for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Refused: the games are one program."""
        raise ValueError(f"{attr_name!r} cannot be set: the games of a SnakeVecEnv are one program")

    def env_method(
        self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any
    ) -> list[Any]:
        """Refused: there are no separate games to call."""
        raise ValueError(f"{method_name!r} cannot be called: the games are one program")

    def env_is_wrapped(
        self, wrapper_class: type[gymnasium.Wrapper], indices: Any = None
    ) -> list[bool]:
        """Never."""
        return [False for _ in self._get_indices(indices)]


def as_numpy(observation: Observation) -> Seen:
    """The form that trainers outside of JAX read; copies, since torch wants to own its memory."""
    cells, mask = jax.device_get(observation)
    return {"cells": np.array(cells), "mask": np.array(mask, np.float32)}
