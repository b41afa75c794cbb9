"""One transformation for a whole tree: Muon or Pion for the hidden matrices, AdamW for the rest.
`multi_transform_with_*` routes the leaves by `mesotron.jax.label`; `chain_with_*` clips first.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mesotron.jax.labels import label
from mesotron.jax.stats import Rate, measured, value_at
from mesotron.jax.transforms import muon, pion

_ROUTING = ("per_head", "stacked", "overrides")


def multi_transform_with_muon(
    muon_lr: Rate = 1e-3,
    aux_lr: Rate | None = None,
    momentum: Rate = 0.95,
    nesterov: bool = True,
    weight_decay: Rate = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    **options: Any,
) -> optax.GradientTransformation:
    """Muon for the hidden matrices of a tree, AdamW for the rest.

    Args:
        muon_lr: learning rate of Muon; a full-rank step has an RMS of 0.2 muon_lr under
            scale="rms".
        aux_lr: learning rate of AdamW; None is `muon_lr`.
        momentum, nesterov: of Muon.
        weight_decay: decoupled, for all but norms and biases; with 0, `update` needs no params.
        betas, eps: of AdamW.
        **options: routing (`per_head`, `stacked`, `overrides`: see `mesotron.jax.label`) and
            any argument of `mesotron.jax.muon` (`scale`, `ns`, `steps`, `stats`, ...).

    Returns:
        An `optax.GradientTransformation`. A nonfinite gradient skips its own matrix; outside the
        matrices it skips the AdamW group.

    Example:
        >>> layer = lambda i, o: {"w": jnp.ones((i, o)), "b": jnp.zeros(o)}
        >>> params = [layer(3, 8), layer(8, 8), layer(8, 2)]
        >>> tx = multi_transform_with_muon(0.02, 2.5e-4)
        >>> updates, state = tx.update(params, tx.init(params), params)
    """
    options |= {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    return _multi_transform(muon, muon_lr, aux_lr, betas, eps, options)


def multi_transform_with_pion(
    pion_lr: Rate = 1e-3,
    aux_lr: Rate | None = None,
    momentum: Rate = 0.95,
    nesterov: bool = True,
    weight_decay: Rate = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    **options: Any,
) -> optax.GradientTransformation:
    """Pion for the hidden matrices of a tree, AdamW for the rest.

    Arguments as in `multi_transform_with_muon`, and `promote=` or `cutoff=` as in `pion`.

    Example:
        >>> tx = multi_transform_with_pion(0.02, 2.5e-4, cutoff="aligned", per_head=True)
    """
    options |= {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    return _multi_transform(pion, pion_lr, aux_lr, betas, eps, options)


def chain_with_muon(
    muon_lr: Rate = 1e-3,
    aux_lr: Rate | None = None,
    max_grad_norm: Rate | None = 0.5,
    momentum: Rate = 0.95,
    nesterov: bool = True,
    weight_decay: Rate = 0.01,
    **options: Any,
) -> optax.GradientTransformation:
    """Clip by the global norm, then Muon for the hidden matrices and AdamW for the rest.

    Args:
        max_grad_norm: limit on the global gradient norm, or a schedule of it; None does not clip.
            Clipping does not shrink a matrix's step, only its weight in the momentum.
        muon_lr, aux_lr, momentum, nesterov, weight_decay, **options: as in
            `multi_transform_with_muon`.

    Example:
        >>> schedule = optax.linear_schedule(0.02, 0.0, 1000)
        >>> tx = chain_with_muon(schedule, 2.5e-4, max_grad_norm=0.5)
    """
    routed = multi_transform_with_muon(muon_lr, aux_lr, momentum, nesterov, weight_decay, **options)
    return _clipped(routed, max_grad_norm)


def chain_with_pion(
    pion_lr: Rate = 1e-3,
    aux_lr: Rate | None = None,
    max_grad_norm: Rate | None = 0.5,
    momentum: Rate = 0.95,
    nesterov: bool = True,
    weight_decay: Rate = 0.01,
    **options: Any,
) -> optax.GradientTransformation:
    """Clip by the global norm, then Pion for the hidden matrices and AdamW for the rest.

    Arguments as in `chain_with_muon` and `multi_transform_with_pion`.

    Example:
        >>> tx = chain_with_pion(0.02, 2.5e-4, promote=2)
    """
    routed = multi_transform_with_pion(pion_lr, aux_lr, momentum, nesterov, weight_decay, **options)
    return _clipped(routed, max_grad_norm)


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

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        leaves = [jnp.where(jnp.isfinite(g).all(), g, 0) for g in jax.tree.leaves(updates)]
        leaves = [g.astype(jnp.promote_types(g.dtype, jnp.float32)) for g in leaves if g.size]
        largest = jnp.array([0.0, *(jnp.abs(g).max() for g in leaves)]).max()
        unit = jnp.where(largest == 0, 1, largest)
        norm = jnp.sqrt(sum(jnp.square(g / unit).sum() for g in leaves))  # of the gradients / unit
        # In this order, since unit * norm may overflow float32.
        limit = value_at(max_norm, state.count)
        factor = jnp.minimum(1, limit / unit / jnp.where(norm == 0, 1, norm))
        clipped = jax.tree.map(lambda g: (g * factor).astype(g.dtype), updates)
        count = jnp.asarray(optax.safe_increment(state.count))
        return clipped, optax.ScaleByScheduleState(count)

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


def _multi_transform(
    rule: Callable[..., optax.GradientTransformation],
    lr: Rate,
    aux_lr: Rate | None,
    betas: tuple[float, float],
    eps: float,
    options: dict[str, Any],
) -> optax.GradientTransformation:
    # optax.inject_hyperparams passes a function's ** arguments as one, under their own name.
    options |= options.pop("options", {})
    routing = {key: options.pop(key) for key in _ROUTING if key in options}
    stats, decay = options.get("stats", False), options["weight_decay"]
    rule(lr, **options)  # refuses a wrong option now, not at the first step
    aux_lr = lr if aux_lr is None else aux_lr

    def route(tree: Any) -> optax.GradientTransformation:
        # Gradients have the paths and shapes of the parameters, so both give the same table.
        table = label(tree, **routing)
        if not table.views():
            raise ValueError(
                "no leaf is a hidden matrix, so this would be plain AdamW. Name one in "
                f"overrides={{'<path>': 'matrix'}}:\n{table}"
            )
        parts = {
            "matrix": rule(lr, views=table.views(), **options),
            "adamw": _adamw(aux_lr, betas, eps, decay),
            "adamw_vectors": _adamw(aux_lr, betas, eps, 0.0),
        }
        if stats:
            for group, rate in (("adamw", decay), ("adamw_vectors", 0.0)):
                parts[group] = measured(parts[group], group, aux_lr, rate)
        return optax.partition(parts, table.labels())  # pyright: ignore

    def init(params: Any) -> Any:
        return route(params).init(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return route(updates).update(updates, state, params)

    return optax.GradientTransformation(init, update)


def _adamw(
    lr: Rate, betas: tuple[float, float], eps: float, weight_decay: Rate
) -> optax.GradientTransformation:
    direction = [optax.scale_by_adam(*betas, eps=eps)]
    if not (isinstance(weight_decay, int | float) and weight_decay == 0):
        direction.append(optax.add_decayed_weights(weight_decay))
    # The rate is outside, so that its schedule advances when a step is skipped.
    return optax.chain(skip_nonfinite(optax.chain(*direction)), optax.scale_by_learning_rate(lr))


def _clipped(tx: optax.GradientTransformation, norm: Rate | None) -> optax.GradientTransformation:
    return tx if norm is None else optax.chain(clip_by_global_norm(norm), tx)
