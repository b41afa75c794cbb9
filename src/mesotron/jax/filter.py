"""Apply a spectral filter to a batch of matrices in JAX; the twin of `mesotron.optim.matrix`.

The same coefficients (`mesotron.spectral`), normalization and two forms, as pure functions that
trace, vmap and shard. Nothing here needs float64.

Legend: X is [B, m, n] with m <= n; A = X X^T and R, Q, Z are [B, m, m]; per-matrix numbers are [B].
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mesotron.spectral import Filter, cheapest_plan, noise_edge
from mesotron.spectral.filters import FIXED_POINT, PROMOTE, SUPPRESS, aim

_POWER_STEPS = 6
Triple = tuple[Any, ...]  # the coefficients (a, b, c) of one step


class FilteredBatch(NamedTuple):
    X: Array  # [B, m, n]
    concentration: Array  # [B] sum sigma^4 / (sum sigma^2)^2 of the input; 0 for a zero matrix
    passed: Array  # [B] sum f(sigma)^2


def apply_filter(X: Array, filter: Filter, dtype: str | None = None) -> Array:
    """Filter each matrix of a batch: U f(S) V^T for X = U S V^T.

    The result does not depend on the scale of a matrix (1e-30 to 1e30), and a zero matrix stays
    zero. A nonfinite matrix gives a nonfinite result and does not affect its neighbors.

    Args:
        X: [B, m, n] with m <= n, of any floating dtype.
        filter: from `mesotron.spectral`.
        dtype: of the matmuls; None is that of `X`.

    Returns:
        The filtered matrices, [B, m, n], of that dtype.

    Example:
        >>> from mesotron.spectral import pion
        >>> float(apply_filter(jnp.array([[[3.0, 0.0], [0.0, 0.0]]]), pion())[0, 0, 0])
        1.0
    """
    return filter_batch(X, filter, dtype).X


def filter_batch(
    X: Array, filter: Filter, dtype: str | None = None, promote: Array | None = None
) -> FilteredBatch:
    """`apply_filter` with statistics; a traced `promote` replaces the filter's own number."""
    if X.ndim != 3 or X.shape[1] > X.shape[2]:
        raise ValueError(f"expected a batch of wide matrices [B, m <= n], got {X.shape}")

    X = normalize(X).astype(dtype or X.dtype)
    A = _product(X, X.mT)

    concentration = _sum_of_squares(A)
    if filter.rank is not None:
        X = _keep_rank(X, filter.rank)
        return FilteredBatch(X, concentration, _sum_of_squares(X))

    m, n = X.shape[1:]
    steps = filter.steepest_steps(m, n)
    if promote is not None:
        steps = (PROMOTE,) * len(steps)  # the steepest case

    plan = cheapest_plan(m, n, steps, float(jnp.finfo(X.dtype).eps) / 2)
    triples = [triple for segment in plan for triple in segment.steps]
    if promote is not None:
        triples = _traced_triples(promote, len(triples), X.dtype)
    elif filter.cutoff is not None:
        X, A, t = _rescale_to_bound(X, A, filter.cutoff)
        triples = _aimed_triples(t, len(triples), X.dtype)

    for segment in plan:
        own = triples[: len(segment.steps)]
        triples = triples[len(segment.steps) :]
        run = _gram_segment if segment.form == "gram" else _standard_segment
        X = run(X, A, own)
        A = None

    return FilteredBatch(X, concentration, _sum_of_squares(X))


def _traced_triples(promote: Array, count: int, dtype: Any) -> list[Triple]:
    """The first `promote` steps promote, the others suppress."""
    triples = []
    for k in range(count):
        a, b, c = (jnp.where(k < promote, *pair) for pair in zip(PROMOTE, SUPPRESS))
        triples.append((a.astype(dtype), b.astype(dtype), c.astype(dtype)))

    return triples


def _aimed_triples(t: Array, count: int, dtype: Any) -> list[Triple]:
    """Coefficients of each matrix's own cutoff, [B, 1, 1] each."""
    triples = []
    for _ in range(count):
        (a, b, c), t = aim(t)
        triples.append(tuple(x[:, None, None].astype(dtype) for x in (a, b, c)))

    return triples


