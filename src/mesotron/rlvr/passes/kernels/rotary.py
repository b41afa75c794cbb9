"""Rotary positions of queries or keys.

Shapes: N tokens, H heads of D places; a tile is (HP, HALF), a token's heads by half of their
places. The rotation takes the halves (a, b) to (a cos - b sin, b cos + a sin).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _load(at, mask):
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _kernel(
    x, cos, sin, out, H, D, BACK: tl.constexpr, HP: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HP)
    d = tl.arange(0, HALF)
    inside = (head < H)[:, None] & (d < D // 2)[None, :]
    at = (n * H + head)[:, None] * D + d[None, :]

    c = _load(cos + n * D + d, d < D // 2)[None, :]
    s = _load(sin + n * D + d, d < D // 2)[None, :]
    if BACK:
        s = -s

    a = _load(x + at, inside)
    b = _load(x + at + D // 2, inside)
    dtype = out.dtype.element_ty
    tl.store(out + at, (a * c - b * s).to(dtype), mask=inside)
    tl.store(out + at + D // 2, (b * c + a * s).to(dtype), mask=inside)


def turned(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, back: bool) -> Tensor:
    N, H, D = x.shape
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    heads = triton.next_power_of_2(H)
    half = triton.next_power_of_2(D // 2)

    if N:
        warps = min(8, max(1, heads * half // 256))
        _kernel[(N,)](
            x.contiguous(),
            cos,
            sin,
            out,
            H,
            D,
            BACK=back,
            HP=heads,
            HALF=half,
            num_warps=warps,
        )

    return out


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        cos = cos.contiguous()
        sin = sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype

        return turned(x, cos, sin, dtype, back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return turned(grad, *ctx.saved_tensors, ctx.dtype, back=True), None, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """x (N, H, D) in `dtype`, turned by angles whose cosines and sines are (N, D)."""
    return Rotate.apply(x, cos, sin, dtype)
