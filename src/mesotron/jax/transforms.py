"""Muon and Pion as optax transformations; the twins of `mesotron.Muon` and `mesotron.Pion`.

The step is the same as in PyTorch, with the same argument names and defaults:

    M <- mu M + (1 - mu) G;  U = (1 - mu) G + mu M (Nesterov);  W <- (1 - lr wd) W - lr scale f(U)

These take matrices only; `mesotron.jax.partition` routes a whole tree of parameters.
"""

from typing import Any

import jax
import jax.numpy as jnp  # noqa: F401  # for the examples
import optax
from jax import Array

from mesotron.jax.stats import Rate
from mesotron.jax.step import SpectralRule, Views
from mesotron.jax.views import named_leaves
from mesotron.spectral import make_filter
from mesotron.spectral.filters import Cutoff

# Names of the iteration in other JAX code.
NEWTON_SCHULZ = {"quintic": "muon", "cubic": "cubic"}


def scale_by_muon(
    momentum: Rate = 0.95,
    nesterov: bool = True,
    *,
    weight_decay: Rate = 0.0,
    scale: str | float | Array = "rms",
    filter: str | None = None,
    ns: str | None = None,
    steps: int | None = None,
    rank: int | None = None,
    views: Views = None,
    dtype: str | None = None,
    momentum_dtype: str | None = None,
    batched: bool = True,
    shardings: Any = None,
    stats: bool = False,
    stats_rate: Rate = 1.0,
) -> optax.GradientTransformation:
    """Muon's direction, scale(m, n) f(U) + weight_decay W: `muon` without the learning rate.

    Arguments are those of `muon`, and `stats_rate`: the learning rate applied afterwards, for the
    statistic `update_rms`. The decay is included, so that a nonfinite gradient stops it too.

    Example:
        >>> tx = scale_by_muon(scale="spectral", ns="cubic")
        >>> grads = {"w": jnp.eye(2)}
        >>> float(tx.update(grads, tx.init(grads))[0]["w"][0, 0].round(2))
        1.0
    """
    if ns is not None:
        if ns not in NEWTON_SCHULZ or filter not in (None, "muon", NEWTON_SCHULZ[ns]):
            raise ValueError(
                f"ns={ns!r} with filter={filter!r}: ns is 'quintic' or 'cubic', other names of the "
                "filters 'muon' and 'cubic'; pass only one of the two"
            )
        filter = NEWTON_SCHULZ[ns]
    _refuse_traced(steps=steps, rank=rank)
    rule = SpectralRule(
        filter=make_filter(filter or "muon", steps=steps, rank=rank), momentum=momentum,
        nesterov=nesterov, weight_decay=weight_decay, scale=scale, views=views, dtype=dtype,
        momentum_dtype=momentum_dtype, batched=batched, shardings=dict(named_leaves(shardings)),
        group="muon" if stats else None, rate=stats_rate,
    )  # fmt: skip
    return optax.GradientTransformation(rule.init, rule.update)


def scale_by_pion(
    momentum: Rate = 0.95,
    nesterov: bool = True,
    *,
    promote: int | Array = 0,
    cutoff: Cutoff | None = None,
    weight_decay: Rate = 0.0,
    scale: str | float | Array = "rms",
    steps: int | None = None,
    views: Views = None,
    dtype: str | None = None,
    momentum_dtype: str | None = None,
    batched: bool = True,
    shardings: Any = None,
    stats: bool = False,
    stats_rate: Rate = 1.0,
) -> optax.GradientTransformation:
    """Pion's direction: `pion` without the learning rate.

    Arguments are those of `pion`, and `stats_rate` as in `scale_by_muon`.

    Example:
        >>> tx = scale_by_pion(cutoff="aligned")
    """
    _refuse_traced(steps=steps, cutoff=cutoff)
    # An injected default of 0 is an array too; next to a cutoff it is ignored.
    traced = promote if isinstance(promote, Array) and cutoff is None else None
    known = 0 if isinstance(promote, Array) else promote
    rule = SpectralRule(
        filter=make_filter("pion", steps=steps, promote=known, cutoff=cutoff), momentum=momentum,
        nesterov=nesterov, weight_decay=weight_decay, scale=scale, views=views, dtype=dtype,
        momentum_dtype=momentum_dtype, batched=batched, shardings=dict(named_leaves(shardings)),
        group="pion" if stats else None, rate=stats_rate, promote=traced,
    )  # fmt: skip
    return optax.GradientTransformation(rule.init, rule.update)


