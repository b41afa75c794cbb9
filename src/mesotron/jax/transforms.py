"""Muon's, NorMuon's and Pion's steps on trees of matrices, as optax transformations.

The step is the same as in PyTorch, with the same argument names and defaults:

    M <- mu M + (1 - mu) G;  U = (1 - mu) G + mu M (Nesterov);  W <- (1 - lr wd) W - lr scale f(U)

`mesotron.jax.partition` routes whole trees to them.
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
    beta2: Rate | None = None,
) -> optax.GradientTransformation:
    """Muon's direction, scale(m, n) f(U) + weight_decay W: `muon` without the learning rate.

    Takes matrices only. Arguments are those of `muon`; `stats_rate` is the learning rate applied
    afterwards, for the statistic `update_rms`; `beta2` makes it NorMuon. The decay is included, so
    that a nonfinite gradient stops it too.

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
        filter=make_filter(filter or "muon", steps=steps, rank=rank),
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        scale=scale,
        views=views,
        dtype=dtype,
        momentum_dtype=momentum_dtype,
        batched=batched,
        shardings=dict(named_leaves(shardings)),
        group=("muon" if beta2 is None else "normuon") if stats else None,
        rate=stats_rate,
        beta2=beta2,
    )

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
        filter=make_filter(
            "pion",
            steps=steps,
            promote=known,
            cutoff=cutoff,
        ),
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        scale=scale,
        views=views,
        dtype=dtype,
        momentum_dtype=momentum_dtype,
        batched=batched,
        shardings=dict(named_leaves(shardings)),
        group="pion" if stats else None,
        rate=stats_rate,
        promote=traced,
    )

    return optax.GradientTransformation(rule.init, rule.update)


def _refuse_traced(**values: Any) -> None:
    traced = []
    for name, value in values.items():
        if isinstance(value, jax.Array):
            traced.append(name)

    if traced:
        raise ValueError(
            f"{', '.join(traced)} shapes the computation and cannot be an array: under "
            f"optax.inject_hyperparams, pass static_args={tuple(traced)}"
        )
