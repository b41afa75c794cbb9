"""The memory-bound kernels: gradients to the filter's input, filtered updates to the weights.

A window is a strided 2-D view of a parameter (a whole matrix, one head's rows, a transpose). A
kernel cannot take a list of tensors, so a `WindowTable` holds the address and strides of each.
`inspect` finds the largest magnitude of every window, so that `update_momentum` knows, before it
writes anything, which windows to skip and by which power of two to scale the others: gradients from
1e-30 to 1e30 lose nothing. `write_back` applies decay, step and rounding in one launch.

Legend: B windows, all m x n with m <= n and of one dtype. Strides count elements; at least one of
the two is 1; a window whose column stride is 1 is row-major. G gradient, M momentum, U update,
X [B, m, n] the 16-bit U times 2^-e, W weights, F [B, m, n] the filter's 16-bit output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mesotron.optim.stats import move

LARGEST_GRID = 65535  # CUDA's limit on the second axis of a grid, which counts the windows
# A "peak" is the largest |value| of a window as the int32 bit pattern of a float32. For floats >= 0
# integer order is float order, with infinity above every number and NaN above infinity: one integer
# maximum finds all three, the same in any order, hence also as an atomic.
INFINITY_BITS = 0x7F800000
# Square tiles, so that a transposed window is as well coalesced as a straight one. On an H200 these
# sizes move 4.0 to 4.3 TB/s, as a plain copy does.
TILE = 64
INSPECT_TILE = 128
TRITON_DTYPES = {getattr(torch, x): getattr(tl, x) for x in ("float32", "bfloat16", "float16")}


@dataclass(frozen=True)
class WindowTable:
    """Where the B windows of a bucket are in memory; does not keep the tensors alive. `aligned`:
    every window and every line of it starts on 16 bytes, so kernels may load 16 at once."""

    entries: Tensor  # int64 [B, 3] on the device: address in bytes, row stride, column stride
    strides: Tensor  # int64 [B, 2] on the host
    shape: tuple[int, int]
    dtype: torch.dtype
    aligned: bool

    def __len__(self) -> int:
        return len(self.strides)


def tabulate(views: Sequence[Tensor]) -> WindowTable:
    """The table of B [m, n] views of one dtype and device, each contiguous along one axis (`p`,
    `p.T`, `p[:64]` and `p[:, 64:128]` of a contiguous `p` all are)."""
    first = views[0]

    # The stride of an axis of length 1 is never used and becomes 1.
    strides = torch.tensor(
        [[1 if size == 1 else step for size, step in zip(v.shape, v.stride())] for v in views],
        dtype=torch.int64,
    )

    if (strides != 1).all(dim=1).any():
        raise ValueError("a window must be contiguous along one axis; pass a contiguous copy")

    addresses = [view.data_ptr() for view in views]
    lines_aligned = strides.amax(dim=1) % (16 // first.element_size()) == 0

    return WindowTable(
        entries=move(torch.cat([torch.tensor(addresses)[:, None], strides], dim=1), first.device),
        strides=strides,
        shape=tuple(first.shape),
        dtype=first.dtype,
        aligned=bool(lines_aligned.all()) and not any(address % 16 for address in addresses),
    )


@triton.jit
def is_row_major(table, block):
    """Whether one window's rows are contiguous; if not, its columns are."""
    return tl.load(table + 3 * block + 2) == 1


