"""Whole games, from the first step to the end: greedy, sampled, and at random for comparison.

Scores are fruit, never the shaped reward. A game counts up to its own end; the next one, which the
environment has begun by then, is not looked at.

Legend: E games, R runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mesotron.config import SnakeConfig
from mesotron.ppo.env import EnvState, Observation, SnakeEnv
from mesotron.ppo.policy import Params, apply_policy, mask_logits

Act = Callable[[Array, Observation], Array]


class Games(NamedTuple):
    """How E games ended.

    Args:
        fruit: eaten, int32.
        length: steps, int32.
        won: the board was filled.
        cut: the time limit ended it.
    """

    fruit: Any
    length: Any
    won: Any
    cut: Any

    def summarise(self, prefix: str) -> dict[str, float]:
        """Means over all games, as metrics."""
        means = {name: float(np.mean(values)) for name, values in self._asdict().items()}
        return {f"{prefix}_{name}": mean for name, mean in means.items()}


class _Playing(NamedTuple):
    env: EnvState
    observation: Observation
    key: Array
    ended: Array
    games: Games


def play_games(act: Act, key: Array, config: SnakeConfig, episodes: int) -> Games:
    """Play `episodes` games at once until the last of them has ended.

    Args:
        act: (key, observations [E]) -> moves [E].
        key: of the games and the moves.
        config: the board.
        episodes: E.

    Example:
        >>> config = SnakeConfig(width=3, height=3)
        >>> play = lambda key: play_games(act_at_random(masked=True), key, config, episodes=4)
        >>> jax.eval_shape(play, jax.random.PRNGKey(0)).fruit.shape
        (4,)
    """
    env = SnakeEnv(config)
    env_step = jax.vmap(env.step)

    def one_more(now: _Playing) -> _Playing:
        key, act_key = jax.random.split(now.key)
        state, step = env_step(now.env, act(act_key, now.observation))
        won = step.fruit == config.most_fruit
        then = Games(step.fruit, step.length, won, step.truncated)
        games = jax.tree.map(lambda a, b: jnp.where(now.ended, a, b), now.games, then)
        ended = now.ended | step.terminated | step.truncated
        return _Playing(state, step.observation, key, ended, games)

    key, start = jax.random.split(key)
    state, observation = jax.vmap(env.reset)(jax.random.split(start, episodes))
    count, no = jnp.zeros(episodes, jnp.int32), jnp.zeros(episodes, bool)
    first = _Playing(state, observation, key, no, Games(count, count, no, no))
    return jax.lax.while_loop(lambda now: ~now.ended.all(), one_more, first).games


def act_by_policy(params: Params, config: SnakeConfig, greedy: bool | Array) -> Act:
    """The likeliest move, or one drawn from the policy."""

    def act(key: Array, seen: Observation) -> Array:
        logits, _ = apply_policy(params, seen, config)
        return jnp.where(greedy, logits.argmax(-1), jax.random.categorical(key, logits))

    return act


def act_at_random(masked: bool | Array) -> Act:
    """Any legal move, or any at all."""

    def act(key: Array, seen: Observation) -> Array:
        allowed = seen.mask | jnp.logical_not(masked)
        return jax.random.categorical(key, mask_logits(jnp.zeros(allowed.shape), allowed))

    return act


def make_evaluation(config: SnakeConfig) -> Callable[[Params, int], dict[str, Games]]:
    """Evaluate R policies on the same `eval_episodes` games.

    Returns:
        `evaluate(params [R], seed) -> {"greedy": Games [R, E], "sampled": Games [R, E]}`.
    """

    @jax.jit
    def play(params: Params, key: Array) -> Games:
        def one(params: Params, greedy: Array) -> Games:
            act = act_by_policy(params, config, greedy)
            return play_games(act, key, config, config.eval_episodes)

        each_way = jax.vmap(one, in_axes=(None, 0))
        return jax.vmap(each_way, in_axes=(0, None))(params, jnp.array([True, False]))

    def evaluate(params: Params, seed: int) -> dict[str, Games]:
        games = play(params, jax.random.PRNGKey(seed))
        ways = enumerate(("greedy", "sampled"))
        return {way: Games(*(np.asarray(x)[:, k] for x in games)) for k, way in ways}

    return evaluate


def measure_baselines(config: SnakeConfig, episodes: int = 512, seed: int = 0) -> dict[str, float]:
    """Mean fruit of random play on this board, with and without the mask, and the most there is."""

    @jax.jit
    @jax.vmap
    def play(masked: Array) -> Array:
        key = jax.random.PRNGKey(seed)
        return play_games(act_at_random(masked), key, config, episodes).fruit.mean()

    masked, unmasked = (float(x) for x in play(jnp.array([True, False])))
    most = float(config.most_fruit)
    return {"maximum": most, "random_masked": masked, "random_unmasked": unmasked}


def record_game(params: Params, config: SnakeConfig, seed: int = 0) -> np.ndarray:
    """The cells of one greedy game, step by step, [steps + 1, T, F]."""
    env = SnakeEnv(config)
    act = act_by_policy(params, config, greedy=True)

    def one_more(
        carry: tuple[EnvState, Observation, Array], key: Array
    ) -> tuple[tuple[EnvState, Observation, Array], tuple[Array, Array]]:
        state, seen, ended = carry
        batch = jax.tree.map(lambda x: x[None], seen)
        state, step = env.step(state, act(key, batch)[0])
        carry = (state, step.observation, ended | step.terminated | step.truncated)
        return carry, (step.final_observation.cells, ended)

    @jax.jit
    def play(key: Array) -> tuple[Array, Array, Array]:
        state, seen = env.reset(key)
        keys = jax.random.split(key, config.time_limit)
        _, (cells, after) = jax.lax.scan(one_more, (state, seen, jnp.zeros((), bool)), keys)
        return seen.cells, cells, after

    first, cells, after = (np.asarray(x) for x in play(jax.random.PRNGKey(seed)))
    return np.concatenate([first[None], cells[~after]])
