"""One transformation for a whole tree: Muon, NorMuon or Pion for the hidden matrices, AdamW for the
rest. `muon`, `normuon` and `pion` are the twins of PyTorch's builders and route the leaves by
`mesotron.jax.label`; `multi_transform_with_*` are the same under older names, and `chain_with_*`
clips first. `tree.transform_tree` does the work.
"""

from typing import Any

import jax.numpy as jnp  # noqa: F401  # for the examples
import optax
from jax import Array

from mesotron.jax.safety import clip_by_global_norm
from mesotron.jax.stats import Rate
from mesotron.jax.step import Views
from mesotron.jax.transforms import scale_by_muon, scale_by_pion
from mesotron.jax.tree import transform_tree
from mesotron.spectral.filters import Cutoff


def muon(  # the public signature names every option
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
    return transform_tree(
        scale_by_muon,
        learning_rate,
        aux_lr=aux_lr,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        scale=scale,
        betas=betas,
        eps=eps,
        filter=filter,
        ns=ns,
        rank=rank,
        steps=steps,
        lora=lora,
        lora_scale=lora_scale,
        lora_unit=lora_unit,
        views=views,
        dtype=dtype,
        momentum_dtype=momentum_dtype,
        batched=batched,
        shardings=shardings,
        stats=stats,
        **routing,
    )


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

    options = {"weight_decay": 0.01, **options, "beta2": beta2}
    return transform_tree(scale_by_muon, learning_rate, **options)


def pion(  # the public signature names every option
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
    return transform_tree(
        scale_by_pion,
        learning_rate,
        aux_lr=aux_lr,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        scale=scale,
        betas=betas,
        eps=eps,
        promote=promote,
        cutoff=cutoff,
        steps=steps,
        lora=lora,
        lora_scale=lora_scale,
        lora_unit=lora_unit,
        views=views,
        dtype=dtype,
        momentum_dtype=momentum_dtype,
        batched=batched,
        shardings=shardings,
        stats=stats,
        **routing,
    )


def multi_transform_with_muon(  # the public signature names every option
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
    return transform_tree(
        scale_by_muon,
        muon_lr,
        rate_name="muon_lr",
        aux_lr=aux_lr,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        betas=betas,
        eps=eps,
        **options,
    )


def multi_transform_with_pion(  # the public signature names every option
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
    return transform_tree(
        scale_by_pion,
        pion_lr,
        rate_name="pion_lr",
        aux_lr=aux_lr,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        betas=betas,
        eps=eps,
        **options,
    )


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


def _clipped(tx: optax.GradientTransformation, norm: Rate | None) -> optax.GradientTransformation:
    if norm is None:
        return tx

    return optax.chain(clip_by_global_norm(norm), tx)
