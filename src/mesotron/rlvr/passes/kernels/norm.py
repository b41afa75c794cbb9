"""The residual's addition and the norm behind it, in one kernel each way.

Shapes: N tokens, E width; a tile is (ROWS, BLOCK) with BLOCK the power of two from E on. `x` is the
residual stream, `delta` what a block adds to it, `total` their sum, `normed` what the next product
reads; `scales` (N,) are 1 / root mean square.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # places of a tile where rows are shorter
PROGRAMS = 8  # a multiprocessor, of a backward pass
ON_CPU = 4  # programs in Triton's interpreter


@triton.jit
def _load(at, mask):
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _forward_kernel(
    x, delta, weight, total, normed, scales, N, E, eps,
    ADDS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, BLOCK)
    inside = (row < N)[:, None] & (e < E)[None, :]
    at = row[:, None] * E + e[None, :]

    value = _load(x + at, inside)
    if ADDS:
        added = (value + _load(delta + at, inside)).to(total.dtype.element_ty)
        tl.store(total + at, added, mask=inside)
        value = added.to(tl.float32)

    scale = 1 / tl.sqrt(tl.sum(value * value, 1) / E + eps)
    w = _load(weight + e, e < E)
    y = value * scale[:, None] * w[None, :]

    tl.store(normed + at, y.to(normed.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale, mask=row < N)


@triton.jit
def _backward_kernel(
    grad_normed, grad_total, total, weight, scales, grad_x, grad_delta, grad_weight, N, E,
    ROUNDS: tl.constexpr, HAS_TOTAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grad_weight (programs, E) has a row for each program, which reads every so many rows."""
    program = tl.program_id(0)
    e = tl.arange(0, BLOCK)
    w = _load(weight + e, e < E)
    summed = tl.zeros((BLOCK,), tl.float32)

    for start in range(program * ROWS, N, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < N)[:, None] & (e < E)[None, :]
        at = row[:, None] * E + e[None, :]

        scale = tl.load(scales + row, mask=row < N, other=0.0)[:, None]
        y = _load(total + at, inside) * scale
        g = _load(grad_normed + at, inside)
        summed += tl.sum(g * y, 0)

        g *= w[None, :]
        grad = scale * (g - y * (tl.sum(g * y, 1) / E)[:, None])
        if HAS_TOTAL:
            grad += _load(grad_total + at, inside)

        tl.store(grad_x + at, grad.to(grad_x.dtype.element_ty), mask=inside)
        if ROUNDS:
            tl.store(grad_delta + at, grad.to(grad_delta.dtype.element_ty), mask=inside)

    tl.store(grad_weight + program * E + e, summed, mask=e < E)


def sizes(E: int) -> dict[str, int]:
    block = triton.next_power_of_2(E)
    rows = max(1, TILE // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(16, max(4, block // 512))}


def num_programs(device: torch.device) -> int:
    if device.type == "cpu":
        return ON_CPU

    return PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count


class AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor]:
        E = x.shape[-1]
        N = x.numel() // E
        x = x.contiguous()
        tile = sizes(E)
        adds = delta is not None

        total = torch.empty_like(x) if adds else x
        normed = torch.empty_like(x, dtype=dtype)
        scales = torch.empty(N, dtype=torch.float32, device=x.device)

        if N:
            _forward_kernel[(triton.cdiv(N, tile["ROWS"]),)](
                x,
                delta.contiguous() if adds else x,
                weight,
                total,
                normed,
                scales,
                N,
                E,
                eps,
                ADDS=adds,
                **tile,
            )

        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, weight, scales)
        ctx.delta_dtype = delta.dtype if adds else None

        return total if adds else None, normed

    @staticmethod
    def backward(
        ctx: Any, grad_total: Tensor | None, grad_normed: Tensor
    ) -> tuple[Tensor | None, ...]:
        total, weight, scales = ctx.saved_tensors
        E = total.shape[-1]
        N = total.numel() // E
        tile = sizes(E)
        programs = min(num_programs(total.device), max(1, triton.cdiv(N, tile["ROWS"])))

        # The block's output has another type than the stream under autocast.
        rounds = ctx.delta_dtype not in (None, total.dtype)
        grad_x = torch.empty_like(total)
        grad_delta = torch.empty_like(total, dtype=ctx.delta_dtype) if rounds else grad_x
        grad_weight = torch.empty(programs, E, dtype=torch.float32, device=total.device)

        _backward_kernel[(programs,)](
            grad_normed.contiguous(),
            grad_normed if grad_total is None else grad_total.contiguous(),
            total,
            weight,
            scales,
            grad_x,
            grad_delta,
            grad_weight,
            N,
            E,
            ROUNDS=rounds,
            HAS_TOTAL=grad_total is not None,
            **tile,
        )

        if ctx.delta_dtype is None:
            grad_delta = None

        return grad_x, grad_delta, grad_weight.sum(0).to(weight.dtype), None, None


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x + delta, and its norm in `dtype`."""
    total, normed = AddNorm.apply(x, delta, weight, eps, dtype)
    return x if total is None else total, normed
