"""The spectral step by Triton kernels on Hopper GPUs; the plain step of `optim.step` is its oracle.

`plan` groups blocks into buckets, `step` orders the launches. Kernels: `elementwise` (momentum and
packing, write-back), `symmetric` (half-price products) and `pingpong` (the same for many large
blocks), `heads` (the whole filter for small blocks). Only this file can be imported without Triton.
"""

import importlib.util

import torch


def available(device: torch.device) -> bool:
    """Whether the kernels run on this device: Triton is installed and it is a Hopper GPU, whose
    shared memory and bulk copy engine they need."""
    if device.type != "cuda" or torch.version.hip or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9
