"""Step statistics as arrays in the optimizer's state; the twin of `mesotron.optim.stats`.

A transformation made with `stats=True` keeps them, and `read_stats` collects them from a state.
Names and formulas are those of docs/api/metrics.md; cosines are over whole leaves here.

Legend: a leaf holds B matrices; numbers of each of them are [B].
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

Rate = float | Array | Callable[[Any], Any]

# A block whose filtered norm is below this made practically no step, as in torch.
DEAD_NORM = 1e-3
ELEMENTWISE = ("update_rms", "cosine", "skipped")
SUMS = (
    "square",
    "elements",
    "blocks",
    "live",
    "concentration",
    "passed",
    "dead",
    "cosine",
    "stepped",
)
SPECTRAL = (*ELEMENTWISE, "concentration", "passed_rank", "dead_blocks", "blocks")


class Stats(NamedTuple):
    """A node of a state: "<group>/<statistic>" -> float32 scalar; empty without `stats=True`."""

    values: dict[str, Array]


class MeasuredState(NamedTuple):
    step: Array  # steps made
    inner: Any
    stats: Stats  # of the last step


class LeafRecord(NamedTuple):
    concentration: Array  # [B], as in `mesotron.jax.filter.FilteredBatch`
    passed: Array  # [B]
    block_size: int  # elements of one matrix
    scale: float | Array  # of the step before the learning rate
    finite: Array  # whether its gradient was finite; otherwise it makes no step
    cosine: Array  # between its direction and its gradient


def read_stats(state: Any) -> dict[str, Array]:
    """The last step's statistics from an optimizer's state.

    Args:
        state: of any transformation with one made with `stats=True` inside.

    Returns:
        "<group>/<statistic>" -> scalar, and "skipped", the sum over groups; zeros before the first
        step. After a `vmap` each has its axis.

    Example:
        >>> from mesotron.jax import muon
        >>> tx = muon(0.1, weight_decay=0.0, stats=True)
        >>> grads = {"w": jnp.eye(4)}
        >>> _, state = tx.update(grads, tx.init(grads))
        >>> round(float(read_stats(state)["muon/concentration"]), 3)  # four equal directions
        0.25
    """
    stats: dict[str, Array] = {}
    for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, Stats)):
        if not isinstance(node, Stats):
            continue

        twice = stats.keys() & node.values.keys()
        if twice:
            raise ValueError(
                f"two transformations of this state report {min(twice)!r}: make one without stats"
            )

        stats |= node.values

    if not stats:
        raise ValueError("no transformation of this state has statistics: make one with stats=True")

    skipped = []
    for key, value in stats.items():
        if key.endswith("/skipped"):
            skipped.append(value)

    return {**stats, "skipped": jnp.asarray(sum(skipped))}


def spectral_stats(group: str, rate: Any, leaves: Sequence[LeafRecord]) -> Stats:
    """Means over the matrices of a group, from the records of its leaves."""
    sums: dict[str, Any] = dict.fromkeys(SUMS, 0.0)
    for leaf in leaves:
        ok = leaf.finite.astype(jnp.float32)

        # A block without a gradient (an expert without tokens) is not evidence about the filter.
        seen = ok * (leaf.concentration > 0)
        is_dead = leaf.passed < DEAD_NORM**2

        sums["square"] += (ok * jnp.square(leaf.scale) * leaf.passed).sum()
        sums["elements"] += ok * leaf.block_size * len(leaf.passed)
        sums["blocks"] += ok * len(leaf.passed)
        sums["live"] += seen.sum()
        sums["concentration"] += (seen * leaf.concentration).sum()
        sums["passed"] += (seen * leaf.passed).sum()
        sums["dead"] += (seen * is_dead).sum()
        sums["cosine"] += jnp.where(leaf.finite, leaf.cosine, 0)
        sums["stepped"] += ok

    live = jnp.maximum(sums["live"], 1)
    mean_square = sums["square"] / jnp.maximum(sums["elements"], 1)
    numbers = {
        "update_rms": jnp.abs(rate) * jnp.sqrt(mean_square),
        "cosine": sums["cosine"] / jnp.maximum(sums["stepped"], 1),
        "skipped": len(leaves) - sums["stepped"],
        "concentration": sums["concentration"] / live,
        "passed_rank": sums["passed"] / live,
        "dead_blocks": sums["dead"] / live,
        "blocks": sums["blocks"],
    }
    return name_stats(group, numbers)


def measured(
    inner: optax.GradientTransformation, group: str, rate: Rate, weight_decay: Rate
) -> optax.GradientTransformation:
    """Add statistics to an elementwise rule that steps all of its leaves or none; `rate` and
    `weight_decay` are its own, and `update_rms` excludes the decay."""

    def init(params: Any) -> MeasuredState:
        keys = ELEMENTWISE if jax.tree.leaves(params) else ()
        stats = name_stats(group, dict.fromkeys(keys, 0))
        return MeasuredState(jnp.zeros([], jnp.int32), inner.init(params), stats)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MeasuredState]:
        result, inner_state = inner.update(updates, state.inner, params)
        grads = jax.tree.leaves(updates)
        steps = jax.tree.leaves(result)

        decay = value_at(rate, state.step) * value_at(weight_decay, state.step)
        if params is not None:
            weights = jax.tree.leaves(params)
            steps = [s.astype(jnp.float32) + decay * w for s, w in zip(steps, weights)]

        stats = _elementwise_stats(group, grads, steps) if grads else Stats({})
        step = jnp.asarray(optax.safe_increment(state.step))

        return result, MeasuredState(step, inner_state, stats)

    return optax.GradientTransformation(init, update)


def _elementwise_stats(group: str, grads: Sequence[Array], steps: Sequence[Array]) -> Stats:
    finite = jnp.array([jnp.isfinite(g).all() for g in grads])
    stepped = finite.all()
    square = sum(jnp.square(s.astype(jnp.float32)).sum() for s in steps)
    size = max(sum(s.size for s in steps), 1)
    cosines = [cosine(-s, g) for s, g in zip(steps, grads)]

    numbers = {
        "update_rms": jnp.where(stepped, jnp.sqrt(square / size), 0),
        "cosine": jnp.where(stepped, sum(cosines) / len(cosines), 0),
        "skipped": (~finite).sum(),
    }
    return name_stats(group, numbers)


def cosine(X: Array, G: Array) -> Array:
    """Of two arrays of any magnitude from 1e-30 to 1e30; 0 if one is zero."""
    X = _without_magnitude(X)
    G = _without_magnitude(G)
    length = jnp.linalg.norm(X) * jnp.linalg.norm(G)

    return jnp.where(length == 0, 0, X @ G / jnp.where(length == 0, 1, length))


def _without_magnitude(X: Array) -> Array:
    """X as a vector whose largest entry is 1: the square of 1e30 overflows."""
    x = X.astype(jnp.float32).ravel()
    largest = jnp.abs(x).max(initial=0)

    return x / jnp.where(largest == 0, 1, largest)


def check_range(below: float = jnp.inf, **values: Any) -> None:
    for name, value in values.items():  # one that is traced or a schedule is not known yet
        if isinstance(value, int | float) and not 0 <= value < below:
            raise ValueError(f"{name}={value} must lie in [0, {below:g})")


def value_at(rate: Rate, step: Array) -> Any:
    return rate(step) if callable(rate) else rate


def name_stats(group: str, numbers: dict[str, Any]) -> Stats:
    values = {}
    for key, number in numbers.items():
        values[f"{group}/{key}"] = jnp.asarray(number, jnp.float32)

    return Stats(values)
