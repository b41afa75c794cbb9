"""A plain PPO in JAX to be measured against: the loop that single-file trainers share (Lu et al.
2022, arXiv 2210.05639), a whole run as one scan that stacks every step's metrics.

Game, network and Adam are those of `mesotron.ppo`; the loop is its own. It has no masks, no
truncation (a game that is cut off counts as ended), no chunks and no resume.

Legend: S steps of a rollout, N games, B = S N.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from mesotron.config import SnakeConfig
from mesotron.ppo.env import Observation, SnakeEnv
from mesotron.ppo.policy import apply_policy, init_policy


class Memory(NamedTuple):
    """A step to learn from; [S, N] after a rollout."""

    observation: Observation
    action: Array
    log_prob: Array
    value: Array
    reward: Array
    done: Array
    info: dict[str, Array]


Runner = tuple[Any, Any, Any, Observation, Array]


def make_plain_start(config: SnakeConfig) -> Callable[[Array], Runner]:
    """key -> (params, optimizer state, games, observation, key) before the first update."""

    def start(key: Array) -> Runner:
        key, policy_key, game_key = jax.random.split(key, 3)
        params = init_policy(policy_key, config)
        games = jax.random.split(game_key, config.num_envs)
        env, observation = jax.vmap(SnakeEnv(config).reset)(games)

        return params, make_adam(config).init(params), env, observation, key

    return start


def make_plain_run(config: SnakeConfig, num_updates: int) -> Callable[[Runner], Any]:
    """Runner -> (runner, metrics of every step): that many updates in one scan."""

    def run(runner: Runner) -> Any:
        return jax.lax.scan(lambda r, _: update(r, config), runner, None, num_updates)

    return run


def make_adam(config: SnakeConfig) -> optax.GradientTransformation:
    """Clip, then Adam with a rate that falls linearly over the run's gradient steps."""
    rate = optax.linear_schedule(config.lr, 0.0, config.num_gradient_steps)
    clip = optax.clip_by_global_norm(config.max_grad_norm)
    return optax.chain(clip, optax.adam(rate, eps=1e-5))


def update(runner: Runner, config: SnakeConfig) -> tuple[Runner, dict[str, Array]]:
    """Play, estimate, learn."""
    params, opt_state, env, observation, key = runner
    key, play_key, learn_key = jax.random.split(key, 3)
    env, observation, memory = rollout(params, env, observation, play_key, config)

    _, last_value = apply_policy(params, observation, config)
    advantages = estimate(memory, last_value, config)
    batch = (memory, advantages, advantages + memory.value)
    batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)

    def epoch(carry: tuple[Any, Any], key: Array) -> tuple[tuple[Any, Any], Array]:
        order = jax.random.permutation(key, config.batch_size)
        shuffled = jax.tree.map(lambda x: jnp.take(x, order, axis=0), batch)
        parts = jax.tree.map(
            lambda x: x.reshape(config.num_minibatches, -1, *x.shape[1:]), shuffled
        )
        return jax.lax.scan(lambda c, part: minibatch(c, part, config), carry, parts)

    keys = jax.random.split(learn_key, config.update_epochs)
    (params, opt_state), losses = jax.lax.scan(epoch, (params, opt_state), keys)

    return (params, opt_state, env, observation, key), {**memory.info, "loss": losses}


def rollout(
    params: Any, env: Any, observation: Observation, key: Array, config: SnakeConfig
) -> tuple[Any, Observation, Memory]:
    """S steps of N games."""
    step_games = jax.vmap(SnakeEnv(config).step)

    def act(carry: tuple[Any, Observation], key: Array) -> tuple[tuple[Any, Observation], Memory]:
        env, seen = carry
        logits, value = apply_policy(params, seen, config)
        action = jax.random.categorical(key, logits)
        env, step = step_games(env, action)
        done = step.terminated | step.truncated

        memory = Memory(
            observation=seen,
            action=action,
            log_prob=pick(logits, action),
            value=value,
            reward=step.reward,
            done=done,
            info={"done": done, "fruit": step.fruit, "length": step.length},
        )
        return (env, step.observation), memory

    keys = jax.random.split(key, config.num_steps)
    (env, observation), memory = jax.lax.scan(act, (env, observation), keys)

    return env, observation, memory


def estimate(memory: Memory, last_value: Array, config: SnakeConfig) -> Array:
    """Generalised advantages, [S, N]."""

    def back(carry: tuple[Array, Array], now: tuple) -> tuple[tuple[Array, Array], Array]:
        advantage, following = carry
        reward, value, done = now
        goes_on = 1.0 - done
        delta = reward + config.gamma * following * goes_on - value
        advantage = delta + config.gamma * config.gae_lambda * goes_on * advantage

        return (advantage, value), advantage

    start = (jnp.zeros_like(last_value), last_value)
    steps = (memory.reward, memory.value, memory.done)
    _, advantages = jax.lax.scan(back, start, steps, reverse=True)

    return advantages


def minibatch(
    carry: tuple[Any, Any], part: tuple[Memory, Array, Array], config: SnakeConfig
) -> tuple[tuple[Any, Any], Array]:
    """One gradient step."""
    params, opt_state = carry
    loss, grads = jax.value_and_grad(loss_of)(params, part, config)
    updates, opt_state = make_adam(config).update(grads, opt_state, params)

    return (optax.apply_updates(params, updates), opt_state), loss


def loss_of(params: Any, part: tuple[Memory, Array, Array], config: SnakeConfig) -> Array:
    """Clipped policy loss, squared value error, entropy bonus."""
    memory, advantages, targets = part
    logits, value = apply_policy(params, memory.observation, config)

    ratio = jnp.exp(pick(logits, memory.action) - memory.log_prob)
    clipped = jnp.clip(ratio, 1 - config.clip_eps, 1 + config.clip_eps)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy = -jnp.minimum(ratio * advantages, clipped * advantages).mean()

    probability = jax.nn.softmax(logits)
    entropy = -(probability * jax.nn.log_softmax(logits)).sum(-1).mean()
    error = 0.5 * jnp.square(value - targets).mean()
    return policy + config.vf_coef * error - config.ent_coef * entropy


def pick(logits: Array, action: Array) -> Array:
    """Log-probability of each action."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], axis=-1)[..., 0]
