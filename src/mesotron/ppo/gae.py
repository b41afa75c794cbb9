"""Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438).

    delta_t = r_t + gamma V(next_t) - V_t;    A_t = delta_t + gamma lambda (goes on_t) A_{t+1}

A game that died has no next value; one that was cut off by the time limit has that of the state
before the reset. Neither passes an advantage to the game before it.

Legend: S steps of a rollout, N games.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def estimate_advantages(
    rewards: Array,
    values: Array,
    terminated: Array,
    truncated: Array,
    last_values: Array,
    cut_values: Array,
    gamma: float | Array,
    gae_lambda: float | Array,
) -> Array:
    """Advantages of a rollout.

    Args:
        rewards: [S, N].
        values: [S, N] of the observations acted in.
        terminated: [S, N] the game ended by its rules.
        truncated: [S, N] the game was cut off; at most once in a rollout for each game.
        last_values: [N] of the observations after the rollout.
        cut_values: [N] of the last observation before the reset of the game that was cut off.
        gamma: discount.
        gae_lambda: 0 trusts the values, 1 the rewards.

    Returns:
        [S, N]; advantages + values are the targets of the critic.

    Example:
        >>> one, no = jnp.ones((1, 1)), jnp.zeros((1, 1), bool)
        >>> A = estimate_advantages(one, 2 * one, no, no, 3 * one[0], 9 * one[0], 0.5, 1.0)
        >>> float(A[0, 0])  # 1 + 0.5 * 3 - 2
        0.5
    """
    following = jnp.concatenate([values[1:], last_values[None]])
    following = jnp.where(truncated, cut_values, jnp.where(terminated, 0, following))
    deltas = rewards + gamma * following - values
    goes_on = ~(terminated | truncated)

    def back(A: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        delta, on = now
        A = delta + gamma * gae_lambda * on * A
        return A, A

    _, advantages = jax.lax.scan(
        back, jnp.zeros_like(last_values), (deltas, goes_on), reverse=True, unroll=8
    )
    return advantages
