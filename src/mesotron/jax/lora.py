"""LoRA as a product in JAX; the twin of `mesotron.optim.lora`, where the step is derived.

A pair is two leaves of one module whose names end in `lora_a` and `lora_b` (any case, as flax's
`nnx.LoRA`), either in JAX's order, (inputs, r) and (r, outputs), or in PyTorch's, (r, inputs) and
(outputs, r). Leading axes hold separate layers.

Legend: K layers; A is [K, r, n], B is [K, m, r]; the adapted weight is m x n.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.scipy.linalg import solve_triangular

from mesotron.jax.filter import FilteredBatch
from mesotron.jax.stats import Rate, value_at
from mesotron.jax.views import named_leaves
from mesotron.spectral import step_scale

DAMPING = 2.0  # as in torch
_JITTER = 1e-6  # of a Gram matrix's mean diagonal, in float32
_POWER_STEPS = 8
SUFFIXES = ("lora_a", "lora_b")
Filtering = Callable[[Array], FilteredBatch]  # of a batch of wide matrices


class LoraUnit(NamedTuple):
    """What a step of a product is measured in."""

    scale: float = 1.0  # factor of the product in the forward pass, alpha / r as a rule
    name: str = "rms"  # "rms": as large as full Muon's; "direction": each of its directions is

    def check(self) -> None:
        if self.name not in ("rms", "direction"):
            raise ValueError(f"lora_unit={self.name!r} must be 'rms' or 'direction'")
        if isinstance(self.scale, int | float) and not self.scale > 0:
            raise ValueError(f"lora_scale={self.scale} must be above 0, as alpha / r is")


class Pair(NamedTuple):
    """The two factors of a product, or their gradients, momenta or directions."""

    A: Array  # [K, r, n]
    B: Array  # [K, m, r]


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


@dataclass(frozen=True, kw_only=True)
class LoraRule:
    """Steps a tree of LoRA pairs so that the change of each product is the filtered step. The
    learning rate is inside: the damping of A follows it."""

    learning_rate: Rate
    filter: Filtering
    momentum: Rate = 0.95
    nesterov: bool = True
    weight_decay: Rate
    unit: LoraUnit
    scale: Any = "rms"
    momentum_dtype: str | None = None

    def transformation(self) -> optax.GradientTransformation:
        return optax.GradientTransformation(self.init, self.update)

    def init(self, params: Any) -> LoraState:
        find_pairs(params)  # refuses a factor without its partner now, not at the first step
        return LoraState(jnp.zeros([], jnp.int32), jax.tree.map(self._zeros, params))

    def _zeros(self, p: Array) -> Array:
        dtype = self.momentum_dtype or jnp.promote_types(p.dtype, jnp.float32)
        return jnp.zeros_like(p, dtype=dtype)

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, LoraState]:
        if params is None:
            raise ValueError("a LoRA product needs the weights: call update(grads, state, params)")

        names = [name for name, _ in named_leaves(updates)]
        grads, structure = jax.tree.flatten(updates)
        weights = structure.flatten_up_to(params)
        momenta = structure.flatten_up_to(state.momentum)
        steps = list(grads)

        for path, (other, inputs_first) in find_pairs(updates).items():
            a = names.index(path)
            b = names.index(other)
            ok = jnp.isfinite(grads[a]).all() & jnp.isfinite(grads[b]).all()

            directions = []
            for k in (a, b):
                momenta[k], U = self._mix(grads[k], momenta[k], ok, state.step)
                directions.append(_stacked(U, inputs_first))

            U = Pair(*directions)
            pair = Pair(
                _stacked(weights[a].astype(U.A.dtype), inputs_first),
                _stacked(weights[b].astype(U.B.dtype), inputs_first),
            )

            moves = self._moves(pair, U, state.step)
            for k, move in zip((a, b), moves):
                move = jnp.where(ok, move.mT if inputs_first else move, 0)
                steps[k] = move.reshape(grads[k].shape).astype(grads[k].dtype)

        step = jnp.asarray(optax.safe_increment(state.step))
        kept = jax.tree.unflatten(jax.tree.structure(state.momentum), momenta)

        return jax.tree.unflatten(structure, steps), LoraState(step, kept)

    def _mix(self, G: Array, M: Array, ok: Array, step: Array) -> tuple[Array, Array]:
        """The momentum after a gradient, and the direction; both stay if it is not `ok`."""
        mu = value_at(self.momentum, step)
        G = jnp.where(ok, G.astype(jnp.promote_types(M.dtype, jnp.float32)), M)
        mixed = G + mu * (M - G)
        U = G + mu * (mixed - G) if self.nesterov else mixed

        return mixed.astype(M.dtype), U

    def _moves(self, pair: Pair, U: Pair, step: Array) -> Pair:
        """What is added to A and to B."""
        rate = value_at(self.learning_rate, step)
        keep = 1 - rate * value_at(self.weight_decay, step)
        s = self.unit.scale
        e = self._step_size(pair, rate)
        dA, dB = product_step(pair, U, e, s, self.filter)

        # The decay is of B alone, which the inverse in B's step does not need.
        move_A = -e / s * (dA / keep)
        move_B = -e / s * dB + (keep - 1) * pair.B

        return Pair(move_A, move_B)

    def _step_size(self, pair: Pair, rate: Any) -> Any:
        """The change of the product's singular values by a step of full rank."""
        m = pair.B.shape[1]
        r, n = pair.A.shape[1:]
        if isinstance(self.scale, Array):
            e = rate * (self.scale * step_scale(1.0, m, n))
        else:
            e = rate * step_scale(self.scale, m, n)

        if self.unit.name == "rms":  # r directions change the product by Muon's RMS
            e = e * math.sqrt(min(m, n) / min(r, m, n))

        return e