@triton.jit
def window_pointers(
    table,
    block,
    rows,
    columns,
    DTYPE: tl.constexpr,
    ROW_MAJOR: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Pointers to elements (rows, columns) of one window, as a tile whose LAST axis is contiguous:
    [rows, columns] when ROW_MAJOR and [columns, rows] otherwise. The unit stride is a literal and
    the alignment a promise, since the compiler can see neither in a table; without them every load
    would be one element wide."""
    pointer = tl.load(table + 3 * block).to(tl.pointer_type(DTYPE))
    if ROW_MAJOR:
        stride = tl.load(table + 3 * block + 1)
        slow = rows
        fast = columns
    else:
        stride = tl.load(table + 3 * block + 2)
        slow = columns
        fast = rows

    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
        stride = tl.multiple_of(stride, 8 if DTYPE.primitive_bitwidth == 16 else 4)

    return pointer + slow.to(tl.int64)[:, None] * stride + fast[None, :]


@triton.jit
def window_mask(rows, columns, m, n, ROW_MAJOR: tl.constexpr):
    """Which elements of a tile laid out as `window_pointers` lays it are inside the window."""
    if ROW_MAJOR:
        inside = (rows < m)[:, None] & (columns < n)[None, :]
    else:
        inside = (columns < n)[:, None] & (rows < m)[None, :]

    return inside


@triton.jit
def tile_axes(tile, n, TILE: tl.constexpr):
    """Row and column indices of the tile with this running number."""
    tiles_across = tl.cdiv(n, TILE)
    rows = (tile // tiles_across) * TILE + tl.arange(0, TILE)
    columns = (tile % tiles_across) * TILE + tl.arange(0, TILE)

    return rows, columns


def num_tiles(shape: tuple[int, int], tile: int) -> int:
    return triton.cdiv(shape[0], tile) * triton.cdiv(shape[1], tile)


class Packed(NamedTuple):
    """Norms of packed blocks, float32 [B]."""

    sumsq: Tensor
    norm: Tensor  # Frobenius; 1 for a zero block
    inverse_square: Tensor  # 1 / norm^2, which gives X X^T a trace of 1


@triton.jit
def magnitude_bits(x):
    """|x| as the integer that sorts like it."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def power_of_two_below(bits):
    """2^-e as float32 for a peak in [2^(e-1), 2^e), so that the scaled peak lies in [1/2, 1). Made
    from the exponent field, hence exact. Zero and subnormal peaks get 2^125."""
    exponent = tl.maximum(bits >> 23, 1)
    return (tl.maximum(253 - exponent, 1) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _tile_peak(
    table,
    block,
    rows,
    columns,
    m,
    n,
    DTYPE: tl.constexpr,
    ROW_MAJOR: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    at = window_pointers(
        table,
        block,
        rows,
        columns,
        DTYPE,
        ROW_MAJOR,
        ALIGNED,
    )
    values = tl.load(
        at,
        mask=window_mask(
            rows,
            columns,
            m,
            n,
            ROW_MAJOR,
        ),
        other=0.0,
    )
    return tl.max(magnitude_bits(values))


@triton.jit
def _inspect_kernel(
    table,
    peak,
    m,
    n,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    block = tl.program_id(1)
    rows, columns = tile_axes(tl.program_id(0), n, TILE)
    if is_row_major(table, block):
        bits = _tile_peak(
            table,
            block,
            rows,
            columns,
            m,
            n,
            DTYPE,
            True,
            ALIGNED,
        )
    else:
        bits = _tile_peak(
            table,
            block,
            rows,
            columns,
            m,
            n,
            DTYPE,
            False,
            ALIGNED,
        )

    tl.atomic_max(peak + block, bits, sem="relaxed")


def inspect(windows: WindowTable, peak: Tensor | None = None) -> Tensor:
    """The peak of every window, int32 [B]; written into `peak` if given."""
    if peak is None:
        peak = torch.empty(len(windows), dtype=torch.int32, device=windows.entries.device)

    peak.zero_()
    m, n = windows.shape
    tile = INSPECT_TILE if m >= INSPECT_TILE else TILE

    _inspect_kernel[(num_tiles(windows.shape, tile), len(windows))](
        windows.entries,
        peak,
        m,
        n,
        DTYPE=TRITON_DTYPES[windows.dtype],
        ALIGNED=windows.aligned,
        TILE=tile,
        num_warps=8,
    )
    return peak


@triton.jit
def _update_tile(
    G,
    M,
    X,
    block,
    rows,
    columns,
    m,
    n,
    mu,
    factor,
    finite,
    G_DTYPE: tl.constexpr,
    M_DTYPE: tl.constexpr,
    NESTEROV: tl.constexpr,
    ROW_MAJOR: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    # A skipped window is neither read as a gradient nor written as momentum; its X is zero.
    active = tl.where(finite, window_mask(rows, columns, m, n, ROW_MAJOR), False)
    gradient_at = window_pointers(
        G,
        block,
        rows,
        columns,
        G_DTYPE,
        ROW_MAJOR,
        ALIGNED,
    )
    momentum_at = window_pointers(
        M,
        block,
        rows,
        columns,
        M_DTYPE,
        ROW_MAJOR,
        ALIGNED,
    )
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
    tl.store(
        packed_at,
        packed,
        mask=window_mask(
            rows,
            columns,
            m,
            n,
            True,
        ),
    )

    return energy, bits


@triton.jit
def _update_kernel(
    G,
    M,
    X,
    mu_at,
    gradient_peak,
    momentum_peak,
    next_momentum_peak,
    energies,
    m,
    n,
    G_DTYPE: tl.constexpr,
    M_DTYPE: tl.constexpr,
    NESTEROV: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
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
            G,
            M,
            X,
            block,
            rows,
            columns,
            m,
            n,
            mu,
            factor,
            finite,
            G_DTYPE,
            M_DTYPE,
            NESTEROV,
            True,
            ALIGNED,
        )
    else:
        energy, bits = _update_tile(
            G,
            M,
            X,
            block,
            rows,
            columns,
            m,
            n,
            mu,
            factor,
            finite,
            G_DTYPE,
            M_DTYPE,
            NESTEROV,
            False,
            ALIGNED,
        )

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
    2^-e is chosen for each window so that |X| <= 1, and is exact; the filter divides by X's norm
    anyway. A window whose gradient (or momentum) is not finite keeps its momentum and gets X = 0.
    Momenta are row-major where the gradients are. X is [B, m, n] contiguous, bf16 or fp16; mu is
    0-d float32 on the device, so that a captured graph follows its schedule; the peaks are from
    `inspect`, and `momentum_peak` is updated here, so that no later step needs that pass. Returns
    the norms of each window of X, the same bits in every run."""
    m, n = grads.shape
    tiles = num_tiles(grads.shape, TILE)
    next_peak = torch.zeros_like(momentum_peak)
    energies = torch.empty(len(grads), tiles, dtype=torch.float32, device=X.device)

    _update_kernel[(tiles, len(grads))](
        grads.entries,
        momenta.entries,
        X,
        mu,
        gradient_peak,
        momentum_peak,
        next_peak,
        energies,
        m,
        n,
        G_DTYPE=TRITON_DTYPES[grads.dtype],
        M_DTYPE=TRITON_DTYPES[momenta.dtype],
        NESTEROV=nesterov,
        ALIGNED=grads.aligned and momenta.aligned,
        TILE=TILE,
        num_warps=4,
    )

    # Sum the tiles, take the root and the reciprocal, and keep the new peaks, in one launch.
    norms = torch.empty(3, len(grads), dtype=torch.float32, device=X.device)
    _settle_kernel[(len(grads),)](
        energies,
        next_peak,
        momentum_peak,
        norms,
        len(grads),
        tiles,
        WIDTH=256,
        num_warps=2,
    )

    return Packed(*norms.unbind())


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


@triton.jit
def _round_stochastically(x, key, tile, SIDE: tl.constexpr):
    """fp32 [SIDE, SIDE] to bf16: up with probability equal to the fraction cut off. Adding 16
    uniform bits below bf16's last place and cutting there does just that, so the mean is exact. One
    Philox call makes 128 random bits and serves eight neighbors."""
    calls = SIDE * SIDE // 8
    call = tl.arange(0, SIDE)[:, None] * (SIDE // 8) + tl.arange(0, SIDE // 8)[None, :]
    a, b, c, d = tl.randint4x(key, tile * calls + call)
    words = tl.join(tl.join(a, b), tl.join(c, d)).reshape(SIDE, SIDE // 2)
    noise = tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF).reshape(SIDE, SIDE)
    bits = x.to(tl.int32, bitcast=True) + noise.to(tl.int32)

    return (bits & -65536).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def _load_update(F, block, rows, columns, m, n):
    at = F + (block.to(tl.int64) * m + rows)[:, None] * n + columns[None, :]
    return tl.load(
        at,
        mask=window_mask(
            rows,
            columns,
            m,
            n,
            True,
        ),
        other=0.0,
    ).to(tl.float32)


@triton.jit
def _write_tile(
    W,
    F,
    block,
    tile,
    rows,
    columns,
    m,
    n,
    kept,
    step,
    finite,
    key,
    W_DTYPE: tl.constexpr,
    ROW_MAJOR: tl.constexpr,
    ALIGNED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    TILE: tl.constexpr,
):
    update = _load_update(F, block, rows, columns, m, n)
    energy = tl.sum(update * update)

    if not ROW_MAJOR:
        update = update.T

    at = window_pointers(
        W,
        block,
        rows,
        columns,
        W_DTYPE,
        ROW_MAJOR,
        ALIGNED,
    )
    active = tl.where(finite, window_mask(rows, columns, m, n, ROW_MAJOR), False)

    weight = kept * tl.load(at, mask=active, other=0.0).to(tl.float32) - step * update
    if STOCHASTIC:
        rounded = _round_stochastically(weight, key, tile, TILE)
    else:
        rounded = weight.to(W_DTYPE)

    tl.store(at, rounded, mask=active)
    return energy


@triton.jit
def _write_kernel(
    W,
    F,
    lr_at,
    lr_stride,
    decay_at,
    decay_stride,
    scale,
    gain,
    gradient_peak,
    seed,
    energies,
    m,
    n,
    W_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    TILE: tl.constexpr,
):
    block = tl.program_id(1)
    tile = block * tl.num_programs(0) + tl.program_id(0)
    rows, columns = tile_axes(tl.program_id(0), n, TILE)
    lr = tl.load(lr_at + block * lr_stride)
    kept = 1.0 - lr * tl.load(decay_at + block * decay_stride)
    step = lr * tl.load(scale + block) / tl.load(gain + block)
    finite = tl.load(gradient_peak + block) < 0x7F800000

    key = tl.load(seed) if STOCHASTIC else 0
    if is_row_major(W, block):
        energy = _write_tile(
            W,
            F,
            block,
            tile,
            rows,
            columns,
            m,
            n,
            kept,
            step,
            finite,
            key,
            W_DTYPE,
            True,
            ALIGNED,
            STOCHASTIC,
            TILE,
        )
    else:
        energy = _write_tile(
            W,
            F,
            block,
            tile,
            rows,
            columns,
            m,
            n,
            kept,
            step,
            finite,
            key,
            W_DTYPE,
            False,
            ALIGNED,
            STOCHASTIC,
            TILE,
        )

    tl.store(energies + tile, energy)


def write_back(
    weights: WindowTable,
    F: Tensor,
    lr: Tensor,
    weight_decay: Tensor,
    scale: Tensor,
    gradient_peak: Tensor,
    seed: Tensor | None = None,
    *,
    gain: Tensor,
) -> Tensor:
    """W <- (1 - lr wd) W - lr scale F / gain; a window without a finite gradient is left alone.
    `lr` and `weight_decay` are float32 on the device, 0-d or [B]; `scale` and `gain`, [B], are a
    window's step per unit of lr and the factor F still carries. `seed`, 0-d int64 on the device and
    another for every step and bucket, rounds bf16 weights stochastically; None rounds to nearest.
    Returns float32 [B, parts], sums of F^2 to be added along dim 1; the same bits in every run."""
    m, n = weights.shape
    tiles = num_tiles(weights.shape, TILE)
    energies = torch.empty(len(weights), tiles, dtype=torch.float32, device=F.device)
    lr = lr.expand(len(weights))
    weight_decay = weight_decay.expand(len(weights))

    _write_kernel[(tiles, len(weights))](
        weights.entries,
        F,
        lr,
        lr.stride(0),
        weight_decay,
        weight_decay.stride(0),
        scale,
        gain,
        gradient_peak,
        gradient_peak if seed is None else seed,
        energies,
        m,
        n,
        W_DTYPE=TRITON_DTYPES[weights.dtype],
        ALIGNED=weights.aligned,
        STOCHASTIC=seed is not None,
        TILE=TILE,
        num_warps=4,
    )
    return energies


@triton.jit
def _align_tile(
    G,
    F,
    block,
    rows,
    columns,
    m,
    n,
    factor,
    finite,
    G_DTYPE: tl.constexpr,
    ROW_MAJOR: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    update = _load_update(F, block, rows, columns, m, n)
    if not ROW_MAJOR:
        update = update.T

    at = window_pointers(
        G,
        block,
        rows,
        columns,
        G_DTYPE,
        ROW_MAJOR,
        ALIGNED,
    )
    active = tl.where(finite, window_mask(rows, columns, m, n, ROW_MAJOR), False)
    gradient = tl.load(at, mask=active, other=0.0).to(tl.float32) * factor

    return tl.sum(update * gradient), tl.sum(update * update), tl.sum(gradient * gradient)


@triton.jit
def _align_kernel(
    G,
    F,
    gradient_peak,
    sums,
    m,
    n,
    num_tiles,
    G_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    block = tl.program_id(1)
    samples = tl.num_programs(0)

    # Spread over the window: sample s takes the tile at s/samples of the way.
    tile = (tl.program_id(0).to(tl.int64) * num_tiles // samples).to(tl.int32)
    rows, columns = tile_axes(tile, n, TILE)
    bits = tl.load(gradient_peak + block)
    factor = power_of_two_below(bits)

    finite = bits < 0x7F800000
    if is_row_major(G, block):
        fg, ff, gg = _align_tile(
            G,
            F,
            block,
            rows,
            columns,
            m,
            n,
            factor,
            finite,
            G_DTYPE,
            True,
            ALIGNED,
        )
    else:
        fg, ff, gg = _align_tile(
            G,
            F,
            block,
            rows,
            columns,
            m,
            n,
            factor,
            finite,
            G_DTYPE,
            False,
            ALIGNED,
        )

    at = sums + (block * samples + tl.program_id(0)) * 3
    tl.store(at, fg)
    tl.store(at + 1, ff)
    tl.store(at + 2, gg)


def sample_alignment(
    grads: WindowTable,
    F: Tensor,
    gradient_peak: Tensor,
    fraction: float = 1 / 64,
) -> Tensor:
    """<F, G>, <F, F> and <G, G> of each window over a share of its tiles, for the cosine. G is
    scaled by a power of two to a peak below 1, so that its squares stay in range; a window that is
    not finite counts as G = 0. `fraction` in (0, 1] of the 64 x 64 tiles is read, at least one.
    Returns float32 [B, parts, 3] for `alignment_cosine`."""
    m, n = grads.shape
    tiles = num_tiles(grads.shape, TILE)
    samples = max(1, round(tiles * fraction))
    sums = torch.empty(
        len(grads),
        samples,
        3,
        dtype=torch.float32,
        device=F.device,
    )

    _align_kernel[(samples, len(grads))](
        grads.entries,
        F,
        gradient_peak,
        sums,
        m,
        n,
        tiles,
        G_DTYPE=TRITON_DTYPES[grads.dtype],
        ALIGNED=grads.aligned,
        TILE=TILE,
        num_warps=4,
    )
    return sums


def alignment_cosine(sums: Tensor) -> Tensor:
    """The cosine from the sums of `sample_alignment`; 0 where either is zero."""
    fg, ff, gg = sums.sum(dim=1).unbind(dim=1)
    length = (ff.sqrt() * gg.sqrt()).clamp(min=torch.finfo(sums.dtype).tiny)
    return fg / length
