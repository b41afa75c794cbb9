"""LoRA as a product in JAX; the twin of `mesotron.optim.lora`, where the step is derived.

A pair is two leaves of one module whose names end in `lora_a` and `lora_b` (any case, as flax's
`nnx.LoRA`), either in JAX's order, (inputs, r) and (r, outputs), or in PyTorch's, (r, inputs) and
(outputs, r). Leading axes hold separate layers.

Legend: K layers; A is [K, r, n], B is [K, m, r]; the adapted weight is m x n.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.scipy.linalg import solve_triangular

from mesotron.jax.filter import Filtered
from mesotron.jax.stats import Rate, value_at
from mesotron.jax.views import named_leaves
from mesotron.spectral import step_scale

DAMPING = 2.0  # as in torch
_JITTER = 1e-6  # of a Gram matrix's mean diagonal, in float32
_POWER_STEPS = 8
SUFFIXES = ("lora_a", "lora_b")
Filtering = Callable[[Array], Filtered]  # of a batch of wide matrices


class LoraState(NamedTuple):
    step: Array
    momentum: Any  # like the parameters


def find_pairs(params: Any) -> dict[str, tuple[str, bool]]:
    """Path of each A -> path of its B, and whether they are in JAX's order."""
    leaves = dict(named_leaves(params))
    lower = {path.lower(): path for path in leaves}

    pairs = {}
    for path in leaves:
        stem = path.lower().removesuffix("/value")
        if not stem.endswith(SUFFIXES[0]):
            continue

        other = lower.get(SUFFIXES[1].join(path.lower().rsplit(SUFFIXES[0], 1)))
        if other is None:
            raise ValueError(f"{path} has no {SUFFIXES[1]} next to it: a LoRA product needs both")

        a = leaves[path].shape
        b = leaves[other].shape
        jax_order = a[-1:] == b[-2:-1]
        torch_order = a[-2:-1] == b[-1:]
        if len(a) < 2 or len(a) != len(b) or not (jax_order or torch_order):
            raise ValueError(f"{path} {a} and {other} {b} are no LoRA pair: their ranks differ")

        # Both orders fit the factors of a square weight: the rank is the smaller side.
        pairs[path] = (other, jax_order and (not torch_order or a[-1] <= a[-2]))

    return pairs


def is_factor(path: str) -> bool:
    return path.lower().removesuffix("/value").endswith(SUFFIXES)


