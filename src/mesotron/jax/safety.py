"""Transformations that keep a bad gradient from doing harm: clipping, and skipped steps."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from mesotron.jax.stats import Rate, check_range, value_at


def clip_by_global_norm(max_norm: Rate) -> optax.GradientTransformation:
    """As in optax, but safe for gradients of 1e30 and without counting nonfinite leaves.

    Args:
        max_norm: a number or a schedule.

    Example:
        >>> clip = clip_by_global_norm(1.0)
        >>> clipped, _ = clip.update({"w": jnp.array([3e30, 4e30])}, clip.init(None))
        >>> round(float(jnp.linalg.norm(clipped["w"])), 3)
        1.0
    """
    check_range(max_norm=max_norm)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        leaves = []
        for g in jax.tree.leaves(updates):
            if g.size:
                finite = jnp.where(jnp.isfinite(g).all(), g, 0)
                leaves.append(finite.astype(jnp.promote_types(g.dtype, jnp.float32)))

        largest = jnp.array([0.0, *(jnp.abs(g).max() for g in leaves)]).max()
        unit = jnp.where(largest == 0, 1, largest)
        norm = jnp.sqrt(sum(jnp.square(g / unit).sum() for g in leaves))  # of the gradients / unit

        # In this order, since unit * norm may overflow float32.
        limit = value_at(max_norm, state.count)
        factor = jnp.minimum(1, limit / unit / jnp.where(norm == 0, 1, norm))
        clipped = jax.tree.map(lambda g: (g * factor).astype(g.dtype), updates)

        return clipped, optax.ScaleByScheduleState(jnp.asarray(optax.safe_increment(state.count)))

    def init(params: Any) -> optax.ScaleByScheduleState:
        return optax.ScaleByScheduleState(jnp.zeros([], jnp.int32))

    return optax.GradientTransformation(init, update)


def skip_nonfinite(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Skip the step and keep the state if any gradient is not finite.

    Example:
        >>> adam = skip_nonfinite(optax.scale_by_adam())
        >>> grads = {"w": jnp.array([1.0, jnp.nan])}
        >>> adam.update(grads, adam.init(grads))[0]["w"].tolist()
        [0.0, 0.0]
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        finite = [jnp.isfinite(g).all() for g in jax.tree.leaves(updates)]
        ok = jnp.array(finite).all() if finite else True
        steps, new = inner.update(updates, state, params)
        steps = jax.tree.map(lambda step: jnp.where(ok, step, 0), steps)

        return steps, jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, state)

    return optax.GradientTransformation(inner.init, update)
