"""Apply a spectral filter to a batch of matrices with matrix products alone.

f(X) = U f(S) V^T for X = U S V^T, by the odd quintics of `mesotron.spectral`; the low-rank
reference uses an SVD. Which form of the iteration runs (standard or Gram) depends on the shape.

Legend: X is [B, m, n] with m <= n; A = X X^T and R, Q, Z are [B, m, m]; per-matrix numbers are [B].
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from mesotron.optim.device import without_autocast
from mesotron.spectral import SYRK, Filter, cheapest_plan, noise_edge
from mesotron.spectral.filters import FIXED_POINT, aim

# Below this size a batched product is faster than BLAS's S S^T (measured on two CPU families).
_SYRK_FROM = 128
_POWER_STEPS = 6


class Filtered(NamedTuple):
    X: Tensor  # [B, m, n]
    norm: Tensor  # [B], Frobenius norm of each input
    concentration: Tensor  # [B], sum sigma^4 / (sum sigma^2)^2 of each input; 1 is rank one
    passed: Tensor  # [B], sum f(sigma)^2, the number of directions that passed


def apply_filter(X: Tensor, filter: Filter) -> Filtered:
    """Filter each matrix of a batch; X is overwritten as work space. The result does not depend on
    the scale of a matrix (1e-30 to 1e30), and a zero matrix stays zero."""
    with without_autocast():
        return _filter(X, filter)


def _filter(X: Tensor, filter: Filter) -> Filtered:
    norm = normalize(X)
    if filter.rank is not None:
        return _keep_rank(X, filter.rank, norm)

    A = torch.bmm(X, X.mT)
    concentration = A.float().square().sum((1, 2))
    m, n = X.shape[1:]
    steps = filter.steepest_steps(m, n)

    plan = cheapest_plan(
        m,
        n,
        steps,
        torch.finfo(X.dtype).eps / 2,
        SYRK,
    )

    t = None
    if filter.cutoff is not None:
        t = _rescale_to_bound(X, A, filter)

    with _no_subnormals(X):
        for segment in plan:
            triples: list[tuple] = list(segment.steps)
            if t is not None:
                triples, t = _aimed(t, len(triples))

            if segment.form == "gram":
                run = _gram_segment
            else:
                run = _standard_segment

            X = run(X, A, triples)
            A = None

    return Filtered(X, norm, concentration, _sum_of_squares(X))


def _aimed(t: Tensor, num_steps: int) -> tuple[list[tuple], Tensor]:
    """Each matrix's own coefficients for its threshold, [B, 1, 1], and the threshold after them."""
    triples = []
    for _ in range(num_steps):
        triple, t = aim(t)
        triples.append(tuple(x[:, None, None] for x in triple))

    return triples, t


@contextmanager
def _no_subnormals(X: Tensor) -> Iterator[None]:
    """Powers of what a filter removes underflow, and x86 multiplies subnormal numbers several times
    slower: they are zero inside the block. The setting is of the calling thread."""
    flushed = X.device.type == "cpu" and not torch.compiler.is_compiling()
    if flushed:  # unless the user has turned it on, or it does not exist here
        tiny = torch.full((), torch.finfo(torch.float32).tiny / 8)
        flushed = bool(tiny * 1 != 0) and torch.set_flush_denormal(True)

    try:
        yield
    finally:
        if flushed:
            torch.set_flush_denormal(False)


def normalize(X: Tensor) -> Tensor:
    """Divide each matrix by its Frobenius norm in place; zero stays zero. Returns the norms, [B] in
    float64, where the squares of 1e-30 and of 1e30 are ordinary numbers."""
    norm = torch.linalg.vector_norm(X, dim=(1, 2), dtype=torch.float64)

    largest = torch.finfo(X.dtype).max  # the reciprocal of a norm below 3e-39 must stay finite
    inverse = norm.reciprocal().clamp(max=largest)
    inverse = inverse.masked_fill(norm == 0, 0.0)
    X.mul_(inverse.to(X.dtype)[:, None, None])

    return norm


def _square(S: Tensor) -> Tensor:
    # S S for symmetric S, written S S^T where BLAS then computes only half of it.
    return torch.bmm(S, S.mT if S.shape[-1] >= _SYRK_FROM else S)


