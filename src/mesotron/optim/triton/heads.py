"""The whole filter for small blocks (m <= 128) in one launch: everything but X stays on the chip.

One program per block reads X for its Gram matrix A = X X^T, divides by the trace, runs every step
of the filter on m x m matrices in Gram form, and reads X again to write Q X: 6 bytes of traffic an
element however many steps. Larger m x m matrices do not fit into one multiprocessor.

Legend: B blocks of m x n, m <= 128. P is m padded to a power of two, R the Gram matrix of the
current iterate, Z = a I + b R + c R^2 one step's polynomial, Q the product of all Z so far. All are
polynomials in the same A: they are symmetric and commute.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# The largest blocks, and the shared memory that they need: an A100 has 163 KiB, Hopper 227, and
# consumer GPUs, which stay with 64 rows, 99.
_SHARED_BYTES = {128: 131_200, 64: 33_000}


@lru_cache
def largest_m(device: torch.device) -> int:
    if device.type != "cuda":
        return 128
    there = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return next((m for m, needed in _SHARED_BYTES.items() if needed <= there), 0)


class HeadStatistics(NamedTuple):
    """Spectrum sums of each block, float32 [B]."""

    energy: Tensor  # sum of sigma^2 of X as given
    concentration: Tensor  # sum of sigma^4 over (sum of sigma^2)^2; 0 for a zero block
    passed: Tensor  # sum of f(sigma)^2


@triton.jit
def _gram_on_chip(X, m, n, P: tl.constexpr, TILE_N: tl.constexpr):
    rows = tl.arange(0, P)
    A = tl.zeros((P, P), dtype=tl.float32)
    for start in range(0, n, TILE_N):
        columns = start + tl.arange(0, TILE_N)
        at = X + rows[:, None] * n + columns[None, :]
        x = tl.load(at, mask=(rows < m)[:, None] & (columns < n)[None, :], other=0.0)
        A = tl.dot(x, x.T, A)

    return A


@triton.jit
def _split(S):
    """S as a sum of two fp16 matrices: 22 bits of mantissa, for operands below 65504."""
    high = S.to(tl.float16)
    return high, (S - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _precise_dot(S, T):
    """S T to about 2^-21 with fp16 tensor cores; only the product of the two low parts is left out.
    Why so precise: an error in Z or R turns a little of the largest singular direction into the
    small ones, and the remaining steps amplify those, for Muon 3.44 times each, 140 times in
    all."""
    s_high, s_low = _split(S)
    t_high, t_low = _split(T)
    product = tl.dot(s_low, t_high)
    product = tl.dot(s_high, t_low, product)

    return tl.dot(s_high, t_high, product)


@triton.jit
def _step_polynomial(R, triple, P: tl.constexpr):
    """Z = a I + b R + c R^2."""
    a = tl.load(triple)
    b = tl.load(triple + 1)
    c = tl.load(triple + 2)
    diagonal = tl.arange(0, P)[:, None] == tl.arange(0, P)[None, :]

    return tl.where(diagonal, a, 0.0) + b * R + c * _precise_dot(R, R)


@triton.jit
def _filter_on_chip(R, coefficients, num_steps, P: tl.constexpr):
    """Q = Z_K ... Z_1, with R <- Z R Z between the steps."""
    Z = _step_polynomial(R, coefficients, P)
    Q = Z
    for k in range(1, num_steps):
        R = _precise_dot(_precise_dot(Z, R), Z)
        Z = _step_polynomial(R, coefficients + 3 * k, P)
        Q = _precise_dot(Z, Q)

    return Q


@triton.jit
def _apply_on_chip(Q, X, out, factor, m, n, P: tl.constexpr, TILE_N: tl.constexpr):
    """out = factor Q X, with Q in two parts of X's dtype. One part is not enough: Q can be hundreds
    of times larger on the small singular directions than on the largest, so rounding it once to 16
    bits would change the latter by tens of percent."""
    dtype = X.dtype.element_ty
    high = Q.to(dtype)
    low = (Q - high.to(tl.float32)).to(dtype)
    rows = tl.arange(0, P)

    total = 0.0
    for start in range(0, n, TILE_N):
        columns = start + tl.arange(0, TILE_N)
        at = rows[:, None] * n + columns[None, :]
        inside = (rows < m)[:, None] & (columns < n)[None, :]
        x = tl.load(X + at, mask=inside, other=0.0)
        result = factor * tl.dot(high, x, tl.dot(low, x))
        total += tl.sum(result * result)
        tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)

    return total


@triton.jit
def _heads_kernel(
    X,
    out,
    coefficients,
    statistics,
    m,
    n,
    num_steps,
    gain,
    P: tl.constexpr,
    TILE_N: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    X += block * m * n
    out += block * m * n
    A = _gram_on_chip(X, m, n, P, TILE_N)
    diagonal = tl.arange(0, P)[:, None] == tl.arange(0, P)[None, :]
    trace = tl.sum(tl.where(diagonal, A, 0.0))

    # A zero block is divided by 1: its A, and so its result, is zero anyway.
    safe_trace = tl.where(trace > 0.0, trace, 1.0)
    A = A / safe_trace
    quartic = tl.sum(A * A)
    Q = _filter_on_chip(A, coefficients, num_steps, P)
    passed = _apply_on_chip(
        Q,
        X,
        out,
        gain * tl.rsqrt(safe_trace),
        m,
        n,
        P,
        TILE_N,
    )
    tl.store(statistics + block * 3, trace)
    tl.store(statistics + block * 3 + 1, quartic)
    tl.store(statistics + block * 3 + 2, passed / (gain * gain))


# For each padded height, measured on an H200. Never 32 columns: under Triton 3.6 these gave
# wrong results wherever the loads could not be pipelined.
_CONFIGS = {
    16: dict(TILE_N=128, num_warps=1, num_stages=3),
    32: dict(TILE_N=128, num_warps=2, num_stages=3),
    64: dict(TILE_N=128, num_warps=4, num_stages=4),
    128: dict(TILE_N=64, num_warps=8, num_stages=4),
}


def filter_heads(
    X: Tensor,
    coefficients: Tensor,
    out: Tensor | None = None,
    *,
    gain: float = 1.0,
) -> tuple[Tensor, HeadStatistics]:
    """gain * f(X) for every block, in one launch; f is the odd polynomial of the coefficients. X is
    [B, m, n] contiguous, bf16 or fp16, m <= 128, |X| <= 1 as `update_momentum` leaves it, and may
    be `out` itself. Coefficients are float32 [K, 3] on the device, one row (a, b, c) per step."""
    num_blocks, m, n = X.shape
    out = torch.empty_like(X) if out is None else out
    statistics = torch.empty(num_blocks, 3, dtype=torch.float32, device=X.device)
    padded = max(16, triton.next_power_of_2(m))

    _heads_kernel[(num_blocks,)](
        X,
        out,
        coefficients,
        statistics,
        m,
        n,
        len(coefficients),
        gain,
        P=padded,
        **_CONFIGS[padded],
    )
    return out, HeadStatistics(*statistics.unbind(dim=1))