def _stacked(X: Array, inputs_first: bool) -> Array:
    X = X.reshape(-1, *X.shape[-2:])
    return X.mT if inputs_first else X


def product_step(pair: Pair, U: Pair, e: Any, s: float, filter: Filtering) -> Pair:
    """Unit steps of A and B: the weights change by -(e / s) times these."""
    A, B = pair

    # Cholesky factors of A A^T, and of B^T B with the damping of A's step.
    C = _root(_dot(A, A.mT))
    identity = jnp.broadcast_to(jnp.eye(C.shape[1], dtype=C.dtype), C.shape)
    inverse = solve_triangular(C, identity, lower=True)
    E = _root(_dot(B.mT, B) + jnp.square(DAMPING * e / s) * _dot(inverse.mT, inverse))

    # Filter in the coordinates in which the other factor is orthogonal, and go back.
    F_B = _filtered(solve_triangular(C, U.B.mT, lower=True), filter)
    F_A = _filtered(solve_triangular(E, U.A, lower=True), filter)
    dB = solve_triangular(C.mT, F_B, lower=False).mT
    dA = solve_triangular(E.mT, F_A, lower=False)

    c = _shrink(pair, Pair(dA, dB))
    return Pair(dA * c, dB * c)


def _shrink(pair: Pair, step: Pair) -> Array:
    """[K, 1, 1], by which a step shrinks so that both terms of the product's change together are
    no larger than the larger one alone."""
    L = jnp.concatenate([step.B, pair.B], axis=2)
    R = jnp.concatenate([pair.A, step.A], axis=1)
    left = _dot(L.mT, L)
    right = _dot(R, R.mT)
    r = pair.A.shape[1]

    # Vectors of the input space, so that the norms do not depend on the gauge.
    k = jnp.arange(1, R.shape[2] + 1, dtype=R.dtype)
    start = _dot(R, jnp.stack([jnp.sin(0.7 * k * k), jnp.cos(1.1 * k * k)], axis=1))

    def norm_of(part: slice) -> Array:
        return _norm(left[:, part, part], right[:, part, part], start[:, part])

    norm = norm_of(slice(None))
    larger = jnp.maximum(norm_of(slice(0, r)), norm_of(slice(r, None)))
    c = jnp.where(norm > 0, larger / jnp.where(norm > 0, norm, 1), 1)

    return jnp.clip(c, 0.5, 1.0)[:, None, None]


def _filtered(X: Array, filter: Filtering) -> Array:
    """f(X) for X of either orientation, [K, r, long] as a rule."""
    tall = X.shape[1] > X.shape[2]
    made = filter(X.mT if tall else X).X.astype(X.dtype)
    return made.mT if tall else made


def _root(gram: Array) -> Array:
    """The lower Cholesky factor, with a jitter that keeps it finite."""
    jitter = _JITTER * jnp.trace(gram, axis1=1, axis2=2) / gram.shape[1]
    jitter = jitter + jnp.finfo(gram.dtype).tiny * 1e6
    return jnp.linalg.cholesky(gram + jitter[:, None, None] * jnp.eye(gram.shape[1]))


def _norm(left: Array, right: Array, z: Array) -> Array:
    """[K], the spectral norm of L R from the Gram matrices of L and R^T, by power iteration."""
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
