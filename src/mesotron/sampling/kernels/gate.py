"""A Triton kernel of an MLP's gated activation, act(gate) * up, of one joined product.

Shapes: M rows, F features of gate and of up.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _gate_kernel(both, out, F, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """out (M, F) of both (M, 2 F): gate, then up."""
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < F
    both += row * 2 * F
    gate = tl.load(both + f, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + F + f, mask=inside, other=0.0).to(tl.float32)

    inner = gate
    if GELU:  # its approximation by tanh is a sigmoid of twice tanh's argument
        inner = 2 * 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)

    # Of a number below 0, so that the exponential does not overflow.
    small = tl.exp(-tl.abs(inner))
    active = gate * tl.where(inner < 0, small, 1.0) / (1 + small)

    # As in the plain form, the activation is rounded before the product.
    active = active.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * F + f, (active * up).to(out.dtype.element_ty), mask=inside)


def gated(both: Tensor, gelu: bool = False) -> Tensor:
    """(M, F) of both (M, 2 F): silu(gate) * up, or gelu's approximation."""
    M, twice = both.shape
    F = twice // 2
    out = both.new_empty(M, F)
    _gate_kernel[(M, triton.cdiv(F, BLOCK))](both, out, F, gelu, BLOCK, num_warps=4)

    return out
