"""The dtype of loaded weights, by the setting and by what the device can do."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from mesotron.config import SftConfig, TrainConfig

if TYPE_CHECKING:
    import torch

Training = TypeVar("Training", TrainConfig, SftConfig)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Dtype of loaded weights: as given, or (auto) bfloat16 where the GPU supports it."""
    import torch

    has_bfloat16 = supports_bfloat16(device)
    if name in ("bfloat16", "mixed") and not has_bfloat16:
        raise ValueError(f"--model.dtype {name} needs a GPU with bfloat16: use float32 or auto")

    half = has_bfloat16 if name == "auto" else name == "bfloat16"
    return torch.bfloat16 if half else torch.float32


def choose_precision(config: Training, has_bfloat16: bool) -> Training:
    """The run's config with `model.dtype` resolved."""
    if config.model.dtype != "auto" or not has_bfloat16:
        return config

    # An update of 1e-5 is lost in bfloat16 weights; frozen ones have none.
    dtype = "bfloat16" if config.model.lora else "mixed"
    return replace(config, model=replace(config.model, dtype=dtype))


def supports_bfloat16(device: torch.device) -> bool:
    import torch

    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
