"""The spectral step on a tree of matrices: momentum, one batch per matrix shape, filter, scale.

The twin of `mesotron.optim.spectral_step`. The momentum stays raw: the filtered direction is never
written back into it. There is no bias correction, since the filter does not see a scale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from mesotron.jax.filter import apply_filter, default_dtype
from mesotron.jax.paths import named_leaves
from mesotron.jax.views import check_view, default_view, from_wide, read_view, to_wide
from mesotron.spectral import Filter, check_scale, step_scale

Rate = float | Array | Callable[[Any], Any]
Views = str | Mapping[str, str] | None


class SpectralState(NamedTuple):
    """What a spectral transformation keeps.

    Args:
        step: steps made, int32.
        momentum: the raw running mean of gradients, like the parameters.
    """

    step: Array
    momentum: Any


@dataclass(frozen=True)
class SpectralRule:
    """The options of one transformation; see `mesotron.jax.muon`."""

    filter: Filter
    momentum: Rate
    nesterov: bool
    weight_decay: Rate
    scale: str | float
    views: Views
    dtype: str | None
    momentum_dtype: str | None
    batched: bool
    shardings: Mapping[str, Any]

    def __post_init__(self) -> None:
        check_scale(self.scale)
        if isinstance(self.momentum, int | float) and not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum} must lie in [0, 1)")

    def init(self, params: Any) -> SpectralState:
        """No steps made, no momentum; every leaf must hold matrices."""
        for name, leaf in named_leaves(params):
            self.view_of(name, leaf)  # refused now and not at the first step
        momentum = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=self._state_dtype(p)), params)
        return SpectralState(jnp.zeros([], jnp.int32), momentum)

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, SpectralState]:
        """The direction scale f(U) + decay W of every leaf, and what is kept."""
        mu, decay = (_at(x, state.step) for x in (self.momentum, self.weight_decay))
        decays = not (isinstance(decay, int | float) and decay == 0)
        if decays and params is None:
            raise ValueError(
                "weight decay needs the weights: call update(grads, state, params), or set "
                "weight_decay=0 (a plain number: an injected one may become anything)"
            )
        names, grads = _unzip(named_leaves(updates))
        momenta = [
            _update_momentum(g, m, mu) for g, m in zip(grads, jax.tree.leaves(state.momentum))
        ]
        directions = [self._direction(g, m, mu) for g, m in zip(grads, momenta)]
        steps = self._filter_all(names, directions)
        if decays:
            steps = [s + decay * p for s, p in zip(steps, jax.tree.leaves(params))]
        # A gradient that is not finite makes no step, and leaves weight and momentum as they were.
        steps = [jnp.where(_finite(g), s, 0).astype(g.dtype) for s, g in zip(steps, grads)]
        steps, momenta = self._placed(names, steps), self._placed(names, momenta)
        structure = jax.tree.structure(updates)
        kept = SpectralState(
            jnp.asarray(optax.safe_increment(state.step)), jax.tree.unflatten(structure, momenta)
        )
        return jax.tree.unflatten(structure, steps), kept

    def _placed(self, names: Sequence[str], leaves: Sequence[Array]) -> list[Array]:
        """Each leaf in its own sharding: a batch may have lent it that of a neighbour."""
        return [
            jax.lax.with_sharding_constraint(leaf, self.shardings[name])
            if name in self.shardings
            else leaf
            for name, leaf in zip(names, leaves)
        ]

    def _direction(self, G: Array, M: Array, mu: float | Array) -> Array:
        """What the filter sees, after `_update_momentum`."""
        if not self.nesterov:
            return M
        G = jnp.where(_finite(G), G, M).astype(M.dtype)
        return _mix(G, M, mu)

    def _filter_all(self, names: Sequence[str], directions: Sequence[Array]) -> list[Array]:
        """The scaled and filtered directions; equal shapes, transposes included, in one batch."""
        views = [self.view_of(name, leaf) for name, leaf in zip(names, directions)]
        buckets: dict[tuple, list[int]] = defaultdict(list)
        for k, (leaf, view) in enumerate(zip(directions, views)):
            alone = None if self.batched else k
            buckets[read_view(view, leaf.shape).block_shape, leaf.dtype, alone].append(k)
        steps: dict[int, Array] = {}
        for members in buckets.values():
            wide = [to_wide(directions[k], views[k]) for k in members]
            filtered = apply_filter(jnp.concatenate(wide), self.filter, self._dtype(wide[0]))
            start = 0
            for k, block in zip(members, wide):
                X = filtered[start : start + len(block)]
                start += len(block)
                steps[k] = self._scaled(X, views[k], directions[k])
        return [steps[k] for k in range(len(directions))]

    def _scaled(self, X: Array, view: str, like: Array) -> Array:
        _, rows, cols = read_view(view, like.shape)
        factor = step_scale(self.scale, rows, cols)
        return factor * from_wide(X, view, like.shape).astype(like.dtype)

    def view_of(self, name: str, leaf: Array) -> str:
        """The view of a leaf by its path."""
        view = self.views.get(name) if isinstance(self.views, Mapping) else self.views
        return check_view(view or default_view(leaf.ndim), leaf.shape, name)

    def _dtype(self, X: Array) -> str | None:
        if self.dtype is not None:
            return self.dtype
        exact = self.filter.rank is not None or X.dtype == jnp.float64
        return None if exact else default_dtype()

    def _state_dtype(self, p: Array) -> Any:
        return self.momentum_dtype or jnp.promote_types(p.dtype, jnp.float32)


def _update_momentum(G: Array, M: Array, mu: float | Array) -> Array:
    """mu M + (1 - mu) G; M itself where the gradient is not finite."""
    return jnp.where(_finite(G), _mix(G.astype(M.dtype), M, mu), M)


def _mix(G: Array, M: Array, mu: float | Array) -> Array:
    return (G + mu * (M - G)).astype(M.dtype)


def _finite(G: Array) -> Array:
    return jnp.isfinite(G).all()


def _at(rate: Rate, count: Array) -> Any:
    return rate(count) if callable(rate) else rate


def _unzip(pairs: Sequence[tuple[str, Any]]) -> tuple[list[str], list[Any]]:
    return [name for name, _ in pairs], [leaf for _, leaf in pairs]
