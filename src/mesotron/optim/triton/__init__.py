"""The spectral step by Triton kernels on NVIDIA GPUs; the plain step of `optim.step` is its oracle.

`plan` groups blocks into buckets, `step` orders the launches. Kernels: `elementwise` (momentum and
packing, write-back), `symmetric` (half-price products) and `pingpong` (the same for many large
blocks), `heads` (the whole filter for small blocks). Only this file can be imported without Triton.
"""

import importlib.util
from functools import lru_cache

import torch


def available(device: torch.device) -> bool:
    """Whether the kernels run on this device: Triton is installed, and it is an NVIDIA GPU of
    compute capability 8.0 (Ampere) or newer. Tuned on Hopper; what other GPUs lack (the bulk copy
    engine, shared memory for blocks of 128 rows) is left out there."""
    if device.type != "cuda" or torch.version.hip or importlib.util.find_spec("triton") is None:
        return False
    return capability(device) >= 8


@lru_cache
def capability(device: torch.device) -> int:
    """The major compute capability; in Triton's interpreter, on a CPU, Hopper's."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0]

    return 9
