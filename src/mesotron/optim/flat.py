"""Flat parameters of FSDP1 and DeepSpeed ZeRO, which hold no matrix that could be filtered."""

from torch import Tensor

from mesotron.optim.views import FSDP2


def check_not_flat(p: Tensor, name: str = "a parameter", wrapped: bool = False) -> None:
    # `_fsdp_flattened` is FSDP1's mark on the parameters that use_orig_params=True shows.
    flat = type(p).__name__ == "FlatParameter" or getattr(p, "_fsdp_flattened", False)
    zero3 = getattr(p, "ds_id", None) is not None
    if not (zero3 or wrapped or flat):
        return

    source = "DeepSpeed ZeRO-3" if zero3 else "FSDP1"
    shape = tuple(p.shape)
    raise ValueError(f"{name} (shape {shape}) is a flat or empty shard of {source}; {FSDP2}")
