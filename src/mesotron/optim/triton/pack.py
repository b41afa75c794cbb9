"""From gradients to the filter's input: momentum, Nesterov, scaling, 16-bit cast and packing.

Two passes over a bucket. `inspect` finds the largest magnitude of every window, NaN and infinity
included; `update_momentum` then knows, before it writes anything, which windows to leave alone and
by which power of two to scale the others, so that gradients from 1e-30 to 1e30 lose nothing.
Does not filter and does not touch the weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .packed import Packed
from .windows import (
    WindowTable,
    is_row_major,
    num_tiles,
    tile_axes,
    triton_dtype,
    window_mask,
    window_pointers,
)

# Legend: B windows, m <= n. G gradient, M momentum, U update, X [B, m, n] the 16-bit U times 2^-e.
#
# A "peak" is the largest |value| of a window as the int32 bit pattern of a float32. For floats >= 0
# integer order is float order, with infinity above every number and NaN above infinity: one integer
# maximum finds all three, the same in any order, hence also as an atomic.

INFINITY_BITS = 0x7F800000
# Square tiles, so that a transposed window is as well coalesced as a straight one. On an H200 these
# sizes move 4.0 to 4.3 TB/s, as a plain copy does.
TILE = 64
INSPECT_TILE = 128


@triton.jit
def magnitude_bits(x):
    """|x| as the integer that sorts like it."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def power_of_two_below(bits):
    """2^-e as float32 for a peak in [2^(e-1), 2^e), so that the scaled peak lies in [1/2, 1).

    Made from the exponent field, hence exact. Zero and subnormal peaks get 2^125.
    """
    exponent = tl.maximum(bits >> 23, 1)
    return (tl.maximum(253 - exponent, 1) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _tile_peak(
    table, block, rows, columns, m, n,
    DTYPE: tl.constexpr, ROW_MAJOR: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    at = window_pointers(table, block, rows, columns, DTYPE, ROW_MAJOR, ALIGNED)
    values = tl.load(at, mask=window_mask(rows, columns, m, n, ROW_MAJOR), other=0.0)
    return tl.max(magnitude_bits(values))


@triton.jit
def _inspect_kernel(
    table, peak, m, n, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr
):
    block = tl.program_id(1)
    rows, columns = tile_axes(tl.program_id(0), n, TILE)
    if is_row_major(table, block):
        bits = _tile_peak(table, block, rows, columns, m, n, DTYPE, True, ALIGNED)
    else:
        bits = _tile_peak(table, block, rows, columns, m, n, DTYPE, False, ALIGNED)
    tl.atomic_max(peak + block, bits, sem="relaxed")


def inspect(windows: WindowTable, peak: Tensor | None = None) -> Tensor:
    """Find the largest magnitude of every window, before anything is written.

    Args:
        windows: B windows, fp32, bf16 or fp16.
        peak: int32 [B] to overwrite; a new one by default.

    Returns:
        int32 [B]: max |value| as the bits of a float32, NaN above infinity above all numbers.

    Example:
        >>> table = tabulate([torch.tensor([[1.0, -2.0]]).cuda()])  # doctest: +SKIP
        >>> inspect(table).view(torch.float32).tolist()  # doctest: +SKIP
        [2.0]
    """
    if peak is None:
        peak = torch.empty(len(windows), dtype=torch.int32, device=windows.device)
    peak.zero_()
    m, n = windows.shape
    tile = INSPECT_TILE if m >= INSPECT_TILE else TILE
    _inspect_kernel[(num_tiles(windows.shape, tile), len(windows))](
        windows.entries, peak, m, n,
        DTYPE=triton_dtype(windows.dtype), ALIGNED=windows.aligned, TILE=tile, num_warps=8,
    )  # fmt: skip
    return peak


def inspect_reference(views: list[Tensor]) -> Tensor:
    """`inspect` in plain torch, over the views the table was built from."""
    bits = [view.float().contiguous().view(torch.int32) & 0x7FFFFFFF for view in views]
    return torch.stack([window.max() for window in bits])


def is_finite(peak: Tensor) -> Tensor:
    """Bool [B]: the window holds neither NaN nor infinity.

    Example:
        >>> is_finite(torch.tensor([2.0, float("inf"), float("nan")]).view(torch.int32))
        tensor([ True, False, False])
    """
    return peak < INFINITY_BITS


@triton.jit
def _update_tile(
    G, M, X, block, rows, columns, m, n, mu, factor, finite,
    G_DTYPE: tl.constexpr, M_DTYPE: tl.constexpr, NESTEROV: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    # A skipped window is neither read as a gradient nor written as momentum; its X is zero.
    active = window_mask(rows, columns, m, n, ROW_MAJOR) & finite
    gradient_at = window_pointers(G, block, rows, columns, G_DTYPE, ROW_MAJOR, ALIGNED)
    momentum_at = window_pointers(M, block, rows, columns, M_DTYPE, ROW_MAJOR, ALIGNED)
    gradient = tl.load(gradient_at, mask=active, other=0.0).to(tl.float32)
    momentum = tl.load(momentum_at, mask=active, other=0.0).to(tl.float32)
    momentum += (1.0 - mu) * (gradient - momentum)
    stored = momentum.to(M_DTYPE)
    tl.store(momentum_at, stored, mask=active)

    update = gradient + mu * (momentum - gradient) if NESTEROV else momentum
    packed = (update * factor).to(X.dtype.element_ty)
    energy = tl.sum(packed.to(tl.float32) * packed.to(tl.float32))
    bits = tl.max(magnitude_bits(stored))
    if not ROW_MAJOR:
        packed = packed.T
    packed_at = X + (block.to(tl.int64) * m + rows)[:, None] * n + columns[None, :]
    tl.store(packed_at, packed, mask=window_mask(rows, columns, m, n, True))
    return energy, bits


@triton.jit
def _update_kernel(
    G, M, X, mu_at, gradient_peak, momentum_peak, next_momentum_peak, energies, m, n,
    G_DTYPE: tl.constexpr, M_DTYPE: tl.constexpr, NESTEROV: tl.constexpr,
    ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    rows, columns = tile_axes(tl.program_id(0), n, TILE)
    mu = tl.load(mu_at)
    gradient_bits = tl.load(gradient_peak + block)
    momentum_bits = tl.load(momentum_peak + block)
    finite = tl.maximum(gradient_bits, momentum_bits) < 0x7F800000
    # U is a convex combination of G and M, so the same combination of their peaks bounds it.
    kept = mu * mu if NESTEROV else mu
    bound = (1.0 - kept) * gradient_bits.to(tl.float32, bitcast=True)
    bound += kept * momentum_bits.to(tl.float32, bitcast=True)
    factor = power_of_two_below(bound.to(tl.int32, bitcast=True))
    if is_row_major(G, block):
        energy, bits = _update_tile(
            G, M, X, block, rows, columns, m, n, mu, factor, finite,
            G_DTYPE, M_DTYPE, NESTEROV, True, ALIGNED,
        )  # fmt: skip
    else:
        energy, bits = _update_tile(
            G, M, X, block, rows, columns, m, n, mu, factor, finite,
            G_DTYPE, M_DTYPE, NESTEROV, False, ALIGNED,
        )  # fmt: skip
    # One sum a tile, added up afterwards: an atomic sum would depend on the order of arrival.
    tl.store(energies + block * tl.num_programs(0) + tl.program_id(0), energy)
    tl.atomic_max(next_momentum_peak + block, tl.where(finite, bits, momentum_bits), sem="relaxed")


def update_momentum(
    grads: WindowTable,
    momenta: WindowTable,
    X: Tensor,
    mu: Tensor,
    gradient_peak: Tensor,
    momentum_peak: Tensor,
    *,
    nesterov: bool = True,
) -> Packed:
    """M <- M + (1 - mu)(G - M); X <- 2^-e U with U = G + mu (M - G), or U = M without Nesterov.

    2^-e is chosen for each window so that |X| <= 1, and is exact. X's own scale means nothing
    afterwards: the filter divides by its norm. A window whose gradient (or momentum) is not finite
    keeps its momentum and gets X = 0.

    Args:
        grads: B windows of the gradients, fp32, bf16 or fp16.
        momenta: B windows of the momentum, fp32 or bf16, row-major where the gradients are.
        X: [B, m, n] contiguous, bf16 or fp16; overwritten.
        mu: 0-d float32 on the device, so that a captured graph follows its schedule.
        gradient_peak: int32 [B] from `inspect(grads)`.
        momentum_peak: int32 [B] from `inspect(momenta)` on the first step (zeros if it is zero);
            updated here to the new momentum's, so that no later step needs that pass.
        nesterov: look one step ahead.

    Returns:
        The norms of each window of X, the same bits in every run.

    Example:
        >>> packed = update_momentum(grads, momenta, X, mu, peak, momentum_peak)  # doctest: +SKIP
        >>> A = gram(X, scale=packed.inverse_square)  # doctest: +SKIP

    References:
        Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
    """
    if not torch.equal(grads.strides[:, 1] == 1, momenta.strides[:, 1] == 1):
        raise ValueError(
            "a momentum window is transposed against its gradient; "
            "allocate it with torch.empty_like(parameter)"
        )
    m, n = grads.shape
    tiles = num_tiles(grads.shape, TILE)
    next_peak = torch.zeros_like(momentum_peak)
    energies = torch.empty(len(grads), tiles, dtype=torch.float32, device=X.device)
    _update_kernel[(tiles, len(grads))](
        grads.entries, momenta.entries, X, mu, gradient_peak, momentum_peak, next_peak, energies,
        m, n, G_DTYPE=triton_dtype(grads.dtype), M_DTYPE=triton_dtype(momenta.dtype),
        NESTEROV=nesterov, ALIGNED=grads.aligned and momenta.aligned, TILE=TILE, num_warps=4,
    )  # fmt: skip
    return _settle(energies, next_peak, momentum_peak)


@triton.jit
def _settle_kernel(energies, next_peak, peak, norms, num_blocks, tiles, WIDTH: tl.constexpr):
    block = tl.program_id(0)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for start in range(0, tiles, WIDTH):
        at = start + tl.arange(0, WIDTH)
        total += tl.load(energies + block * tiles + at, mask=at < tiles, other=0.0)
    sumsq = tl.sum(total)
    safe = tl.where(sumsq > 0.0, sumsq, 1.0)
    tl.store(norms + block, sumsq)
    tl.store(norms + num_blocks + block, tl.sqrt(safe))
    tl.store(norms + 2 * num_blocks + block, 1.0 / safe)
    tl.store(peak + block, tl.load(next_peak + block))


def _settle(energies: Tensor, next_peak: Tensor, peak: Tensor) -> Packed:
    """Add up the tiles, take the root and the reciprocal, and keep the new peaks, in one launch."""
    num_blocks, tiles = energies.shape
    norms = torch.empty(3, num_blocks, dtype=torch.float32, device=energies.device)
    _settle_kernel[(num_blocks,)](
        energies, next_peak, peak, norms, num_blocks, tiles, WIDTH=256, num_warps=2
    )
    return Packed(*norms.unbind())


def update_momentum_reference(
    grads: list[Tensor],
    momenta: list[Tensor],
    X: Tensor,
    mu: Tensor,
    gradient_peak: Tensor,
    momentum_peak: Tensor,
    *,
    nesterov: bool = True,
) -> Packed:
    """`update_momentum` in plain torch, over the views the tables were built from."""
    finite = is_finite(torch.maximum(gradient_peak, momentum_peak))
    kept = mu * mu if nesterov else mu
    bound = (1 - kept) * gradient_peak.view(torch.float32)
    bound += kept * momentum_peak.view(torch.float32)
    exponent = (bound.view(torch.int32) >> 23).clamp(min=1)
    factor = ((253 - exponent).clamp(min=1) << 23).view(torch.float32)
    for block, (gradient, momentum) in enumerate(zip(grads, momenta, strict=True)):
        if not finite[block]:
            X[block] = 0
            continue
        G, M = gradient.float(), momentum.float()
        M = M + (1 - mu) * (G - M)
        momentum.copy_(M)
        X[block] = (G + mu * (M - G) if nesterov else M) * factor[block]
    momentum_peak.copy_(inspect_reference(momenta))
    sumsq = X.float().square().sum(dim=(1, 2))
    safe = torch.where(sumsq > 0, sumsq, 1.0)
    return Packed(sumsq, safe.sqrt(), safe.reciprocal())
