"""What keeps a checkpoint from being written, told in one sentence and in every process.

A process that fails alone would leave the others waiting for it; weights that are not numbers would
take the place of the last good ones.
"""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.tensor import DTensor


def refuse_flat_shards(trainer: Any) -> None:
    """Say at the first checkpoint what could not be resumed, before hours are lost."""
    if trainer.is_deepspeed_enabled or (
        trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2
    ):
        raise ValueError(
            "DeepSpeed and FSDP1 keep weights in flat shards, which are not written exactly: use "
            "FSDP2 (fsdp_version: 2) or plain data parallelism"
        )


def all_or_none(act: Callable[[], None], step: int) -> None:
    """Do something in every process; where it fails in one, raise in all, so that none waits."""
    error: Exception | None = None
    try:
        act()
    except Exception as raised:  # raised again below, once the others know
        error = raised
    told = gather_object([None if error is None else f"{type(error).__name__}: {error}"])
    if error is not None:
        raise error
    failed = [(number, words) for number, words in enumerate(told) if words is not None]
    if failed:
        number, words = failed[0]
        raise ValueError(
            f"process {number} could not write its part of the checkpoint of step {step} "
            f"({words}); earlier ones are whole, so mend that and resume"
        )


def refuse_spoiled_weights(model: nn.Module, step: int) -> None:
    """Refuse to save weights that are not numbers: the checkpoint before them is the one to use."""
    weights = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    held = [w.detach() for w in weights if w.numel()]
    peaks = torch._foreach_norm(held, float("inf")) if held else []  # pyright: ignore
    if not all(bool(peak.isfinite()) for peak in peaks):
        raise ValueError(
            f"weights are not finite after step {step}, so training has stopped and this step was "
            "not saved; go on from an earlier checkpoint (--model.name) with a smaller --optim.lr"
        )


def explain_failed_write(error: Exception, root: Path, step: int) -> Exception:
    """What the system refused, in one sentence (a full disk, a limit); other failures as they are.

    Args:
        error: as raised; safetensors tells the system's reason in its text alone.
        root: folder of the checkpoints.
        step: whose checkpoint was being written.
    """
    told = re.search(r"\(os error (\d+)\)", str(error))
    code = error.errno if isinstance(error, OSError) else int(told[1]) if told else None
    if code is None:
        return error
    reason = "the disk is full" if code in (errno.ENOSPC, errno.EDQUOT) else os.strerror(code)
    return ValueError(
        f"{reason}: the checkpoint of step {step} could not be written to {root}; earlier ones are "
        "whole, so make room or mend that, and resume"
    )
