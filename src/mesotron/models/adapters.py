"""LoRA adapters: their settings, their precision, and reading them into a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from mesotron.config import ModelConfig
from mesotron.models.sharded import is_sharded, reshard
from mesotron.runs.extras import require

if TYPE_CHECKING:
    from peft import LoraConfig

# Checkpoints hold whole weights by name; LoRA's leave the frozen ones out.
LORA_ALPHA = 32  # the update is multiplied by alpha / rank
WHOLE = StateDictOptions(full_state_dict=True, strict=False)


def lora_config(config: ModelConfig) -> LoraConfig | None:
    """The trainer's `peft_config`: rank and alpha on all linear layers, or None for rank 0."""
    if config.lora == 0:
        return None

    require("rlvr", ["peft"], "--lora")
    from peft import LoraConfig

    return LoraConfig(
        r=config.lora,
        lora_alpha=LORA_ALPHA,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The weights that train, by name."""
    reshard(model)
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def widen_adapters(model: nn.Module) -> None:
    """Keep the adapters of a quantized model in float32, as those of any other: TRL rounds them to
    bfloat16, where small updates are lost."""
    if getattr(model, "is_quantized", False):
        for p in model.parameters():
            if p.requires_grad:
                p.data = p.data.float()


def load_adapter(model: Any, folder: Path) -> None:
    """Read an adapter's weights into a model that has one of the same shape."""
    saved = load_file(folder / "adapter_model.safetensors")
    if any(weight.dtype == torch.float32 for weight in saved.values()):
        widen_adapters(model)  # now: TRL rounded them, and the optimizer comes after the weights

    read = _load_sharded if is_sharded(model) else _load_whole
    wrong = read(model, saved)
    if wrong:
        raise ValueError(f"{folder} holds a different adapter: {', '.join(wrong[:3])}")


def _load_whole(model: Any, saved: dict[str, Tensor]) -> list[str]:
    """Returns the names that only one side has."""
    from peft import set_peft_model_state_dict

    result = set_peft_model_state_dict(model, saved)
    trains = [name for name, _ in trainable(model)]
    missing = set(result.missing_keys).intersection(trains)  # frozen ones are not saved

    return [*result.unexpected_keys, *sorted(missing)]


def _load_sharded(model: Any, saved: dict[str, Tensor]) -> list[str]:
    """The same for a sharded model, into whose shards PEFT would copy whole weights."""
    # PEFT's files omit the adapter's name.
    names = {name.replace(f".{model.active_adapter}", ""): name for name, _ in trainable(model)}

    whole: dict[str, Any] = {}
    for name, weight in saved.items():
        if name in names:
            whole[names[name]] = weight

    set_model_state_dict(model, whole, options=WHOLE)

    only_saved = [name for name in saved if name not in names]
    only_model = [name for name in names if name not in saved]
    return only_saved + only_model
