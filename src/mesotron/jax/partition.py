"""One transformation for a whole tree: Muon, NorMuon or Pion for the hidden matrices, AdamW for the
rest. `muon`, `normuon` and `pion` are the twins of PyTorch's builders and route the leaves by
`mesotron.jax.label`; `multi_transform_with_*` are the same under older names, and `chain_with_*`
clips first.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from mesotron.jax.filter import filter_batch
from mesotron.jax.labels import complain, label, only_matrices
from mesotron.jax.lora import is_factor, lora_product
from mesotron.jax.stats import Rate, check_range, measured, value_at
from mesotron.jax.step import Views
from mesotron.jax.transforms import NEWTON_SCHULZ, scale_by_muon, scale_by_pion
from mesotron.jax.views import named_leaves
from mesotron.spectral import make_filter
from mesotron.spectral.filters import Cutoff

_ROUTING = ("per_head", "stacked", "overrides", "strict")
_FILTER = ("filter", "steps", "rank", "promote", "cutoff")


def muon(
    learning_rate: Rate = 1e-3,
    momentum: Rate = 0.95,
    nesterov: bool = True,
    weight_decay: Rate = 0.01,
    scale: str | float | Array = "rms",
    *,
    aux_lr: Rate | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    filter: str | None = None,
    ns: str | None = None,
    steps: int | None = None,
    rank: int | None = None,
    lora: str | None = None,
    lora_scale: float = 1.0,
    lora_unit: str = "rms",
    views: Views = None,
    dtype: str | None = None,
    momentum_dtype: str | None = None,
    batched: bool = True,
    shardings: Any = None,
    stats: bool = False,
    **routing: Any,
) -> optax.GradientTransformation:
    """Muon for the hidden matrices of a tree of parameters, AdamW for the rest.

    Args:
        learning_rate: a full-rank step has an RMS of 0.2 learning_rate under scale="rms", so
            AdamW's rate carries over. A number or a schedule, like `momentum` and `weight_decay`.
        momentum: mu of the running mean of gradients.
        nesterov: look one step ahead.
        weight_decay: decoupled, applied as learning_rate * weight_decay to all but norms and
            biases; with 0, `update` needs no params.
        scale: the unit of the learning rate: "rms", "moonlight", "spectral" or a number (see
            `mesotron.spectral.step_scale`); m counts outputs and n inputs, as `views` says.
        aux_lr: learning rate of AdamW; None is `learning_rate`.
        betas, eps: of AdamW.
        filter: "muon" (the default), "cubic", "polar_express" or "low_rank".
        ns: "quintic" or "cubic", the same choice by another name. The cubic converges to exactly 1,
            from 0.01 to 0.89 in 12 steps, its default; the quintic brings 0.01 to 0.7 in 5, and
            everything above to between 0.7 and 1.2.
        steps: of the filter; None is its own default.
        rank: of the low_rank filter.
        lora: "product" steps pairs of leaves called lora_a and lora_b so that the change of their
            product is the filtered step (`mesotron.jax.lora`); None filters them like any matrix.
        lora_scale: the factor of the product in the forward pass, alpha / r as a rule.
        lora_unit: "rms" changes the product by full Muon's RMS at every rank, "direction" each of
            its directions as full Muon would.
        views: which axes hold outputs, inputs and separate matrices (`mesotron.jax.views`): one
            string for all leaves, or path -> string. Then nothing is routed, and every leaf must
            be a matrix; so is a tree of matrices alone without a name that tells their roles, with
            (inputs, outputs) in the last two axes.
        dtype: of the filter's matmuls, by name; None is float32 on a CPU and bfloat16 on an
            accelerator.
        momentum_dtype: of the momentum; None is float32.
        batched: filter leaves of one shape, transposes included, together.
        shardings: a tree like the parameters of their `jax.sharding.Sharding`s; needed (or
            batched=False) where leaves of one shape differ in it.
        stats: keep the statistics of the last step in the state, for `mesotron.jax.read_stats`;
            pairs of lora="product" report none.
        **routing: `per_head`, `stacked`, `overrides` and `strict` of `mesotron.jax.label`.

    Returns:
        An `optax.GradientTransformation`. Under `optax.inject_hyperparams` and `vmap` every number
        may be traced except those that shape the computation: if you pass `steps`, `rank` or a
        numeric `cutoff`, name it in `static_args`.

    Example:
        >>> params = {"embed": jnp.ones((9, 4)), "Dense_0": {"kernel": jnp.eye(4)}}
        >>> params["head"] = {"kernel": jnp.ones((4, 9)), "bias": jnp.zeros(9)}
        >>> tx = muon(0.1, weight_decay=0.0)
        >>> updates, state = tx.update(params, tx.init(params))

    References: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
    """
    return _multi_transform(scale_by_muon, "learning_rate", dict(locals()))


def normuon(
    learning_rate: Rate = 1e-3, *, beta2: Rate = 0.95, **options: Any
) -> optax.GradientTransformation:
    """NorMuon: `muon` whose filtered momentum is then normalized neuron by neuron.

    Args:
        beta2: decay of the second moments, one vector per matrix.
        learning_rate, **options: as in `muon`, without `lora`.

    Example:
        >>> tx = normuon(0.02, beta2=0.95)

    References: Li et al., "NorMuon", 2025, arXiv 2510.05491.
    """
    if options.get("lora") is not None:
        raise ValueError("lora='product' belongs to muon and pion, not to normuon")

    options = {
        "weight_decay": 0.01,
        **options,
        "beta2": beta2,
        "learning_rate": learning_rate,
    }
    return _multi_transform(scale_by_muon, "learning_rate", options)


def pion(
    learning_rate: Rate = 1e-3,
    momentum: Rate = 0.95,
    nesterov: bool = True,
    weight_decay: Rate = 0.01,
    scale: str | float | Array = "rms",
    *,
    promote: int | Array = 0,
    cutoff: Cutoff | None = None,
    aux_lr: Rate | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    steps: int | None = None,
    lora: str | None = None,
    lora_scale: float = 1.0,
    lora_unit: str = "rms",
    views: Views = None,
    dtype: str | None = None,
    momentum_dtype: str | None = None,
    batched: bool = True,
    shardings: Any = None,
    stats: bool = False,
    **routing: Any,
) -> optax.GradientTransformation:
    """Pion for the hidden matrices of a tree: strong directions get a full step, weak ones none.

    Args:
        promote: how many of the filter's steps raise all directions before the rest suppress the
            small ones. 0, the released code's default, lets at most one direction of a matrix pass.
            It may be traced; then it is not checked, and ignored next to a `cutoff`.
        cutoff: instead of `promote`, a continuous strength: a fraction of the largest singular
            value, "aligned" for sqrt(2) - 1 of it, or "noise" for the edge of pure noise of the
            matrix's shape.
        learning_rate, momentum, nesterov, weight_decay, scale, aux_lr, betas, eps, steps, lora,
            lora_scale, lora_unit, views, dtype, momentum_dtype, batched, shardings, stats,
            **routing: as in `muon`.

    Example:
        >>> tx = pion(optax.linear_schedule(0.02, 0.0, 1000), cutoff="aligned")

    References: Fan et al., "Pion", 2026, arXiv 2605.19282.
    """
    return _multi_transform(scale_by_pion, "learning_rate", dict(locals()))


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
        muon_lr: the `learning_rate` of `mesotron.jax.muon`.
        aux_lr, momentum, nesterov, weight_decay, betas, eps, **options: as in `mesotron.jax.muon`.

    Returns:
        An `optax.GradientTransformation`. A nonfinite gradient skips its own matrix; outside the
        matrices it skips the AdamW group.

    Example:
        >>> layer = lambda i, o: {"w": jnp.ones((i, o)), "b": jnp.zeros(o)}
        >>> params = [layer(3, 8), layer(8, 8), layer(8, 2)]
        >>> tx = multi_transform_with_muon(0.02, 2.5e-4)
        >>> updates, state = tx.update(params, tx.init(params), params)
    """
    return _multi_transform(scale_by_muon, "muon_lr", dict(locals()))


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
    return _multi_transform(scale_by_pion, "pion_lr", dict(locals()))


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
    routed = multi_transform_with_muon(
        muon_lr,
        aux_lr,
        momentum,
        nesterov,
        weight_decay,
        **options,
    )
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
    routed = multi_transform_with_pion(
        pion_lr,
        aux_lr,
        momentum,
        nesterov,
        weight_decay,
        **options,
    )
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
    check_range(max_norm=max_norm)

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