def _rescale_to_bound(X: Tensor, A: Tensor, filter: Filter) -> Tensor:
    """Divide X (of Frobenius norm 1) by its Schatten-8 norm; returns the cutoff on that scale, [B].
    (sum sigma^8)^(1/8) = ||A A||_F^(1/4) is never below the largest singular value, so nothing
    leaves [0, 1]. The power iteration for the largest one can only err low, which may shift the
    cutoff slightly but never makes the iteration diverge."""
    S = _square(A)
    S = S.to(torch.promote_types(S.dtype, torch.float32))
    bound = _sum_of_squares(S).pow(0.125)

    inverse = bound.reciprocal().masked_fill(bound == 0, 0.0)[:, None, None]
    X.mul_(inverse.to(X.dtype))
    A.mul_(inverse.square().to(A.dtype))

    assert filter.cutoff is not None
    if filter.cutoff == "noise":
        t = noise_edge(*X.shape[1:]) * inverse[:, 0, 0]
    else:
        t = filter.cutoff * largest_eigenvalue(S).pow(0.25) * inverse[:, 0, 0]

    return t.masked_fill(bound == 0, FIXED_POINT)


def norm_bound(X: Tensor) -> Tensor:
    """The Schatten-8 norm of each matrix, [B]: never below its largest singular value, and at most
    m^(1/8) times as large."""
    return _sum_of_squares(_square(torch.bmm(X, X.mT))).pow(0.125)


def largest_eigenvalue(S: Tensor) -> Tensor:
    """Largest eigenvalue of positive semi-definite S, [B], from below, by power iteration. Two
    starts: the heaviest column, which alone can lie in a block of its own beside a larger direction
    spread over many rows, and a vector without a pattern."""
    B, m, _ = S.shape
    heaviest = S.diagonal(dim1=1, dim2=2).argmax(1)
    column = S.gather(2, heaviest[:, None, None].expand(-1, m, 1))

    k = torch.arange(1, m + 1, device=S.device, dtype=S.dtype)
    irregular = (0.7 * k * k).sin()[:, None]

    v = torch.cat([column, S @ irregular.expand(B, m, 1)], dim=2)
    tiny = torch.finfo(S.dtype).tiny
    for _ in range(_POWER_STEPS):
        length = v.norm(dim=1, keepdim=True).clamp_min(tiny)
        v = torch.bmm(S, v / length)

    return v.norm(dim=1).amax(1)


def _standard_segment(X: Tensor, A: Tensor | None, triples: list[tuple]) -> Tensor:
    spare = torch.empty_like(X)
    for a, b, c in triples:
        A = torch.bmm(X, X.mT) if A is None else A
        torch.bmm(_combine(A, b, c), X, out=spare)

        if not isinstance(a, float):
            spare.addcmul_(X, a.to(X.dtype))
        elif a:
            spare.add_(X, alpha=a)

        X, spare = spare, X
        A = None

    return X


def _gram_segment(X: Tensor, A: Tensor | None, triples: list[tuple]) -> Tensor:
    """Iterate R = X X^T: with Z = a I + b R + c R R, all of them polynomials of R and so commuting,
    X <- Z X becomes Q <- Q Z and R <- R Z Z."""
    R = torch.bmm(X, X.mT) if A is None else A
    Q = None
    for k, (a, b, c) in enumerate(triples):
        Z = _combine(R, b, c)
        added = a if isinstance(a, float) else a[:, 0].to(Z.dtype)
        Z.diagonal(dim1=1, dim2=2).add_(added)

        Q = Z if Q is None else torch.bmm(Q, Z)

        if k < len(triples) - 1:
            R = torch.bmm(torch.bmm(R, Z), Z)

    assert Q is not None
    return torch.bmm(Q, X)


def _combine(A: Tensor, b: float | Tensor, c: float | Tensor) -> Tensor:
    if isinstance(c, float) and c == 0:
        return A * b

    S = _square(A)
    if isinstance(b, Tensor) and isinstance(c, Tensor):
        return S.mul_(c.to(S.dtype)).addcmul_(A, b.to(S.dtype))

    return S.mul_(c).add_(A, alpha=b)  # pyright: ignore[reportArgumentType]


def _keep_rank(X: Tensor, rank: int, norm: Tensor) -> Filtered:
    wide = X.float() if X.element_size() < 4 else X
    U, S, Vh = torch.linalg.svd(wide, full_matrices=False)

    rounding = torch.finfo(S.dtype).eps * X.shape[2]  # a direction below it is not in the data
    is_top = torch.arange(S.shape[1], device=S.device) < rank
    keep = is_top & (rounding < S)
    kept = torch.bmm(U * keep[:, None, :], Vh)

    return Filtered(kept.to(X.dtype), norm, S.pow(4).sum(1), keep.sum(1).float())


def _sum_of_squares(X: Tensor) -> Tensor:
    dtype = torch.promote_types(X.dtype, torch.float32)
    return torch.linalg.vector_norm(X, dim=(1, 2), dtype=dtype).square()
