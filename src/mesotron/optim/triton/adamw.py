"""AdamW beside the spectral step: one group in few launches whose gradients may move.

PyTorch's fused kernels carry addresses in their arguments, so a captured graph would go on reading
the gradients of the step it was captured in. Here they come from a table, as everywhere in this
package. The arithmetic is that of `torch.optim.AdamW`, equal up to rounding; bfloat16 weights are
rounded at random in the same launch, with the bits of `round_stochastically`.

Legend: P parameters of one group and one set of dtypes, cut into C chunks of CHUNK elements.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mesotron.optim.device import rounding_seed, step_seed
from mesotron.optim.stats import StepStats
from mesotron.optim.triton.elementwise import (
    INFINITY_BITS,
    TRITON_DTYPES,
    magnitude_bits,
    power_of_two_below,
)

CHUNK = 4096


class Vector(NamedTuple):
    """One parameter that AdamW steps; `number` is its index in the optimizer."""

    param: Tensor
    grad: Tensor
    state: dict[str, Any]
    group: dict[str, Any]
    number: int


def can_fuse(vector: Vector) -> bool:
    p, grad, state, group, _ = vector
    if group["rule"] != "adamw" or group["fused"] is False:
        return False

    tensors = (p, grad, state["exp_avg"], state["exp_avg_sq"])
    return (
        all(t.dtype in TRITON_DTYPES and t.stride() == p.stride() for t in tensors)
        and all(t.dtype == torch.float32 for t in (*tensors[2:], state["step"]))
        and state["step"].device == p.device
        and torch.ops.aten.is_non_overlapping_and_dense(p)
    )


@dataclass
class Batch:
    """Parameters of one group and one set of dtypes; `first` is the place of their gradients."""

    vectors: list[Vector]
    group: int
    first: int
    table: Tensor  # int64 [P, 4]: addresses of weights, m and v; number of elements
    chunks: Tensor  # int32 [C, 2]: parameter and place in it
    streams: Tensor  # int64 [P], from `rounding_seed`
    aligned: bool


def make_batch(vectors: list[Vector], group: int, first: int) -> Batch:
    device = vectors[0].param.device
    rows = [
        (
            *(t.data_ptr() for t in (v.param, v.state["exp_avg"], v.state["exp_avg_sq"])),
            v.param.numel(),
        )
        for v in vectors
    ]

    counts = torch.tensor([-(-row[3] // CHUNK) for row in rows])
    owner = torch.repeat_interleave(torch.arange(len(rows)), counts)
    place = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
    streams = [rounding_seed(0, v.number, 0) for v in vectors]
    addresses = [address for row in rows for address in row[:3]]

    return Batch(
        vectors=vectors,
        group=group,
        first=first,
        table=torch.tensor(rows, device=device),
        chunks=torch.stack([owner, place], dim=1).int().to(device),
        streams=torch.tensor(streams, device=device),
        aligned=not any(x % 16 for x in (*addresses, *(v.grad.data_ptr() for v in vectors))),
    )


@triton.jit
def _pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(address).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _chunk(table, chunks, CHUNK: tl.constexpr):
    tensor = tl.load(chunks + 2 * tl.program_id(0))
    start = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    at = start + tl.arange(0, CHUNK)

    return tensor, at, at < tl.load(table + 4 * tensor + 3)


@triton.jit
def _peak_kernel(
    grads, table, chunks, peaks, G_DTYPE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr
):
    tensor, at, inside = _chunk(table, chunks, CHUNK)
    gradient = tl.load(_pointer(grads + tensor, G_DTYPE, ALIGNED) + at, mask=inside, other=0.0)
    tl.atomic_max(peaks + tensor, tl.max(magnitude_bits(gradient)), sem="relaxed")


@triton.jit
def _mix(x):
    """The hash of `mesotron.optim.device`, on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _adamw_kernel(
    grads,
    table,
    chunks,
    peak,
    factors,
    corrections,
    seeds,
    sums,
    W_DTYPE: tl.constexpr,
    G_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    tensor, at, inside = _chunk(table, chunks, CHUNK)
    bits = tl.load(peak)
    active = inside & (bits < 0x7F800000)
    weights_at = _pointer(table + 4 * tensor, W_DTYPE, ALIGNED) + at
    m_at = _pointer(table + 4 * tensor + 1, tl.float32, ALIGNED) + at
    v_at = _pointer(table + 4 * tensor + 2, tl.float32, ALIGNED) + at
    decay = tl.load(factors)
    eps = tl.load(factors + 1)
    one_minus_beta1 = tl.load(factors + 2)
    beta2 = tl.load(factors + 3)
    one_minus_beta2 = tl.load(factors + 4)
    step_size = tl.load(corrections + 2 * tensor)
    root = tl.load(corrections + 2 * tensor + 1)

    gradient = tl.load(_pointer(grads + tensor, G_DTYPE, ALIGNED) + at, mask=active, other=0.0)
    gradient = gradient.to(tl.float32)
    m = tl.load(m_at, mask=active, other=0.0)
    m += one_minus_beta1 * (gradient - m)
    v = beta2 * tl.load(v_at, mask=active, other=0.0) + one_minus_beta2 * gradient * gradient
    weight = tl.load(weights_at, mask=active, other=0.0).to(tl.float32)
    move = step_size * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    move = tl.where(active, move, 0.0)

    weight = weight - decay * weight - move
    if tl.bfloat16 == W_DTYPE:
        seed = tl.load(seeds + tensor).to(tl.uint32, bitcast=True)
        noise = _mix(at.to(tl.uint32) * 0x9E3779B1 + seed) >> 16
        rounded = (weight.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000
        finite = magnitude_bits(weight) < 0x7F800000
        weight = tl.where(finite, rounded.to(tl.float32, bitcast=True), weight)

    tl.store(m_at, m, mask=active)
    tl.store(v_at, v, mask=active)
    tl.store(weights_at, weight.to(W_DTYPE), mask=active)

    # Scaled by a power of two, so that the squares stay in range.
    scaled = gradient * power_of_two_below(bits)
    tl.store(sums + 3 * tl.program_id(0), tl.sum(move * move))
    tl.store(sums + 3 * tl.program_id(0) + 1, tl.sum(move * scaled))
    tl.store(sums + 3 * tl.program_id(0) + 2, tl.sum(scaled * scaled))


def run(batches: list[Batch], addresses: Tensor, numbers: Tensor, stats: StepStats) -> None:
    """Step the batches of one group. `addresses`, int64, has a gradient's address for each of all
    parameters; `numbers`, float64, has lr, weight decay, momentum, beta1, beta2 and eps. A gradient
    that is not finite stops the whole group."""
    lr, weight_decay, _, beta1, beta2, eps = numbers.unbind()
    device = addresses.device
    name = batches[0].vectors[0].group["name"]
    vectors = [v for batch in batches for v in batch.vectors]
    peaks = torch.zeros(len(vectors), dtype=torch.int32, device=device)

    parts = peaks.split([len(batch.vectors) for batch in batches])
    for batch, part in zip(batches, parts, strict=True):
        grads = addresses[batch.first : batch.first + len(batch.vectors)]
        _peak_kernel[(len(batch.chunks),)](
            grads,
            batch.table,
            batch.chunks,
            part,
            TRITON_DTYPES[batch.vectors[0].grad.dtype],
            ALIGNED=batch.aligned,
            CHUNK=CHUNK,
            num_warps=8,
        )

    finite = peaks < INFINITY_BITS
    stats.finite.append(([name] * len(vectors), finite))
    peak = peaks.amax()
    counters = [v.state["step"] for v in vectors]

    # One flag for each: a single tensor would be read by the host.
    torch._foreach_add_(counters, [finite.all().float()] * len(counters))  # pyright: ignore
    factors = torch.stack([lr * weight_decay, eps, 1 - beta1, beta2, 1 - beta2]).float()

    sums = []
    for batch in batches:
        steps = torch.stack([v.state["step"] for v in batch.vectors])

        # In float64: 1 - 0.999 would lose four digits.
        wide = steps.clamp_min(1).double()
        root = (1 - beta2**wide).sqrt()
        corrections = torch.stack([lr / (1 - beta1**wide), root], dim=1).float()
        seeds = step_seed(steps, batch.streams)
        sums.append(torch.empty(len(batch.chunks), 3, dtype=torch.float32, device=device))
        first = batch.vectors[0]
        grads = addresses[batch.first : batch.first + len(batch.vectors)]

        _adamw_kernel[(len(batch.chunks),)](
            grads,
            batch.table,
            batch.chunks,
            peak,
            factors,
            corrections,
            seeds,
            sums[-1],
            W_DTYPE=TRITON_DTYPES[first.param.dtype],
            G_DTYPE=TRITON_DTYPES[first.grad.dtype],
            ALIGNED=batch.aligned,
            CHUNK=CHUNK,
            num_warps=8,
        )

    moved, product, square = torch.cat(sums).double().sum(dim=0).unbind()
    count = sum(v.param.numel() for v in vectors)
    stats.updates.append((name, (moved / count).sqrt(), count))
    length = (moved * square).sqrt()
    stats.cosines.append(([name], (product / length).masked_fill(length == 0, 0.0)[None]))