def lora_product(
    learning_rate: Rate,
    filter: Filtering,
    *,
    momentum: Rate,
    nesterov: bool,
    weight_decay: Rate,
    scale: Any = "rms",
    lora_scale: float,
    lora_unit: str = "rms",
    momentum_dtype: str | None = None,
) -> optax.GradientTransformation:
    """Steps a tree of LoRA pairs so that the change of each product is the filtered step. The
    learning rate is inside: the damping of A follows it."""

    def init(params: Any) -> LoraState:
        def zeros(p: Array) -> Array:
            dtype = momentum_dtype or jnp.promote_types(p.dtype, jnp.float32)
            return jnp.zeros_like(p, dtype=dtype)

        find_pairs(params)
        return LoraState(jnp.zeros([], jnp.int32), jax.tree.map(zeros, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, LoraState]:
        if params is None:
            raise ValueError("a LoRA product needs the weights: call update(grads, state, params)")

        rate, mu, decay = (value_at(x, state.step) for x in (learning_rate, momentum, weight_decay))
        names = [name for name, _ in named_leaves(updates)]
        grads, structure = jax.tree.flatten(updates)
        weights, momenta = map(structure.flatten_up_to, (params, state.momentum))

        steps = list(grads)
        for path, (other, inputs_first) in find_pairs(updates).items():
            pair = (names.index(path), names.index(other))
            ok = jnp.array([jnp.isfinite(grads[k]).all() for k in pair]).all()
            sides = []

            directions = []
            for k in pair:
                M = momenta[k]
                G = jnp.where(ok, grads[k].astype(jnp.promote_types(M.dtype, jnp.float32)), M)
                mixed = G + mu * (M - G)
                momenta[k] = mixed.astype(M.dtype)
                U = G + mu * (mixed - G) if nesterov else mixed
                directions.append(_stacked(U, inputs_first))
                sides.append(_stacked(weights[k].astype(G.dtype), inputs_first))

            (A, B), (U_A, U_B) = sides, directions
            m = B.shape[1]
            n = A.shape[2]
            traced = isinstance(scale, Array)

            e = rate * (scale * step_scale(1.0, m, n) if traced else step_scale(scale, m, n))
            if lora_unit == "rms":  # r directions change the product by Muon's RMS
                e = e * math.sqrt(min(m, n) / min(A.shape[1], m, n))

            units = product_step(
                A,
                B,
                U_A,
                U_B,
                e,
                lora_scale,
                filter,
            )

            keep = 1 - rate * decay  # of B alone, which the inverse in B's step does not need
            for k, old, unit in zip(pair, (A, B), (units[0] / keep, units[1])):
                move = -e / lora_scale * unit + ((keep - 1) * old if old is B else 0)
                move = jnp.where(ok, move.mT if inputs_first else move, 0)
                steps[k] = move.reshape(grads[k].shape).astype(grads[k].dtype)

        step = jnp.asarray(optax.safe_increment(state.step))
        kept = jax.tree.unflatten(jax.tree.structure(state.momentum), momenta)

        return jax.tree.unflatten(structure, steps), LoraState(step, kept)

    return optax.GradientTransformation(init, update)


def _stacked(X: Array, inputs_first: bool) -> Array:
    X = X.reshape(-1, *X.shape[-2:])
    return X.mT if inputs_first else X


def product_step(
    A: Array, B: Array, U_A: Array, U_B: Array, e: Any, s: float, filter: Filtering
) -> tuple[Array, Array]:
    """Unit steps of A and B: the weights change by -(e / s) times these."""
    C = _root(_dot(A, A.mT))
    identity = jnp.broadcast_to(jnp.eye(C.shape[1], dtype=C.dtype), C.shape)
    inverse = solve_triangular(C, identity, lower=True)
    E = _root(_dot(B.mT, B) + jnp.square(DAMPING * e / s) * _dot(inverse.mT, inverse))
    X_B = solve_triangular(C, U_B.mT, lower=True)
    X_A = solve_triangular(E, U_A, lower=True)
    F_B, F_A = (_filtered(X, filter) for X in (X_B, X_A))
    dB = solve_triangular(C.mT, F_B, lower=False).mT
    dA = solve_triangular(E.mT, F_A, lower=False)
    L = jnp.concatenate([dB, B], axis=2)
    R = jnp.concatenate([A, dA], axis=1)
    left = _dot(L.mT, L)
    right = _dot(R, R.mT)
    r = A.shape[1]

    # Vectors of the input space, so that the norms do not depend on the gauge.
    k = jnp.arange(1, R.shape[2] + 1, dtype=R.dtype)
    start = _dot(R, jnp.stack([jnp.sin(0.7 * k * k), jnp.cos(1.1 * k * k)], axis=1))
    parts = (slice(None), slice(0, r), slice(r, None))
    norm, *terms = (_norm(left[:, x, x], right[:, x, x], start[:, x]) for x in parts)
    c = jnp.where(norm > 0, jnp.maximum(*terms) / jnp.where(norm > 0, norm, 1), 1)
    c = jnp.clip(c, 0.5, 1.0)[:, None, None]

    return dA * c, dB * c


def _filtered(X: Array, filter: Filtering) -> Array:
    """f(X) for X of either orientation, [K, r, long] as a rule."""
    tall = X.shape[1] > X.shape[2]
    made = filter(X.mT if tall else X).X.astype(X.dtype)
    return made.mT if tall else made


def _root(gram: Array) -> Array:
    jitter = _JITTER * jnp.trace(gram, axis1=1, axis2=2) / gram.shape[1]
    jitter = jitter + jnp.finfo(gram.dtype).tiny * 1e6
    return jnp.linalg.cholesky(gram + jitter[:, None, None] * jnp.eye(gram.shape[1]))


def _norm(left: Array, right: Array, z: Array) -> Array:
    y = z
    for _ in range(_POWER_STEPS):
        y = _dot(left, z)
        y = y / jnp.maximum(jnp.abs(y).max(1, keepdims=True), jnp.finfo(y.dtype).tiny)
        z = _dot(right, y)

    inner = (z * y).sum(1)
    outer = (z * _dot(left, z)).sum(1)
    ratio = jnp.where(inner > 0, outer / jnp.where(inner > 0, inner, 1), 0).max(1)

    return jnp.sqrt(jnp.maximum(ratio, 0))


def _dot(X: Array, Y: Array) -> Array:
    return jnp.matmul(X, Y, precision=jax.lax.Precision.HIGHEST)
