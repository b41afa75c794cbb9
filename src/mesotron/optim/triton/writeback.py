"""From the filtered update to the weights: decoupled decay, step and rounding in one launch.

bf16 weights without fp32 masters are rounded stochastically, since a step below 1/256 of a weight
would otherwise vanish for ever. `sample_alignment` reads a small part of the gradient, for the
cosine of update and gradient. Does not choose step sizes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .pack import is_finite, power_of_two_below
from .windows import (
    WindowTable,
    is_row_major,
    num_tiles,
    tile_axes,
    triton_dtype,
    window_mask,
    window_pointers,
)

# Legend: B windows, m <= n. W weights, F [B, m, n] the filter's 16-bit output, G gradients.

TILE = 64


@triton.jit
def _round_stochastically(x, key, tile, SIDE: tl.constexpr):
    """fp32 [SIDE, SIDE] to bf16: up with probability equal to the fraction cut off.

    Adding 16 uniform bits below bf16's last place and cutting there does just that, so the mean is
    exact. One Philox call makes 128 random bits and serves eight neighbours.
    """
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
    return tl.load(at, mask=window_mask(rows, columns, m, n, True), other=0.0).to(tl.float32)


@triton.jit
def _write_tile(
    W, F, block, tile, rows, columns, m, n, kept, step, finite, key,
    W_DTYPE: tl.constexpr, ROW_MAJOR: tl.constexpr, ALIGNED: tl.constexpr,
    STOCHASTIC: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    update = _load_update(F, block, rows, columns, m, n)
    energy = tl.sum(update * update)
    if not ROW_MAJOR:
        update = update.T
    at = window_pointers(W, block, rows, columns, W_DTYPE, ROW_MAJOR, ALIGNED)
    active = window_mask(rows, columns, m, n, ROW_MAJOR) & finite
    weight = kept * tl.load(at, mask=active, other=0.0).to(tl.float32) - step * update
    if STOCHASTIC:
        rounded = _round_stochastically(weight, key, tile, TILE)
    else:
        rounded = weight.to(W_DTYPE)
    tl.store(at, rounded, mask=active)
    return energy


@triton.jit
def _write_kernel(
    W, F, lr_at, lr_stride, decay_at, decay_stride, scale, gain, gradient_peak, seed, energies,
    m, n,
    W_DTYPE: tl.constexpr, ALIGNED: tl.constexpr, STOCHASTIC: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
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
            W, F, block, tile, rows, columns, m, n, kept, step, finite, key,
            W_DTYPE, True, ALIGNED, STOCHASTIC, TILE,
        )  # fmt: skip
    else:
        energy = _write_tile(
            W, F, block, tile, rows, columns, m, n, kept, step, finite, key,
            W_DTYPE, False, ALIGNED, STOCHASTIC, TILE,
        )  # fmt: skip
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

    Args:
        weights: B windows, fp32, bf16 or fp16.
        F: [B, m, n] contiguous, the filtered updates, bf16 or fp16.
        lr: float32 on the device, 0-d or [B].
        weight_decay: float32 on the device, 0-d or [B]; decoupled, multiplied by lr.
        scale: float32 [B], a window's step per unit of lr.
        gradient_peak: int32 [B] from `inspect`.
        seed: 0-d int64 on the device, another for every step and bucket: rounds bf16 weights
            stochastically. None rounds to nearest.
        gain: float32 [B], the factor that F still carries.

    Returns:
        float32 [B, parts]: sums of F^2, whose total along dim 1 is a window's; the same bits in
        every run. Whoever wants the statistics adds them up.

    Example:
        >>> write_back(weights, F, lr, weight_decay, scale, peak, gain=gain)  # doctest: +SKIP
    """
    if seed is not None and weights.dtype != torch.bfloat16:
        raise ValueError(
            f"stochastic rounding is for bfloat16 weights, got {weights.dtype}; pass seed=None"
        )
    m, n = weights.shape
    tiles = num_tiles(weights.shape, TILE)
    energies = torch.empty(len(weights), tiles, dtype=torch.float32, device=F.device)
    lr, weight_decay = lr.expand(len(weights)), weight_decay.expand(len(weights))
    _write_kernel[(tiles, len(weights))](
        weights.entries, F, lr, lr.stride(0), weight_decay, weight_decay.stride(0), scale, gain,
        gradient_peak, gradient_peak if seed is None else seed, energies, m, n,
        W_DTYPE=triton_dtype(weights.dtype), ALIGNED=weights.aligned,
        STOCHASTIC=seed is not None, TILE=TILE, num_warps=4,
    )  # fmt: skip
    return energies


