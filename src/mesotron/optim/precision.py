"""Precision: which dtype the filter multiplies in, and rounding into bfloat16 weights without a
bias.

bfloat16 products are twice as fast as tf32 ones on a recent GPU, and 200 times slower than float32
ones on a CPU without bfloat16 units, so the choice is measured once per device and not assumed.
"""

from __future__ import annotations

import struct
import time
import zlib
from functools import cache

import torch
from torch import Tensor

_PROBE_SIZE = 96  # 1.8 MFLOP: 40 ms where bfloat16 is emulated, microseconds elsewhere
_GOLDEN = 0x9E3779B1 - 2**32  # odd and without pattern: neighbours end far apart
_PROBE_MARGIN = 1.3  # bfloat16 must win clearly before accuracy is given up for it


@cache
def filter_dtype(device: torch.device) -> torch.dtype:
    """The fastest dtype for matrix products on `device` that a spectral filter tolerates.

    Args:
        device: a torch device.

    Returns:
        torch.bfloat16 where it is clearly faster than float32, else torch.float32.

    Example:
        >>> filter_dtype(torch.device("cpu")) in (torch.float32, torch.bfloat16)
        True
    """
    if device.type == "cuda":
        native = torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if native else torch.float32
    if device.type != "cpu":
        return torch.float32
    fast = _product_seconds(torch.float32)
    return (
        torch.bfloat16 if _product_seconds(torch.bfloat16) * _PROBE_MARGIN < fast else torch.float32
    )


def _product_seconds(dtype: torch.dtype) -> float:
    X = torch.full((_PROBE_SIZE, _PROBE_SIZE), 0.5, dtype=dtype)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        torch.mm(X, X)
        best = min(best, time.perf_counter() - start)
        if best > 0.01:  # emulated: no need to wait for a better reading
            break
    return best


def rounding_seed(step: int, number: int, part: int) -> int:
    """The seed of one part of one parameter in one step, 32 bits: a CPU generator reads no more.

    It follows from these alone and not from a global generator, so that replicas round alike and a
    resumed run as one left alone. A CRC differs wherever two inputs differ in one of the three, and
    otherwise as a hash does.

    Args:
        step: of the param group.
        number: the parameter's place in the optimizer.
        part: which window of it, or which shard.
    """
    return zlib.crc32(struct.pack("<III", step % 2**32, number, part))


def step_seed(step: Tensor, stream: int) -> Tensor:
    """The seed of a parameter's step where the step is counted on the device.

    Nothing of it is computed by the host, so that a replayed CUDA graph rounds each step anew.

    Args:
        step: 0-d, steps made so far.
        stream: tells parameters apart, from `rounding_seed`.

    Returns:
        A 0-d int32 on the step's device.
    """
    return _mix((step.int() * _GOLDEN).bitwise_xor(stream - 2**31))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that an optimizer computes and keeps its state in: float32, or wider.

    Example:
        >>> wide_dtype(torch.bfloat16), wide_dtype(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


def round_stochastically(values: Tensor, out: Tensor, seed: int | Tensor) -> None:
    """Round float32 `values` into bfloat16 `out`, up or down at random so that the mean is kept.

    A weight of 1 moves in bfloat16 by steps of 1/128: an update of 1e-5 rounded to nearest is lost
    at every step, rounded at random it arrives on average. Works on the bits: add 16 random low
    bits, then cut them off. Values that are not finite are passed through.

    Args:
        values: float32, any shape.
        out: bfloat16, same shape; written.
        seed: of the random bits: a number from `rounding_seed`, or a tensor from `step_seed`.
    """
    bits = values.contiguous().view(torch.int32)
    noise = _hashed_bits(bits, seed) if isinstance(seed, Tensor) else _drawn_bits(bits, seed)
    rounded = ((bits + noise) & -65536).view(torch.float32)
    out.copy_(torch.where(values.isfinite(), rounded, values))


def _drawn_bits(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randint(
        0, 1 << 16, like.shape, dtype=torch.int32, device=like.device, generator=generator
    )


def _hashed_bits(like: Tensor, seed: Tensor) -> Tensor:
    """16 bits for each element: a hash of its place and the seed."""
    places = torch.arange(like.numel(), dtype=torch.int32, device=like.device)
    found = _mix(places.mul_(_GOLDEN).add_(seed))
    return _shifted(found, 16).view(like.shape)


def _mix(x: Tensor) -> Tensor:
    """An int32 hash in which every bit of the input moves half of the output's (lowbias32 of
    Wellons, 2018); overwrites x."""
    x.bitwise_xor_(_shifted(x, 16)).mul_(0x7FEB352D)
    x.bitwise_xor_(_shifted(x, 15)).mul_(0x846CA68B - 2**32)
    return x.bitwise_xor_(_shifted(x, 16))


def _shifted(x: Tensor, number: int) -> Tensor:
    """Bits moved to the right, zeros after them: an int32 would drag its sign along."""
    return (x >> number) & (1 << (32 - number)) - 1