def muon(
    learning_rate: Rate = 1e-3,
    momentum: Rate = 0.95,
    nesterov: bool = True,
    weight_decay: Rate = 0.01,
    scale: str | float | Array = "rms",
    *,
    filter: str | None = None,
    ns: str | None = None,
    steps: int | None = None,
    rank: int | None = None,
    views: Views = None,
    dtype: str | None = None,
    momentum_dtype: str | None = None,
    batched: bool = True,
    shardings: Any = None,
    stats: bool = False,
) -> optax.GradientTransformation:
    """Muon for a tree of matrices: every direction of the momentum gets the same step.

    Args:
        learning_rate: a full-rank step has an RMS of 0.2 learning_rate under scale="rms", so
            AdamW's rate carries over. A number or a schedule, like `momentum` and `weight_decay`.
        momentum: mu of the running mean of gradients.
        nesterov: look one step ahead.
        weight_decay: decoupled, applied as learning_rate * weight_decay; with 0, `update` needs no
            params.
        scale: the unit of the learning rate: "rms", "moonlight", "spectral" or a number (see
            `mesotron.spectral.step_scale`); m counts outputs and n inputs, as `views` says.
        filter: "muon" (the default), "cubic", "polar_express" or "low_rank".
        ns: "quintic" or "cubic", the same choice by another name. The cubic converges to exactly 1,
            from 0.01 to 0.89 in 12 steps, its default; the quintic brings 0.01 to 0.7 in 5, and
            everything above to between 0.7 and 1.2.
        steps: of the filter; None is its own default.
        rank: of the low_rank filter.
        views: which axes hold outputs, inputs and separate matrices (`mesotron.jax.views`): one
            string for all leaves, or path -> string; None is (inputs, outputs) in the last two
            axes and stacks in those before them.
        dtype: of the filter's matmuls, by name; None is float32 on a CPU and bfloat16 on an
            accelerator.
        momentum_dtype: of the momentum; None is float32.
        batched: filter leaves of one shape, transposes included, together.
        shardings: a tree like the parameters of their `jax.sharding.Sharding`s; needed (or
            batched=False) where leaves of one shape differ in it.
        stats: keep the statistics of the last step in the state, for `mesotron.jax.read_stats`.

    Returns:
        An `optax.GradientTransformation`. Under `optax.inject_hyperparams` and `vmap` every number
        may be traced except those that shape the computation: if you pass `steps`, `rank` or a
        numeric `cutoff`, name it in `static_args`.

    Example:
        >>> params = {"w": jnp.eye(2)}
        >>> tx = muon(0.1, weight_decay=0.0)
        >>> updates, state = tx.update({"w": jnp.ones((2, 2))}, tx.init(params))
        >>> bool((updates["w"] < 0).all())
        True

    References: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
    """
    direction = scale_by_muon(
        momentum, nesterov, weight_decay=weight_decay, scale=scale, filter=filter, ns=ns,
        steps=steps, rank=rank, views=views, dtype=dtype, momentum_dtype=momentum_dtype,
        batched=batched, shardings=shardings, stats=stats, stats_rate=learning_rate,
    )  # fmt: skip
    return optax.chain(direction, optax.scale_by_learning_rate(learning_rate))


def pion(
    learning_rate: Rate = 1e-3,
    momentum: Rate = 0.95,
    nesterov: bool = True,
    weight_decay: Rate = 0.01,
    scale: str | float | Array = "rms",
    *,
    promote: int | Array = 0,
    cutoff: Cutoff | None = None,
    steps: int | None = None,
    views: Views = None,
    dtype: str | None = None,
    momentum_dtype: str | None = None,
    batched: bool = True,
    shardings: Any = None,
    stats: bool = False,
) -> optax.GradientTransformation:
    """Pion for a tree of matrices: strong directions get a full step, weak ones none.

    Args:
        promote: how many of the filter's steps raise all directions before the rest suppress the
            small ones. 0, the released code's default, lets at most one direction of a matrix pass.
            It may be traced; then it is not checked, and ignored next to a `cutoff`.
        cutoff: instead of `promote`, a continuous strength: a fraction of the largest singular
            value, "aligned" for sqrt(2) - 1 of it, or "noise" for the edge of pure noise of the
            matrix's shape.
        learning_rate, momentum, nesterov, weight_decay, scale, steps, views, dtype, momentum_dtype,
            batched, shardings, stats: as in `muon`.

    Example:
        >>> tx = pion(optax.linear_schedule(0.02, 0.0, 1000), cutoff="aligned")

    References: Fan et al., "Pion", 2026, arXiv 2605.19282.
    """
    direction = scale_by_pion(
        momentum, nesterov, promote=promote, cutoff=cutoff, weight_decay=weight_decay, scale=scale,
        steps=steps, views=views, dtype=dtype, momentum_dtype=momentum_dtype, batched=batched,
        shardings=shardings, stats=stats, stats_rate=learning_rate,
    )  # fmt: skip
    return optax.chain(direction, optax.scale_by_learning_rate(learning_rate))


def _refuse_traced(**values: Any) -> None:
    traced = [name for name, value in values.items() if isinstance(value, jax.Array)]
    if traced:
        raise ValueError(
            f"{', '.join(traced)} shapes the computation and cannot be an array: under "
            f"optax.inject_hyperparams, pass static_args={tuple(traced)}"
        )
