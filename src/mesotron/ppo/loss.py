"""PPO's loss (Schulman et al. 2017, arXiv 1707.06347): clipped ratio, value error, entropy bonus.

The value error is not clipped: values here grow to ten and more, and clipping their change to
clip_eps would hold the critic back.

Legend: B steps of a minibatch.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mesotron.config import SnakeConfig
from mesotron.ppo.env import Observation
from mesotron.ppo.hyper import Hyper
from mesotron.ppo.policy import Params, apply_policy, entropy, log_probs


class Batch(NamedTuple):
    """Steps to learn from.

    Args:
        observation: cells [B, T, F], mask [B, 4].
        actions: [B] int32.
        rollout_log_probs: [B] of the actions, by the policy that took them.
        advantages: [B].
        targets: [B] of the critic.
        dropout_keys: [B, 2] that the steps were acted with; None without dropout.
    """

    observation: Observation
    actions: Array
    rollout_log_probs: Array
    advantages: Array
    targets: Array
    dropout_keys: Array | None


def ppo_loss(
    params: Params,
    batch: Batch,
    config: SnakeConfig,
    hyper: Hyper,
    pretrained: Params | None = None,
) -> tuple[Array, dict[str, Array]]:
    """The loss of one minibatch and what it is made of.

    Args:
        params: of the policy.
        batch: the minibatch.
        config: board, network and which terms there are.
        hyper: their weights.
        pretrained: weights of the policy to stay close to; needed if `config.kl_coef` is not 0.

    Returns:
        The loss, a scalar, and named scalars: `loss/policy`, `loss/value`, `policy/entropy`,
        `policy/kl` (rollout to now), `policy/clip_fraction`, `policy/ratio_max`.
    """
    logits, values = apply_policy(params, batch.observation, config, batch.dropout_keys)
    ratio_log = log_probs(logits, batch.actions) - batch.rollout_log_probs
    ratio = jnp.exp(ratio_log)
    advantages = standardise(batch.advantages)
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
    if config.kl_coef:
        assert pretrained is not None
        far = divergence(logits, apply_policy(pretrained, batch.observation, config)[0])
        loss = loss + hyper.kl_coef * far
        metrics["policy/kl_pretrained"] = far
    return loss, metrics


def clipped_loss(ratio: Array, advantages: Array, clip_eps: float | Array) -> Array:
    """-mean min(ratio A, clip(ratio) A): no reward for moving further than clip_eps.

    Example:
        >>> float(clipped_loss(jnp.array([2.0]), jnp.array([1.0]), 0.25))
        -1.25
        >>> float(clipped_loss(jnp.array([2.0]), jnp.array([-1.0]), 0.25))
        2.0
    """
    clipped = jnp.clip(ratio, 1 - clip_eps, 1 + clip_eps)
    return -jnp.minimum(ratio * advantages, clipped * advantages).mean()


def standardise(X: Array) -> Array:
    """Zero mean, unit spread."""
    return (X - X.mean()) / (X.std() + 1e-8)


def divergence(logits: Array, reference: Array) -> Array:
    """Mean KL(policy || reference) of two sets of logits [B, 4]."""
    own, other = jax.nn.log_softmax(logits), jax.nn.log_softmax(reference)
    return (jnp.exp(own) * (own - jax.lax.stop_gradient(other))).sum(-1).mean()
