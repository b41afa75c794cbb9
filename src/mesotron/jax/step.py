"""The spectral step on a tree of matrices: momentum, one batch per matrix shape, filter, scale.

The twin of `mesotron.optim.step`. The momentum stays raw: the filtered direction is never written
back into it. There is no bias correction, since the filter ignores scale.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from mesotron.jax.filter import FilteredBatch, filter_batch
from mesotron.jax.stats import (
    SPECTRAL,
    LeafRecord,
    Rate,
    Stats,
    check_range,
    cosine,
    name_stats,
    spectral_stats,
    value_at,
)
from mesotron.jax.views import check_view, default_view, from_wide, named_leaves, read_view, to_wide
from mesotron.spectral import Filter, check_scale, step_scale

_LINE_EPS = 1e-8
Views = str | Mapping[str, str] | None


class SpectralState(NamedTuple):
    step: Array  # steps made, int32
    momentum: Any  # the raw running mean of gradients, like the parameters
    stats: Stats  # of the last step, for `mesotron.jax.read_stats`; empty without `stats=True`
    lines: Any = ()  # NorMuon's second moments, [matrices, long side] for each leaf


@dataclass(frozen=True, kw_only=True)
class SpectralRule:
    """The options of one transformation; see `mesotron.jax.muon`."""

    filter: Filter
    momentum: Rate
    nesterov: bool
    weight_decay: Rate
    scale: str | float | Array
    views: Views
    dtype: str | None
    momentum_dtype: str | None
    batched: bool
    shardings: Mapping[str, Any] = field(default_factory=dict)
    group: str | None = None  # the prefix of its statistics; None keeps none
    rate: Rate = 1.0  # the learning rate applied afterwards, for the statistics
    promote: Array | None = None  # replaces the filter's own number if it is traced
    beta2: Rate | None = None  # NorMuon's decay; None is Muon

    def __post_init__(self) -> None:
        if not isinstance(self.scale, Array):
            check_scale(self.scale)
        check_range(1, momentum=self.momentum, beta2=self.beta2)
        check_range(weight_decay=self.weight_decay)

    def init(self, params: Any) -> SpectralState:
        lines = ()
        for name, leaf in named_leaves(params):  # refuses a wrong view now, not at the first step
            num, rows, cols = read_view(self.view_of(name, leaf), leaf.shape)
            if self.beta2 is not None:
                dtype = jnp.promote_types(leaf.dtype, jnp.float32)
                lines = (*lines, jnp.zeros((num, max(rows, cols)), dtype))

        def zeros(p: Array) -> Array:
            dtype = self.momentum_dtype or jnp.promote_types(p.dtype, jnp.float32)
            return jnp.zeros_like(p, dtype=dtype)

        if self.group is not None and jax.tree.leaves(params):
            keys = SPECTRAL
        else:
            keys = ()

        stats = name_stats(str(self.group), dict.fromkeys(keys, 0))

        return SpectralState(jnp.zeros([], jnp.int32), jax.tree.map(zeros, params), stats, lines)

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, SpectralState]:
        """The direction scale f(U) + decay W of every leaf, and the new state."""
        mu, decay = (value_at(x, state.step) for x in (self.momentum, self.weight_decay))
        decays = not (isinstance(decay, int | float) and decay == 0)
        if decays and params is None:
            raise ValueError(
                "weight decay needs the weights: call update(grads, state, params), or set "
                "weight_decay=0 (as a plain number: an injected one could become nonzero)"
            )

        names = [name for name, _ in named_leaves(updates)]
        grads, structure = jax.tree.flatten(updates)

        momenta, directions = self._accumulate(grads, structure.flatten_up_to(state.momentum), mu)
        views = [self.view_of(name, g) for name, g in zip(names, grads)]
        filtered = self._filter_all(views, directions)
        filtered, lines = self._normalize_all(filtered, grads, state)

        steps = [self._scaled(view, x.X, d) for view, x, d in zip(views, filtered, directions)]
        stats = Stats({})
        if self.group is not None and grads:
            records = [self._record(*leaf) for leaf in zip(views, filtered, steps, grads)]
            stats = spectral_stats(self.group, value_at(self.rate, state.step), records)

        if decays:
            steps = [s + decay * p for s, p in zip(steps, structure.flatten_up_to(params))]

        # A nonfinite gradient makes no step: weight and momentum stay as they were.
        for k, g in enumerate(grads):
            steps[k] = jnp.where(_finite(g), steps[k], 0).astype(g.dtype)

        steps = self._placed(names, steps)
        momenta = self._placed(names, momenta)
        step = jnp.asarray(optax.safe_increment(state.step))
        new_state = SpectralState(step, jax.tree.unflatten(structure, momenta), stats, lines)

        return jax.tree.unflatten(structure, steps), new_state

    def _accumulate(
        self, grads: Sequence[Array], before: Sequence[Array], mu: Any
    ) -> tuple[list[Array], list[Array]]:
        """The running means of the finite gradients, and the directions to filter."""
        momenta = []
        directions = []
        for g, old in zip(grads, before):
            m = jnp.where(_finite(g), _mix(g, old, mu).astype(old.dtype), old)
            ahead = jnp.where(_finite(g), g, m)
            momenta.append(m)
            directions.append(_mix(ahead, m, mu) if self.nesterov else m)

        return momenta, directions

    def view_of(self, name: str, leaf: Array) -> str:
        if isinstance(self.views, Mapping):
            view = self.views.get(name)
        else:
            view = self.views

        return check_view(view or default_view(leaf.ndim), leaf.shape, name)

    def _normalize_all(
        self, filtered: list[FilteredBatch], grads: Sequence[Array], state: SpectralState
    ) -> tuple[list[FilteredBatch], Any]:
        """NorMuon's normalization, and the second moments after it; nothing for Muon."""
        if self.beta2 is None:
            return filtered, state.lines

        beta2 = value_at(self.beta2, state.step)
        normalized = []
        lines = []
        for x, V, g in zip(filtered, state.lines, grads):
            x, V = _normalize_lines(x, V, _finite(g), beta2)
            normalized.append(x)
            lines.append(V)

        return normalized, tuple(lines)

    def _filter_all(self, views: Sequence[str], directions: Sequence[Array]) -> list[FilteredBatch]:
        """The filtered directions, wide; equal shapes, transposes included, in one batch."""
        buckets: dict[tuple, list[int]] = defaultdict(list)
        for k, (leaf, view) in enumerate(zip(directions, views)):
            _, rows, cols = read_view(view, leaf.shape)
            shape = (min(rows, cols), max(rows, cols))
            buckets[shape, leaf.dtype, None if self.batched else k].append(k)

        filtered: dict[int, FilteredBatch] = {}
        for members in buckets.values():
            wide = [to_wide(directions[k], views[k]) for k in members]
            dtype = self._matmul_dtype(wide[0])
            batch = filter_batch(jnp.concatenate(wide), self.filter, dtype, self.promote)

            start = 0
            for k, block in zip(members, wide):
                own = slice(start, start + len(block))
                filtered[k] = FilteredBatch(
                    batch.X[own], batch.concentration[own], batch.passed[own]
                )
                start += len(block)

        return [filtered[k] for k in range(len(directions))]

    def _matmul_dtype(self, X: Array) -> str | None:
        if self.dtype is not None or self.filter.rank is not None or X.dtype == jnp.float64:
            return self.dtype

        return "float32" if jax.default_backend() == "cpu" else "bfloat16"  # CPUs emulate it

    def _scaled(self, view: str, X: Array, like: Array) -> Array:
        step = from_wide(X, view, like.shape).astype(like.dtype)
        return (self._factor(view, like) * step).astype(like.dtype)

    def _factor(self, view: str, like: Array) -> float | Array:
        _, rows, cols = read_view(view, like.shape)
        if isinstance(self.scale, Array):
            return self.scale * step_scale(1.0, rows, cols)

        return step_scale(self.scale, rows, cols)

    def _record(self, view: str, x: FilteredBatch, step: Array, g: Array) -> LeafRecord:
        _, rows, cols = read_view(view, g.shape)

        return LeafRecord(
            concentration=x.concentration,
            passed=x.passed,
            block_size=rows * cols,
            scale=self._factor(view, g),
            finite=_finite(g),
            cosine=cosine(step, g),
        )

    def _placed(self, names: Sequence[str], leaves: Sequence[Array]) -> list[Array]:
        """Each leaf in its own sharding, which a batch may have changed to a neighbor's."""
        place = jax.lax.with_sharding_constraint
        own = self.shardings
        return [place(x, own[name]) if name in own else x for name, x in zip(names, leaves)]


def _normalize_lines(
    x: FilteredBatch, V: Array, ok: Array, beta2: Any
) -> tuple[FilteredBatch, Array]:
    """Divide the lines of the longer side by the root of their running mean square, and keep the
    matrix's norm, as in torch."""
    X = x.X.astype(V.dtype)
    new = jnp.where(ok, beta2 * V + (1 - beta2) * jnp.square(X).mean(1), V)
    scaled = X / (jnp.sqrt(new) + _LINE_EPS)[:, None, :]
    before = jnp.sqrt(jnp.square(X).sum((1, 2), keepdims=True))
    after = jnp.sqrt(jnp.square(scaled).sum((1, 2), keepdims=True))
    ratio = jnp.where(after > 0, before / jnp.where(after > 0, after, 1), 0)

    return x._replace(X=(scaled * ratio).astype(x.X.dtype)), new


def _mix(G: Array, M: Array, mu: float | Array) -> Array:
    """mu M + (1 - mu) G in float32 or wider: bfloat16 would drift by 5% of the momentum, not 1%."""
    G = G.astype(jnp.promote_types(M.dtype, jnp.float32))
    return (G + mu * (M - G)).astype(G.dtype)


def _finite(G: Array) -> Array:
    return jnp.isfinite(G).all()