def _multi_transform(
    scale_by: Callable[..., optax.GradientTransformation], rate: str, options: dict[str, Any]
) -> optax.GradientTransformation:
    """`options` are the arguments of a public function, with the learning rate under `rate`."""
    for key in ("options", "routing"):
        while key in options:  # optax.inject_hyperparams nests a function's ** arguments again
            options |= options.pop(key)

    lr = options.pop(rate)
    aux_lr = options.pop("aux_lr", None)
    betas = options.pop("betas", (0.9, 0.999))
    eps = options.pop("eps", 1e-8)
    routing = {key: options.pop(key) for key in _ROUTING if key in options}
    views = options.pop("views", None)
    lora = options.pop("lora", None)
    usual = {"lora_scale": 1.0, "lora_unit": "rms"}
    unit = {key: options.pop(key, value) for key, value in usual.items()}
    stats = options.get("stats", False)
    decay = options["weight_decay"]
    scale_by(**options)  # refuses a wrong option now, not at the first step
    check_range(**{rate: lr}, aux_lr=aux_lr, eps=eps)
    check_range(1, **{f"beta {k}": beta for k, beta in enumerate(betas, 1)})
    if unit["lora_unit"] not in ("rms", "direction"):
        raise ValueError(f"lora_unit={unit['lora_unit']!r} must be 'rms' or 'direction'")
    if isinstance(unit["lora_scale"], int | float) and not unit["lora_scale"] > 0:
        raise ValueError(f"lora_scale={unit['lora_scale']} must be above 0, as alpha / r is")
    if lora not in (None, "product"):
        raise ValueError(f"lora={lora!r} must be 'product' or None")

    aux_lr = lr if aux_lr is None else aux_lr

    def matrices(views: Views) -> optax.GradientTransformation:
        direction = scale_by(
            views=views,
            stats_rate=lr,
            **options,
        )
        return optax.chain(direction, optax.scale_by_learning_rate(lr))

    def factors() -> optax.GradientTransformation:
        shape = {key: options[key] for key in _FILTER if options.get(key) is not None}
        iteration = NEWTON_SCHULZ.get(options.get("ns") or "", "muon")
        name = "pion" if scale_by is scale_by_pion else iteration
        keys = ("momentum", "nesterov", "weight_decay", "scale", "momentum_dtype")
        kept: dict[str, Any] = {key: options[key] for key in keys if key in options}

        # A traced number, such as an injected default, is ignored next to a cutoff.
        traced = shape.pop("promote") if isinstance(shape.get("promote"), Array) else None
        how = {"dtype": options.get("dtype"), "promote": None if "cutoff" in shape else traced}
        chosen = make_filter(shape.pop("filter", name), **shape)

        return lora_product(lr, partial(filter_batch, filter=chosen, **how), **unit, **kept)

    def route(tree: Any) -> optax.GradientTransformation:
        # Gradients have the paths and shapes of the parameters, so both give the same table.
        factor = [is_factor(path) for path, _ in named_leaves(tree)]
        pairs = lora is not None and any(factor)
        if lora is not None and factor and not pairs:
            raise ValueError("lora='product': no leaf's name ends in lora_a or lora_b")

        known = None if pairs or routing else only_matrices(tree)
        if views is not None or known is not None:
            return matrices(known if views is None else views)
        if pairs and all(factor):
            return factors()

        table = label(tree, lora=pairs, **routing)
        if not table.views() and not pairs:
            complain(
                "no leaf is a hidden matrix, so this is plain AdamW. Name one in "
                f"overrides={{'<path>': 'matrix'}}:\n{table}",
                routing.get("strict", False),
            )

        parts = {
            "matrix": matrices(table.views()),
            "adamw": _adamw(aux_lr, betas, eps, decay),
            "adamw_vectors": _adamw(aux_lr, betas, eps, 0.0),
        }
        if stats:
            for group, rate in (("adamw", decay), ("adamw_vectors", 0.0)):
                parts[group] = measured(parts[group], group, aux_lr, rate)

        if pairs:
            parts["lora"] = factors()

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
