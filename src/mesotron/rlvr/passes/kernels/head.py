"""The head's log-probabilities and entropies, with its logits kept for the gradient in 16 bits.

Tiles that are computed again in the backward pass, as in TRL's head, cost a fourth product of the
size of the head. Where memory allows, the logits of a micro-batch stay and become their own
gradient in place.

Shapes: M scored tokens, E width, V vocabulary; C tokens of a chunk.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 8192  # tokens; more are more than 2^31 logits, fewer leave multiprocessors idle
BLOCK = 4096  # logits that a program reads at a time
WARPS = 8
SHARE = 0.15  # of the GPU's memory that the logits may take, and
FREE_SHARE = 0.5  # of what is free behind the model's layers


class Logits(NamedTuple):
    """What a gradient needs of a chunk."""

    values: Tensor  # (C, V)
    log_z: Tensor  # (C,): log of the sum of their exponentials, after the temperature
    entropies: Tensor  # (C,)


@triton.jit
def _measure_kernel(
    logits, labels, logprobs, entropies, log_z, V, inverse_t, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    v = tl.arange(0, BLOCK)
    top = -float("inf")
    total = 0.0
    weighted = 0.0

    for start in range(0, V, BLOCK):
        inside = start + v < V
        z = tl.load(logits + start + v, mask=inside, other=0.0).to(tl.float32) * inverse_t
        higher = tl.maximum(top, tl.max(tl.where(inside, z, -float("inf")), 0))
        rescale = tl.exp(top - higher)
        weight = tl.where(inside, tl.exp(z - higher), 0.0)
        total = total * rescale + tl.sum(weight, 0)
        weighted = weighted * rescale + tl.sum(weight * z, 0)
        top = higher

    normalizer = top + tl.log(total)
    label = tl.load(labels + row)
    chosen = tl.load(logits + label).to(tl.float32) * inverse_t
    tl.store(logprobs + row, chosen - normalizer)
    tl.store(entropies + row, normalizer - weighted / total)
    tl.store(log_z + row, normalizer)


@triton.jit
def _gradient_kernel(
    logits, labels, log_z, entropies, grad_logprobs, grad_entropies, V, inverse_t,
    HAS_ENTROPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replaces logits by their gradient: of log p_label, label - p; of the entropy H,
    -p (log p + H)."""
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = v < V
    at = logits + row * V + v

    z = tl.load(at, mask=inside, other=0.0).to(tl.float32) * inverse_t
    log_p = z - tl.load(log_z + row)
    p = tl.exp(log_p)

    is_label = (v == tl.load(labels + row)).to(tl.float32)
    grad = tl.load(grad_logprobs + row) * (is_label - p)
    if HAS_ENTROPIES:
        grad -= tl.load(grad_entropies + row) * p * (log_p + tl.load(entropies + row))

    tl.store(at, (grad * inverse_t).to(logits.dtype.element_ty), mask=inside)


class KeptHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        own_weight = weight.to(hidden.dtype)
        own_bias = None if bias is None else bias.to(hidden.dtype)
        V = len(weight)
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        log_z = torch.empty_like(logprobs)

        chunks = []
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            values = torch.nn.functional.linear(hidden[part], own_weight, own_bias)
            _measure_kernel[(len(values),)](
                values,
                labels[part],
                logprobs[part],
                entropies[part],
                log_z[part],
                V,
                1 / temperature,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )
            chunks.append(Logits(values, log_z[part], entropies[part]))

        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, own_weight, labels)
        ctx.chunks = chunks
        ctx.inverse_t = 1 / temperature
        ctx.dtypes = (weight.dtype, None if bias is None else bias.dtype)

        return logprobs, entropies.clone()

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if ctx.chunks is None:
            raise ValueError("a second backward pass through one head: turn rollout.fast off")

        hidden, weight, labels = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        needs_weight = ctx.needs_input_grad[1]
        V = len(weight)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros(len(hidden), device=hidden.device)

        grad_hidden = torch.empty_like(hidden)
        shape = weight.shape if needs_weight else (0,)
        grad_weight = torch.zeros(shape, dtype=torch.float32, device=hidden.device)
        grad_bias = torch.zeros(V, dtype=torch.float32, device=hidden.device)

        for number, (values, log_z, entropies) in enumerate(ctx.chunks):
            part = slice(number * CHUNK, (number + 1) * CHUNK)
            has_entropies = grad_entropies is not None
            _gradient_kernel[(len(values), triton.cdiv(V, BLOCK))](
                values,
                labels[part],
                log_z,
                entropies,
                grad_logprobs.contiguous()[part],
                grad_entropies.contiguous()[part] if has_entropies else log_z,
                V,
                ctx.inverse_t,
                HAS_ENTROPIES=has_entropies,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )

            torch.mm(values, weight, out=grad_hidden[part])
            if needs_weight:
                add_product(grad_weight, values.T, hidden[part])
            if bias_dtype is not None:
                grad_bias += values.sum(0, dtype=torch.float32)

        ctx.chunks = None
        return (
            grad_hidden,
            grad_weight.to(weight_dtype) if needs_weight else None,
            None if bias_dtype is None else grad_bias.to(bias_dtype),
            None,
            None,
        )


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, which is not rounded to 16 bits before."""
    if total.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def fits(num_tokens: int, vocabulary: int, hidden: Tensor) -> bool:
    """Whether logits of that many tokens leave room for the rest of a training pass."""
    if hidden.device.type == "cpu":
        return True

    device = hidden.device
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    needed = num_tokens * vocabulary * hidden.element_size()

    return needed < min(SHARE * total, FREE_SHARE * free)


def score(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of labels (M,) and entropies (M,) of hidden states (M, E)."""
    return KeptHead.apply(hidden, weight, bias, labels, temperature)
