"""The names of the rules, and the one refusal that routing and hand-made groups share."""

from __future__ import annotations

from torch import Tensor

SPECTRAL_RULES = ("muon", "pion")
AUXILIARY_RULES = ("adamw", "sgd")
RULES = SPECTRAL_RULES + AUXILIARY_RULES


def refuse_flat_shard(p: Tensor, name: str = "a parameter", wrapped: bool = False) -> None:
    """Refuse the flat pieces and empty placeholders that FSDP1 and ZeRO-3 leave of a weight.

    Args:
        p: a parameter.
        name: how to call it.
        wrapped: it lies below an FSDP1 wrapper.
    """
    # `_fsdp_flattened` is FSDP1's mark on the parameters that use_orig_params=True shows.
    flat = type(p).__name__ == "FlatParameter" or getattr(p, "_fsdp_flattened", False)
    owners = {
        "DeepSpeed ZeRO-3": getattr(p, "ds_id", None) is not None,
        "FSDP1": wrapped or flat,
    }
    owner = next((owner for owner, found in owners.items() if found), None)
    if owner is not None:
        raise ValueError(
            f"{name} (shape {tuple(p.shape)}) is a flat or empty shard of {owner}, not a whole "
            "tensor, and a spectral filter on a shard is another optimizer: use FSDP2 "
            "(torch.distributed.fsdp.fully_shard), whose parameters keep their shape"
        )