def write_back_reference(
    weights: list[Tensor],
    F: Tensor,
    lr: Tensor,
    weight_decay: Tensor,
    scale: Tensor,
    gradient_peak: Tensor,
    seed: Tensor | None = None,
    *,
    gain: Tensor,
) -> Tensor:
    """`write_back` in plain torch, over the views the table was built from.

    With a seed the rounding is as unbiased as the kernel's, but draws other random bits.
    """
    finite = is_finite(gradient_peak)
    kept = (1 - lr * weight_decay).expand(len(weights))
    step = lr.expand(len(weights)) * scale / gain
    for block, weight in enumerate(weights):
        if not finite[block]:
            continue
        new = kept[block] * weight.float() - step[block] * F[block].float()
        if seed is not None:
            generator = torch.Generator(new.device).manual_seed(int(seed) + block)
            noise = torch.randint(
                1 << 16, new.shape, dtype=torch.int32, device=new.device, generator=generator
            )
            new = ((new.contiguous().view(torch.int32) + noise) & -65536).view(torch.float32)
        weight.copy_(new)
    return F.float().square().sum(dim=(1, 2))[:, None]


@triton.jit
def _align_tile(
    G, F, block, rows, columns, m, n, factor, finite,
    G_DTYPE: tl.constexpr, ROW_MAJOR: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    update = _load_update(F, block, rows, columns, m, n)
    if not ROW_MAJOR:
        update = update.T
    at = window_pointers(G, block, rows, columns, G_DTYPE, ROW_MAJOR, ALIGNED)
    active = window_mask(rows, columns, m, n, ROW_MAJOR) & finite
    gradient = tl.load(at, mask=active, other=0.0).to(tl.float32) * factor
    return tl.sum(update * gradient), tl.sum(update * update), tl.sum(gradient * gradient)


@triton.jit
def _align_kernel(
    G, F, gradient_peak, sums, m, n, num_tiles,
    G_DTYPE: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
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
            G, F, block, rows, columns, m, n, factor, finite, G_DTYPE, True, ALIGNED
        )
    else:
        fg, ff, gg = _align_tile(
            G, F, block, rows, columns, m, n, factor, finite, G_DTYPE, False, ALIGNED
        )
    at = sums + (block * samples + tl.program_id(0)) * 3
    tl.store(at, fg)
    tl.store(at + 1, ff)
    tl.store(at + 2, gg)


def sample_alignment(
    grads: WindowTable, F: Tensor, gradient_peak: Tensor, fraction: float = 1 / 64
) -> Tensor:
    """<F, G>, <F, F> and <G, G> of each window over a share of its tiles, for the cosine.

    Args:
        grads: B windows of the gradients.
        F: [B, m, n] contiguous, the filtered updates.
        gradient_peak: int32 [B] from `inspect`; G is scaled by a power of two to a peak below 1, so
            that its squares stay in range. A window that is not finite counts as G = 0.
        fraction: share of the 64 x 64 tiles to read, in (0, 1]; at least one is.

    Returns:
        float32 [B, parts, 3]; `alignment_cosine` reads it.

    Example:
        >>> sums = sample_alignment(grads, F, peak)  # doctest: +SKIP
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is a share in (0, 1], got {fraction}; 1 reads everything")
    m, n = grads.shape
    tiles = num_tiles(grads.shape, TILE)
    samples = max(1, round(tiles * fraction))
    sums = torch.empty(len(grads), samples, 3, dtype=torch.float32, device=F.device)
    _align_kernel[(samples, len(grads))](
        grads.entries, F, gradient_peak, sums, m, n, tiles,
        G_DTYPE=triton_dtype(grads.dtype), ALIGNED=grads.aligned, TILE=TILE, num_warps=4,
    )  # fmt: skip
    return sums


def sample_alignment_reference(
    grads: list[Tensor], F: Tensor, gradient_peak: Tensor, fraction: float = 1.0
) -> Tensor:
    """`sample_alignment` over everything (fraction 1), in float64, with G at peak 1."""
    if fraction != 1:
        raise ValueError(f"the reference reads everything, got fraction {fraction}; pass 1")
    peak = gradient_peak.view(torch.float32).double()
    peak = torch.where(is_finite(gradient_peak) & (peak > 0), peak, torch.inf)
    G = torch.stack([gradient.double().nan_to_num() for gradient in grads]) / peak[:, None, None]
    O = F.double()
    products = torch.stack([O * G, O * O, G * G], dim=-1)  # [B, m, n, 3]
    return products.sum((1, 2))[:, None]


def alignment_cosine(sums: Tensor) -> Tensor:
    """Cosine of update and gradient from the sums of `sample_alignment`; 0 where either is zero.

    Example:
        >>> alignment_cosine(torch.tensor([[[3.0, 4.0, 9.0]], [[0.0, 0.0, 1.0]]]))
        tensor([0.5000, 0.0000])
    """
    fg, ff, gg = sums.sum(dim=1).unbind(dim=1)
    length = (ff.sqrt() * gg.sqrt()).clamp(min=torch.finfo(sums.dtype).tiny)
    return fg / length
