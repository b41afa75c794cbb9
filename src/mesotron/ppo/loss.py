"""PPO's advantages and loss.

Generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438):

    delta_t = r_t + gamma V(next_t) - V_t;    A_t = delta_t + gamma lambda (not done_t) A_{t+1}

The loss (Schulman et al. 2017, arXiv 1707.06347) is the clipped ratio, the value error (not
clipped: values grow to ten and more) and an entropy bonus. S steps of a rollout, N games.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mesotron.config import SnakeConfig
from mesotron.ppo.env import Observation
from mesotron.ppo.optimizer import Hyper
from mesotron.ppo.policy import Params, apply_policy, entropy, log_probs


def estimate_advantages(  # noqa: PLR0913  # the arrays of a rollout, as in the paper
    rewards: Array,
    values: Array,
    terminated: Array,
    truncated: Array,
    last_values: Array,
    cut_values: Array,
    gamma: float | Array,
    gae_lambda: float | Array,
) -> Array:
    """Advantages [S, N] of a rollout. A game that died has no next value; one stopped by the time
    limit has that of its state before the reset (`cut_values` [N]; at most one such game per
    rollout). `last_values` [N] are those after the rollout."""
    following = jnp.concatenate([values[1:], last_values[None]])
    following = jnp.where(truncated, cut_values, jnp.where(terminated, 0, following))
    deltas = rewards + gamma * following - values
    not_done = ~(terminated | truncated)

    def back(A: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        delta, on = now
        A = delta + gamma * gae_lambda * on * A
        return A, A

    _, advantages = jax.lax.scan(
        back, jnp.zeros_like(last_values), (deltas, not_done), reverse=True, unroll=8
    )
    return advantages


class Minibatch(NamedTuple):
    """Steps to learn from; `rollout_log_probs` are those of the policy that acted."""

    observation: Observation
    actions: Array
    rollout_log_probs: Array
    advantages: Array
    targets: Array
    dropout_keys: Array | None


def ppo_loss(
    params: Params,
    batch: Minibatch,
    config: SnakeConfig,
    hyper: Hyper,
    pretrained: Params | None = None,
) -> tuple[Array, dict[str, Array]]:
    """The loss of one minibatch and its metrics; `pretrained` is the KL reference policy."""
    logits, values = apply_policy(params, batch.observation, config, batch.dropout_keys)
    ratio_log = log_probs(logits, batch.actions) - batch.rollout_log_probs
    ratio = jnp.exp(ratio_log)
    advantages = (batch.advantages - batch.advantages.mean()) / (batch.advantages.std() + 1e-8)
    policy_loss = clipped_loss(ratio, advantages, hyper.clip_eps)
    value_loss = 0.5 * jnp.square(values - batch.targets).mean()
    mean_entropy = entropy(logits).mean()
    loss = policy_loss + hyper.vf_coef * value_loss - hyper.ent_coef * mean_entropy

    metrics = {
        "loss/policy": policy_loss,
        "loss/value": value_loss,
        "policy/entropy": mean_entropy,
        "policy/kl": (ratio - 1 - ratio_log).mean(),
        "policy/clip_fraction": (jnp.abs(ratio - 1) > hyper.clip_eps).mean(),
        "policy/ratio_max": ratio.max(),
    }
    if pretrained is not None:
        kl = kl_divergence(logits, apply_policy(pretrained, batch.observation, config)[0])
        loss = loss + hyper.kl_coef * kl
        metrics["policy/kl_pretrained"] = kl

    return loss, metrics


def clipped_loss(ratio: Array, advantages: Array, clip_eps: float | Array) -> Array:
    """-mean min(ratio A, clip(ratio) A): no gain from moving further than clip_eps.

    Example:
        >>> float(clipped_loss(jnp.array([2.0]), jnp.array([1.0]), 0.25))
        -1.25
        >>> float(clipped_loss(jnp.array([2.0]), jnp.array([-1.0]), 0.25))
        2.0
    """
    clipped = jnp.clip(ratio, 1 - clip_eps, 1 + clip_eps)
    return -jnp.minimum(ratio * advantages, clipped * advantages).mean()


def kl_divergence(logits: Array, reference: Array) -> Array:
    """Mean KL(policy || reference) of two sets of logits [B, 4]."""
    own = jax.nn.log_softmax(logits)
    other = jax.nn.log_softmax(reference)
    return (jnp.exp(own) * (own - jax.lax.stop_gradient(other))).sum(-1).mean()
