"""The PPO loop as pure functions: rollout, advantages, epochs and minibatches, all of them scans.

`make_train(config)` is a whole run; `run_updates` makes any number of updates and is what
`mesotron.ppo.program` compiles, so a run in chunks is bit-equal to a run in one piece.

Legend: S steps of a rollout, N games, B = S N; G shards, each shuffling its own N / G games.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from mesotron.config import SnakeConfig
from mesotron.ppo.env import EnvState, Observation, SnakeEnv, select
from mesotron.ppo.loss import Minibatch, estimate_advantages, ppo_loss
from mesotron.ppo.optimizer import Hyper, anneal, make_hyper, make_optimizer
from mesotron.ppo.policy import Params, apply_policy, init_policy, log_probs

Metrics = dict[str, Array]


class TrainState(NamedTuple):
    """The complete state of a run; a checkpoint holds exactly this."""

    params: Params
    opt_state: Any
    env: EnvState  # [N] games
    observation: Observation  # [N] current observations
    key: Array  # [2] raw, of all random draws from here on
    update: Array  # updates made, int32


class Transition(NamedTuple):
    """One step of every game; the rollout stacks them to [S, N]."""

    observation: Observation
    actions: Array
    rollout_log_probs: Array
    values: Array
    rewards: Array
    terminated: Array
    truncated: Array
    fruit: Array
    length: Array
    dropout_keys: Array | None


def init_state(key: Array, config: SnakeConfig, hyper: Hyper) -> TrainState:
    key, policy_key, env_key = jax.random.split(key, 3)
    params = init_policy(policy_key, config)
    tx = make_optimizer(config, hyper)
    env, observation = jax.vmap(SnakeEnv(config).reset)(jax.random.split(env_key, config.num_envs))

    return TrainState(
        params,
        tx.init(params),
        env,
        observation,
        key,
        jnp.zeros((), jnp.int32),
    )


def make_train(config: SnakeConfig) -> Callable[..., tuple[TrainState, Metrics]]:
    """A whole run as one pure function, to be jitted or vmapped.

    Returns:
        `train(rng, hyper=None) -> (state, metrics)`; metrics have one entry per update.

    Example:
        >>> config = SnakeConfig(num_envs=4, num_steps=8, num_minibatches=2, total_timesteps=64)
        >>> state, metrics = jax.eval_shape(make_train(config), jax.random.PRNGKey(0))
        >>> metrics["loss/value"].shape
        (2,)
    """

    def train(rng: Array, hyper: Hyper | None = None) -> tuple[TrainState, Metrics]:
        hyper = make_hyper(config) if hyper is None else hyper
        state = init_state(rng, config, hyper)
        num = config.num_updates

        return run_updates(
            state,
            hyper,
            jnp.int32(num),
            config=config,
            max_updates=num,
        )

    return train


def run_updates(
    state: TrainState,
    hyper: Hyper,
    count: Array,
    pretrained: Params | None = None,
    *,
    config: SnakeConfig,
    max_updates: int,
) -> tuple[TrainState, Metrics]:
    """Make `count` updates; metrics are [max_updates], of which the first `count` are filled. The
    count is traced, so that every chunk runs the same machine code."""
    update = partial(
        update_once,
        hyper=hyper,
        config=config,
        pretrained=pretrained,
    )

    shapes = jax.eval_shape(lambda s: update(s)[1], state)
    buffers = jax.tree.map(lambda x: jnp.zeros((max_updates, *x.shape), x.dtype), shapes)

    def body(k: Array, carry: tuple[TrainState, Metrics]) -> tuple[TrainState, Metrics]:
        state, buffers = carry
        state, metrics = update(state)
        return state, jax.tree.map(lambda b, m: b.at[k].set(m), buffers, metrics)

    return jax.lax.fori_loop(0, count, body, (state, buffers))


def update_once(
    state: TrainState, *, hyper: Hyper, config: SnakeConfig, pretrained: Params | None = None
) -> tuple[TrainState, Metrics]:
    key, play_key, learn_key = jax.random.split(state.key, 3)
    env, observation, steps, last_values, cut_values = play(state, play_key, config)
    advantages = estimate_advantages(
        steps.rewards,
        steps.values,
        steps.terminated,
        steps.truncated,
        last_values,
        cut_values,
        hyper.gamma,
        hyper.gae_lambda,
    )

    batch = Minibatch(
        steps.observation,
        steps.actions,
        steps.rollout_log_probs,
        advantages,
        advantages + steps.values,
        steps.dropout_keys,
    )

    params, opt_state, losses = learn(
        state.params, state.opt_state, batch, learn_key, config, hyper, pretrained
    )
    metrics = losses | _describe(
        steps,
        batch,
        state,
        config,
        hyper,
    )

    moved: Any = jax.tree.map(jnp.subtract, params, state.params)
    size = sum(leaf.size for leaf in jax.tree.leaves(moved))
    metrics["optim/update_rms"] = optax.tree.norm(moved) / math.sqrt(size)

    return TrainState(
        params,
        opt_state,
        env,
        observation,
        key,
        state.update + 1,
    ), metrics


def play(
    state: TrainState, key: Array, config: SnakeConfig
) -> tuple[EnvState, Observation, Transition, Array, Array]:
    """Act for S steps in N games; the last two are the bootstrap values of `estimate_advantages`. A
    truncated game keeps its last observation in a separate slot, of which one is enough."""
    env_step = jax.vmap(SnakeEnv(config).step)

    # One key per game and rollout, kept with every step, so that the loss drops the same units.
    split = jax.random.split(jax.random.fold_in(key, 0), config.num_envs)
    dropout_keys = split if config.dropout else None

    def act(carry: tuple[EnvState, Observation, Observation], key: Array) -> tuple[Any, Transition]:
        env, seen, cut = carry
        logits, values = apply_policy(state.params, seen, config, dropout_keys)
        actions = jax.random.categorical(key, logits)
        env, step = env_step(env, actions)
        cut = select(step.truncated, step.final_observation, cut)

        transition = Transition(
            seen,
            actions,
            log_probs(logits, actions),
            values,
            step.reward,
            step.terminated,
            step.truncated,
            step.fruit,
            step.length,
            dropout_keys,
        )
        return (env, step.observation, cut), transition

    keys = jax.random.split(jax.random.fold_in(key, 1), config.num_steps)
    carry = (state.env, state.observation, state.observation)
    (env, observation, cut), steps = jax.lax.scan(act, carry, keys)
    ends = jax.tree.map(lambda *pair: jnp.concatenate(pair), observation, cut)
    twice = jax.tree.map(lambda keys: jnp.tile(keys, (2, 1)), dropout_keys)
    _, values = apply_policy(state.params, ends, config, twice)
    last_values, cut_values = jnp.split(values, 2)

    return env, observation, steps, last_values, cut_values


def learn(
    params: Params,
    opt_state: Any,
    batch: Minibatch,
    key: Array,
    config: SnakeConfig,
    hyper: Hyper,
    pretrained: Params | None = None,
) -> tuple[Params, Any, Metrics]:
    """Epochs of minibatches over a rollout; `batch` is [S, N]. Metrics are means over all steps."""
    tx = make_optimizer(config, hyper)
    data = jax.tree.map(lambda x: by_group(x, config.num_groups), batch)

    def step(carry: tuple[Params, Any], index: Array) -> tuple[tuple[Params, Any], Metrics]:
        params, opt_state = carry
        gradient = jax.grad(ppo_loss, has_aux=True)
        grads, metrics = gradient(
            params,
            take(data, index),
            config,
            hyper,
            pretrained,
        )

        metrics["optim/gradient_norm"] = optax.tree.norm(grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        stepped: Any = optax.apply_updates(params, updates)

        return (stepped, opt_state), metrics

    def epoch(carry: tuple[Params, Any], key: Array) -> tuple[tuple[Params, Any], Metrics]:
        return jax.lax.scan(step, carry, shuffled(key, config))

    keys = jax.random.split(key, config.update_epochs)
    (params, opt_state), metrics = jax.lax.scan(epoch, (params, opt_state), keys)
    largest = metrics["policy/ratio_max"].max()
    first = metrics["policy/kl"][0, 0]
    means = jax.tree.map(jnp.mean, metrics)

    return params, opt_state, means | {"policy/ratio_max": largest, "policy/mismatch": first}


def by_group(X: Array, groups: int) -> Array:
    """[S, N, ...] -> [G, B / G, ...]."""
    S, N = X.shape[:2]
    X = X.reshape(S, groups, N // groups, *X.shape[2:])
    return jnp.moveaxis(X, 1, 0).reshape(groups, S * N // groups, *X.shape[3:])


def shuffled(key: Array, config: SnakeConfig) -> Array:
    """Indices of every minibatch of an epoch, [minibatches, G, B / G / minibatches]."""
    groups = config.num_groups
    size = config.batch_size // groups
    keys = jax.random.split(key, groups)
    order = jax.vmap(lambda k: jax.random.permutation(k, size))(keys)

    return jnp.moveaxis(order.reshape(groups, config.num_minibatches, -1), 1, 0)


def take(data: Minibatch, index: Array) -> Minibatch:
    def pick(X: Array) -> Array:
        return jax.vmap(lambda rows, chosen: rows[chosen])(X, index).reshape(-1, *X.shape[2:])

    return jax.tree.map(pick, data)


def _describe(
    steps: Transition, batch: Minibatch, state: TrainState, config: SnakeConfig, hyper: Hyper
) -> Metrics:
    """Metrics of the rollout; scores are the unshaped ones of the games that ended in it."""
    ended = steps.terminated | steps.truncated
    num = ended.sum()
    among = jnp.maximum(num, 1)
    unexplained = jnp.var(batch.targets - steps.values)
    made = state.update * config.update_epochs * config.num_minibatches
    rate = hyper.lr if config.rule == "adam" else hyper.muon_lr

    return {
        "episode/finished": num.astype(jnp.float32),
        "episode/fruit": jnp.where(ended, steps.fruit, 0).sum() / among,
        "episode/length": jnp.where(ended, steps.length, 0).sum() / among,
        "episode/truncated": steps.truncated.sum() / among,
        "value/explained": 1 - unexplained / (jnp.var(batch.targets) + 1e-8),
        "optim/lr": anneal(rate, hyper.num_gradient_steps if config.anneal_lr else None)(made),
    }
