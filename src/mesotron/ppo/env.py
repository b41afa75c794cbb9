"""Snake for PPO: a thin adapter over Jumanji's game (Bonnet et al. 2023, arXiv 2306.09884).

Adds what training needs: games that start again by themselves, a time limit that is told from
death, the observation before the reset, a shaped reward beside the true fruit count.

Legend: T cells of the board, row by row; F features of a cell. One game; `jax.vmap` makes many.
"""

from __future__ import annotations

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
    """What the policy sees.

    Args:
        cells: [T, F] features.
        mask: [4] legal moves: up, right, down, left.
    """

    cells: Array
    mask: Array


class EnvState(NamedTuple):
    """A game with its counts so far.

    Args:
        game: Jumanji's state.
        key: of the games to come.
        fruit: eaten in this game, int32.
        length: steps of this game, int32.
    """

    game: GameState
    key: Array
    fruit: Array
    length: Array


class Step(NamedTuple):
    """What one step tells.

    Args:
        observation: of the next state to act in: after a reset where the game ended.
        final_observation: of the state that the step led to, before any reset.
        reward: shaped, as the config says.
        terminated: died, or filled the board.
        truncated: cut off by the time limit alone.
        fruit: eaten in the game up to this step; the game's score where it ended.
        length: steps of the game up to this one.
    """

    observation: Observation
    final_observation: Observation
    reward: Array
    terminated: Array
    truncated: Array
    fruit: Array
    length: Array


class SnakeEnv:
    """The game of a config.

    Example:
        >>> env = SnakeEnv(SnakeConfig(width=4, height=5))
        >>> state, observation = jax.eval_shape(env.reset, jax.random.PRNGKey(0))
        >>> observation.cells.shape
        (20, 6)
        >>> state, step = jax.eval_shape(env.step, state, jnp.array(0))
        >>> step.reward.shape
        ()
    """

    def __init__(self, config: SnakeConfig) -> None:
        self.config = config
        # Jumanji calls its limit a termination; one step longer than ours, it is never met.
        limit = config.time_limit + 1
        with jax.ensure_compile_time_eval():  # its specs check arrays, also inside a trace
            self.game: Any = Snake(config.height, config.width, time_limit=limit)

    def reset(self, key: Array) -> tuple[EnvState, Observation]:
        """A new game."""
        key, start = jax.random.split(key)
        game, timestep = self.game.reset(start)
        none = jnp.zeros((), jnp.int32)
        return EnvState(game, key, none, none), self._observe(game, timestep.observation.grid)

    def step(self, state: EnvState, action: Array) -> tuple[EnvState, Step]:
        """Play one move, and start the next game where this one ends."""
        game, timestep = self.game.step(state.game, action)
        eaten = timestep.reward > 0
        played = EnvState(game, state.key, state.fruit + eaten, state.length + 1)
        terminated = timestep.last()
        truncated = ~terminated & (played.length >= self.config.time_limit)
        died = terminated & ~game.body.all()
        config = self.config
        reward = config.apple_reward * eaten + config.death_penalty * died + config.step_penalty
        final = self._observe(game, timestep.observation.grid)
        fresh, first = self.reset(state.key)
        ended = terminated | truncated
        kept, observation = select(ended, (fresh, first), (played, final))
        step = Step(observation, final, reward, terminated, truncated, played.fruit, played.length)
        return kept, step

    def _observe(self, game: Any, grid: Array) -> Observation:
        """Jumanji's planes and one more: after how many steps the body leaves a cell."""
        timed = game.body_state[..., None] / self.config.num_cells
        cells = jnp.concatenate([grid, timed], axis=-1, dtype=jnp.float32)
        return Observation(cells.reshape(self.config.num_cells, NUM_FEATURES), game.action_mask)


def select(condition: Array, yes: Any, no: Any) -> Any:
    """`jnp.where` over trees; the condition has the leading axes of the leaves."""

    def pick(a: Array, b: Array) -> Array:
        return jnp.where(
            condition.reshape(condition.shape + (1,) * (a.ndim - condition.ndim)), a, b
        )

    return jax.tree.map(pick, yes, no)
