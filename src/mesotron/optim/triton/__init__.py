"""Triton kernels for the optimizer's step on Hopper GPUs, each beside a plain torch reference.

`symmetric` half-price products, `pingpong` the same for many large blocks, `pack` gradients to the
filter's input, `heads` the whole filter for small blocks, `writeback` the weights, `windows` the
address tables they share. Import the modules themselves: they need Triton, this file does not. Does
not decide when to use them; `available` says whether one can.
"""

import importlib.util

import torch


def available(device: torch.device) -> bool:
    """Whether the kernels run on this device: Triton is there, and it is a Hopper GPU.

    They want its shared memory and bulk copy engine, and were measured nowhere else.

    Example:
        >>> available(torch.device("cpu"))
        False
    """
    if device.type != "cuda" or torch.version.hip or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9
