"""Snake for PPO: a thin adapter over Jumanji's game (Bonnet et al. 2023, arXiv 2306.09884).

Adds automatic resets, a time limit distinct from death, and a shaped reward beside the fruit. One
game of T board cells in row-major order, with F features each; `jax.vmap` makes many.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jumanji.environments.routing.snake.env import Snake
from jumanji.environments.routing.snake.types import State as GameState

from mesotron.config import SnakeConfig

# body, head, tail, fruit, order from tail to head (0 to 1), steps until the cell is free / T
NUM_FEATURES = 6
HEAD = 1
NUM_ACTIONS = 4


class Observation(NamedTuple):
    """What the policy sees: cells [T, F] and a mask [4] of legal moves (up, right, down, left)."""

    cells: Array
    mask: Array


class EnvState(NamedTuple):
    """A game, the key of the games to come, and the fruit and steps of this game so far (int32)."""

    game: GameState
    key: Array
    fruit: Array
    length: Array


class EnvStep(NamedTuple):
    observation: Observation  # the next state to act in: after the reset if the game ended
    final_observation: Observation  # the state the move led to, before any reset
    reward: Array  # shaped as configured
    terminated: Array  # died, or filled the board
    truncated: Array  # stopped by the time limit only
    fruit: Array  # eaten in the game up to this step
    length: Array  # steps of the game up to this one


class SnakeEnv:
    """The game of a config: `reset(key)` and `step(state, action)`, both pure functions."""

    def __init__(self, config: SnakeConfig) -> None:
        self.config = config
        # Jumanji reports its own limit as a termination; one step beyond ours, it is never reached.
        limit = config.time_limit + 1
        with jax.ensure_compile_time_eval():  # Jumanji's specs check arrays, even inside a trace
            self.game: Any = Snake(config.height, config.width, time_limit=limit)

    def reset(self, key: Array) -> tuple[EnvState, Observation]:
        key, start = jax.random.split(key)
        game, timestep = self.game.reset(start)
        zero = jnp.zeros((), jnp.int32)

        return EnvState(game, key, zero, zero), self._observe(game, timestep.observation.grid)

    def step(self, state: EnvState, action: Array) -> tuple[EnvState, EnvStep]:
        """Play one move; reset if it ends the game."""
        config = self.config
        game, timestep = self.game.step(state.game, action)
        ate = timestep.reward > 0
        played = EnvState(game, state.key, state.fruit + ate, state.length + 1)
        terminated = timestep.last()
        truncated = ~terminated & (played.length >= config.time_limit)
        died = terminated & ~game.body.all()
        reward = config.apple_reward * ate + config.death_penalty * died + config.step_penalty
        final = self._observe(game, timestep.observation.grid)
        fresh, first = self.reset(state.key)
        state, observation = select(terminated | truncated, (fresh, first), (played, final))

        step = EnvStep(
            observation,
            final,
            reward,
            terminated,
            truncated,
            played.fruit,
            played.length,
        )
        return state, step

    def _observe(self, game: Any, grid: Array) -> Observation:
        """Jumanji's planes and one more: the number of steps until the body leaves a cell."""
        steps_left = game.body_state[..., None] / self.config.num_cells
        cells = jnp.concatenate([grid, steps_left], axis=-1, dtype=jnp.float32)
        return Observation(cells.reshape(self.config.num_cells, NUM_FEATURES), game.action_mask)


def select(condition: Array, yes: Any, no: Any) -> Any:
    """`jnp.where` over trees; the condition has the leading axes of the leaves."""

    def pick(a: Array, b: Array) -> Array:
        shape = condition.shape + (1,) * (a.ndim - condition.ndim)
        return jnp.where(condition.reshape(shape), a, b)

    return jax.tree.map(pick, yes, no)
