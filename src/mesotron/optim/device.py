"""The device of a run, the dtype of the filter's products, and unbiased rounding into bfloat16."""

import struct
import zlib
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache

import torch
from torch import Tensor, nn

from mesotron.runs.own_code import AUTOCAST_DEVICES
from mesotron.runs.process import local_index

_SMALL_MODEL = 5_000_000  # weights; two threads made the tiny model three times slower
_GOLDEN = 0x9E3779B1 - 2**32  # odd and without pattern: neighbors end far apart


def choose_device(name: str, threads: int | None = None) -> torch.device:
    if threads is not None:
        torch.set_num_threads(threads)

    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device; use --device cpu")

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"

    if name == "cuda":  # each process of a multi-process run has its own
        return torch.device(name, local_index())

    return torch.device(name)


def use_one_thread_if_small(model: nn.Module, device: torch.device, threads: int | None) -> None:
    """Unless the user chose, give a small model on a CPU one thread: more wait for each other."""
    size = sum(p.numel() for p in model.parameters())
    if threads is None and device.type == "cpu" and size < _SMALL_MODEL:
        torch.set_num_threads(1)


def name_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)

    return "cpu"


@cache
def filter_dtype(device: torch.device) -> torch.dtype:
    """The dtype of a filter's products: bfloat16 on a GPU that multiplies it, float32 elsewhere.

    Some CPUs are faster in bfloat16, too, but a run must give the same weights on another CPU and
    after a resume."""
    is_fast = False

    if device.type == "cuda":
        is_fast = torch.version.hip is not None
        is_fast = is_fast or torch.cuda.get_device_capability(device) >= (8, 0)

    return torch.bfloat16 if is_fast else torch.float32


def tensors_on_host() -> AbstractContextManager[object]:
    """Tensors made without a device are the host's, whatever `torch.device` is around the call."""
    if torch.get_default_device().type == "cpu":
        return nullcontext()

    return torch.device("cpu")


def without_autocast() -> AbstractContextManager[object]:
    """Products have the dtype of their tensors, whatever `torch.autocast` is around the call."""
    stack = ExitStack()
    for kind in AUTOCAST_DEVICES:
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))

    return stack


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def rounding_seed(step: int, number: int, part: int) -> int:
    """The 32-bit seed of one part (window or shard) of parameter `number` in one step: without a
    global generator replicas round alike, and a resumed run like an uninterrupted one."""
    return zlib.crc32(struct.pack("<III", step % 2**32, number, part))


def step_seed(step: Tensor, stream: int | Tensor) -> Tensor:
    """The seed of a step counted on the device, so that a replayed CUDA graph draws new ones."""
    signed = stream - 2**31
    if isinstance(signed, Tensor):
        signed = signed.int()

    return _mix((step.int() * _GOLDEN) ^ signed)


def round_stochastically(values: Tensor, out: Tensor, seed: int | Tensor) -> None:
    """Round float32 `values` into bfloat16 `out`, up or down at random so that the mean is kept. A
    weight of 1 moves in bfloat16 by steps of 1/128: an update of 1e-5 rounded to nearest is lost.
    Non-finite values pass through. `seed` is from `rounding_seed` or, as a tensor, `step_seed`."""
    bits = values.contiguous().view(torch.int32)

    if isinstance(seed, Tensor):  # hash each element's index
        index = torch.arange(bits.numel(), dtype=torch.int32, device=bits.device)
        hashed = _mix(index.mul_(_GOLDEN).add_(seed))
        noise = _shift_right(hashed, 16).view(bits.shape)
    else:
        generator = torch.Generator(bits.device).manual_seed(seed)
        noise = torch.randint(
            0,
            1 << 16,
            bits.shape,
            dtype=torch.int32,
            device=bits.device,
            generator=generator,
        )

    rounded = ((bits + noise) & -65536).view(torch.float32)
    out.copy_(torch.where(values.isfinite(), rounded, values))


def _mix(x: Tensor) -> Tensor:
    """An int32 hash (lowbias32, Wellons 2018) that overwrites x."""
    x.bitwise_xor_(_shift_right(x, 16)).mul_(0x7FEB352D)
    x.bitwise_xor_(_shift_right(x, 15)).mul_(0x846CA68B - 2**32)
    return x.bitwise_xor_(_shift_right(x, 16))


def _shift_right(x: Tensor, number: int) -> Tensor:
    return (x >> number) & (1 << (32 - number)) - 1  # an int32 shift would drag its sign along