def normalize(X: Array) -> Array:
    """Divide each matrix by its Frobenius norm, in float32 or wider; zero stays zero."""
    X = X.astype(jnp.promote_types(X.dtype, jnp.float32))
    largest = jnp.abs(X).max((1, 2), keepdims=True)  # first, so that no square overflows
    X = X / jnp.where(largest == 0, 1, largest)
    norm = jnp.sqrt(jnp.square(X).sum((1, 2), keepdims=True))

    return X / jnp.where(norm == 0, 1, norm)


def _product(S: Array, T: Array) -> Array:
    """S T; in float32 at full precision, which accelerators otherwise reduce."""
    is_exact = S.dtype in (jnp.float32, jnp.float64)
    precision = jax.lax.Precision.HIGHEST if is_exact else None

    return jnp.matmul(S, T, precision=precision)


def _sum_of_squares(X: Array) -> Array:
    return jnp.square(X.astype(jnp.promote_types(X.dtype, jnp.float32))).sum((1, 2))


def _rescale_to_bound(X: Array, A: Array, cutoff: float | str) -> tuple[Array, Array, Array]:
    """Divide X (of Frobenius norm 1) by its Schatten-8 norm; also the cutoff on that scale, [B]. As
    in `mesotron.optim.matrix`: (sum sigma^8)^(1/8) = ||A A||_F^(1/4) bounds the largest singular
    value, and the power iteration can only err low."""
    S = _product(A, A).astype(jnp.promote_types(A.dtype, jnp.float32))
    bound = jnp.square(S).sum((1, 2)) ** 0.125

    inverse = jnp.where(bound == 0, 0, 1 / jnp.where(bound == 0, 1, bound))
    if isinstance(cutoff, str):
        t = noise_edge(*X.shape[1:]) * inverse
    else:
        t = cutoff * largest_eigenvalue(S) ** 0.25 * inverse

    t = jnp.where(bound == 0, FIXED_POINT, t)
    inverse = inverse[:, None, None]

    return X * inverse.astype(X.dtype), A * jnp.square(inverse).astype(A.dtype), t


def largest_eigenvalue(S: Array) -> Array:
    """Power iteration from two starts, for positive semi-definite S: [B], never too large."""
    m = S.shape[1]
    heaviest = jnp.diagonal(S, axis1=1, axis2=2).argmax(1)
    column = jnp.take_along_axis(S, heaviest[:, None, None], axis=2)
    k = jnp.arange(1, m + 1, dtype=S.dtype)
    irregular = jnp.sin(0.7 * k * k)[:, None]  # without a pattern that could miss an eigenvector
    v = jnp.concatenate([column, _product(S, irregular)], axis=2)

    tiny = jnp.finfo(S.dtype).tiny
    for _ in range(_POWER_STEPS):
        length = jnp.linalg.norm(v, axis=1, keepdims=True)
        v = _product(S, v / jnp.maximum(length, tiny))

    return jnp.linalg.norm(v, axis=1).max(1)


def _standard_segment(X: Array, A: Array | None, triples: list[Triple]) -> Array:
    for a, b, c in triples:
        A = _product(X, X.mT) if A is None else A
        X = a * X + _product(_combine(A, b, c), X)
        A = None

    return X


def _gram_segment(X: Array, A: Array | None, triples: list[Triple]) -> Array:
    """Iterate R = X X^T: with Z = a I + b R + c R R, a polynomial of R that commutes with it,
    X <- Z X becomes Q <- Q Z and R <- R Z Z."""
    R = _product(X, X.mT) if A is None else A
    Q = None

    identity = jnp.eye(R.shape[1], dtype=R.dtype)
    for k, (a, b, c) in enumerate(triples):
        Z = a * identity + _combine(R, b, c)
        Q = Z if Q is None else _product(Q, Z)

        if k < len(triples) - 1:
            R = _product(_product(R, Z), Z)

    assert Q is not None
    return _product(Q, X)


def _combine(A: Array, b: float | Array, c: float | Array) -> Array:
    """b A + c A A."""
    if isinstance(c, float) and c == 0:
        return b * A

    return b * A + c * _product(A, A)


def _keep_rank(X: Array, rank: int) -> Array:
    wide = X.astype(jnp.promote_types(X.dtype, jnp.float32))
    U, S, Vh = jnp.linalg.svd(wide, full_matrices=False)
    rounding = jnp.finfo(S.dtype).eps * X.shape[2]  # directions below it are noise
    keep = (jnp.arange(S.shape[1]) < rank) & (rounding < S)

    return _product(U * keep[:, None, :], Vh).astype(X.dtype)
