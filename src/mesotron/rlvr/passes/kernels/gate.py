"""The gated activation silu(gate) * up of an MLP; only its inputs are kept for the gradient."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8


@triton.jit
def _forward_kernel(gate, up, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)

    tl.store(out + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(grad, gate, up, grad_gate, grad_up, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    y = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)

    s = tl.sigmoid(g)
    slope = s * (1 + g * (1 - s))
    tl.store(grad_gate + at, (y * u * slope).to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + at, (y * g * s).to(grad_up.dtype.element_ty), mask=inside)


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.contiguous()
        up = up.contiguous()
        out = torch.empty_like(gate)
        size = gate.numel()
        if size:
            grid = (triton.cdiv(size, BLOCK),)
            _forward_kernel[grid](gate, up, out, size, BLOCK=BLOCK, num_warps=WARPS)

        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grads = (torch.empty_like(gate), torch.empty_like(up))
        size = gate.numel()
        if size:
            grid = (triton.cdiv(size, BLOCK),)
            _backward_kernel[grid](
                grad.contiguous(), gate, up, *grads, size, BLOCK=BLOCK, num_warps=WARPS
            )

        return grads


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return Gate.apply(gate, up)
