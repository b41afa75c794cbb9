"""The weights of a model that train, and adapters read into a model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from mesotron.models.load import is_sharded, reshard, widen_adapters

# Checkpoints hold whole weights by name; LoRA's leave the frozen ones out.
WHOLE = StateDictOptions(full_state_dict=True, strict=False)


def load_adapter(model: Any, folder: Path) -> None:
    from peft import set_peft_model_state_dict

    saved = load_file(folder / "adapter_model.safetensors")
    if any(weight.dtype == torch.float32 for weight in saved.values()):
        widen_adapters(model)  # now: TRL rounded them, and the optimizer comes after the weights

    trains = [name for name, _ in trainable(model)]
    if is_sharded(model):
        # PEFT would copy whole weights into shards. Its files omit the adapter's name.
        names = {name.replace(f".{model.active_adapter}", ""): name for name in trains}
        wrong = [name for name in (*saved, *names) if (name in saved) != (name in names)]
        whole: dict[str, Any] = {names[n]: weight for n, weight in saved.items() if n in names}
        set_model_state_dict(model, whole, options=WHOLE)
    else:
        result = set_peft_model_state_dict(model, saved)
        missing = set(result.missing_keys).intersection(trains)  # frozen ones are not saved
        wrong = [*result.unexpected_keys, *sorted(missing)]

    if wrong:
        raise ValueError(f"{folder} holds a different adapter: {', '.join(wrong[:3])}")


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    reshard(model)
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)
