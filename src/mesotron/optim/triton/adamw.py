"""AdamW beside the spectral step: one group in few launches whose gradients may move.

PyTorch's fused kernels carry addresses in their arguments, so a captured graph would go on reading
the gradients of the step it was captured in. Here they come from a table, as everywhere in this
package. The arithmetic is that of `torch.optim.AdamW`, equal up to rounding; bfloat16 weights are
rounded at random in the same launch, with the bits of `round_stochastically`.

Legend: P parameters of one group and one set of dtypes, cut into C chunks of CHUNK elements.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mesotron.optim.device import rounding_seed, step_seed
from mesotron.optim.state import ParamStep
from mesotron.optim.stats import StepStats
from mesotron.optim.triton.elementwise import (
    INFINITY_BITS,
    TRITON_DTYPES,
    magnitude_bits,
    power_of_two_below,
)

CHUNK = 4096


def can_fuse(step: ParamStep) -> bool:
    p = step.param
    state = step.state
    if step.group["rule"] != "adamw" or step.group["fused"] is False:
        return False
    if not torch.ops.aten.is_non_overlapping_and_dense(p) or state["step"].device != p.device:
        return False

    moments = (state["exp_avg"], state["exp_avg_sq"])
    if any(t.dtype != torch.float32 for t in (*moments, state["step"])):
        return False

    tensors = (p, step.grad, *moments)
    return all(t.dtype in TRITON_DTYPES and t.stride() == p.stride() for t in tensors)


@dataclass
class FusedBatch:
    """Parameters of one group and one set of dtypes; `first` is the place of their gradients."""

    steps: list[ParamStep]
    group: int
    first: int
    table: Tensor  # int64 [P, 4]: addresses of weights, m and v; number of elements
    chunks: Tensor  # int32 [C, 2]: parameter and place in it
    streams: Tensor  # int64 [P], from `rounding_seed`
    aligned: bool

    @property
    def dtypes(self) -> tuple:
        """Triton's, of the weights and of the gradients."""
        first = self.steps[0]
        return TRITON_DTYPES[first.param.dtype], TRITON_DTYPES[first.grad.dtype]

    def gradients(self, addresses: Tensor) -> Tensor:
        """Of all gradients' addresses those of this batch."""
        return addresses[self.first : self.first + len(self.steps)]


def make_batch(steps: list[ParamStep], group: int, first: int) -> FusedBatch:
    device = steps[0].param.device
    rows = []
    addresses = []
    for step in steps:
        tensors = (step.param, step.state["exp_avg"], step.state["exp_avg_sq"])
        places = [t.data_ptr() for t in tensors]
        rows.append([*places, step.param.numel()])
        addresses += [*places, step.grad.data_ptr()]

    counts = torch.tensor([-(-numel // CHUNK) for *_, numel in rows])
    owner = torch.repeat_interleave(torch.arange(len(rows)), counts)
    place = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
    streams = [rounding_seed(0, step.number, 0) for step in steps]

    return FusedBatch(
        steps=steps,
        group=group,
        first=first,
        table=torch.tensor(rows, device=device),
        chunks=torch.stack([owner, place], dim=1).int().to(device),
        streams=torch.tensor(streams, device=device),
        aligned=all(address % 16 == 0 for address in addresses),
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
    grads,
    table,
    chunks,
    peaks,
    G_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
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
    active = tl.where(bits < 0x7F800000, inside, False)
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


def run(batches: list[FusedBatch], addresses: Tensor, numbers: Tensor, stats: StepStats) -> None:
    """Step the batches of one group. `addresses`, int64, has a gradient's address for each of all
    parameters; `numbers`, float64, has lr, weight decay, momentum, beta1, beta2 and eps. A gradient
    that is not finite stops the whole group."""
    lr, weight_decay, _, beta1, beta2, eps = numbers.unbind()
    steps = [step for batch in batches for step in batch.steps]
    name = steps[0].group["name"]

    peaks = _find_peaks(batches, addresses)
    finite = peaks < INFINITY_BITS
    stats.finite.append(([name] * len(steps), finite))

    # One flag for each: a single tensor would be read by the host.
    counters = [step.state["step"] for step in steps]
    torch._foreach_add_(counters, [finite.all().float()] * len(counters))  # pyright: ignore

    peak = peaks.amax()
    factors = torch.stack([lr * weight_decay, eps, 1 - beta1, beta2, 1 - beta2]).float()
    sums = []
    for batch in batches:
        counts = torch.stack([step.state["step"] for step in batch.steps])
        corrections = _bias_corrections(counts, lr, beta1, beta2)
        seeds = step_seed(counts, batch.streams)
        sums.append(
            _launch(
                batch,
                addresses,
                peak,
                factors,
                corrections,
                seeds,
            )
        )

    _record(torch.cat(sums), sum(step.param.numel() for step in steps), name, stats)


def _find_peaks(batches: list[FusedBatch], addresses: Tensor) -> Tensor:
    """The largest magnitude of each gradient, int32 [P], as bits that sort like it."""
    sizes = [len(batch.steps) for batch in batches]
    peaks = torch.zeros(sum(sizes), dtype=torch.int32, device=addresses.device)
    for batch, part in zip(batches, peaks.split(sizes), strict=True):
        _, gradient_dtype = batch.dtypes
        _peak_kernel[(len(batch.chunks),)](
            batch.gradients(addresses),
            batch.table,
            batch.chunks,
            part,
            gradient_dtype,
            ALIGNED=batch.aligned,
            CHUNK=CHUNK,
            num_warps=8,
        )

    return peaks


def _bias_corrections(counts: Tensor, lr: Tensor, beta1: Tensor, beta2: Tensor) -> Tensor:
    """lr / (1 - beta1^t) and sqrt(1 - beta2^t), float32 [P, 2]."""
    # In float64: 1 - 0.999 would lose four digits.
    t = counts.clamp_min(1).double()
    root = (1 - beta2**t).sqrt()

    return torch.stack([lr / (1 - beta1**t), root], dim=1).float()


def _launch(
    batch: FusedBatch,
    addresses: Tensor,
    peak: Tensor,
    factors: Tensor,
    corrections: Tensor,
    seeds: Tensor,
) -> Tensor:
    """Step a batch; returns the sums of each chunk, float32 [C, 3]."""
    num_chunks = len(batch.chunks)
    sums = torch.empty(num_chunks, 3, dtype=torch.float32, device=addresses.device)
    weight_dtype, gradient_dtype = batch.dtypes

    _adamw_kernel[(num_chunks,)](
        batch.gradients(addresses),
        batch.table,
        batch.chunks,
        peak,
        factors,
        corrections,
        seeds,
        sums,
        W_DTYPE=weight_dtype,
        G_DTYPE=gradient_dtype,
        ALIGNED=batch.aligned,
        CHUNK=CHUNK,
        num_warps=8,
    )
    return sums


def _record(sums: Tensor, count: int, name: str, stats: StepStats) -> None:
    """Statistics from [C, 3] sums over chunks: moved^2, moved * gradient, gradient^2."""
    moved, product, square = sums.double().sum(dim=0).unbind()
    stats.updates.append((name, (moved / count).sqrt(), count))

    length = (moved * square).sqrt()
    cosine = (product / length).masked_fill(length == 0, 0.0)
    stats.cosines.append(([name], cosine[None]))
