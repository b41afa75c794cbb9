"""`fast=True`: graph sampling, fused decoder, shared prompts, recorded and ragged passes in one
switch.

Each is used where model, hardware and settings support it; one log line names the rest.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mesotron.models.speed import RECORD_BELOW
from mesotron.optim import triton
from mesotron.rlvr.passes.blocks import ragged_obstacle
from mesotron.rlvr.passes.recording import recording_obstacle
from mesotron.sampling.decoder import FusedSampler
from mesotron.sampling.graphs import GraphSampler, attention_obstacle

log = logging.getLogger("mesotron")
# Tokenizing 256 chats took 39 ms per step on an H200's host.
MAX_CACHED_PROMPTS = 16_384


class PromptTokens:
    """The tokens of a run's prompts, each of which is tokenized once."""

    def __init__(self, tokenize: Callable[[list[Any]], Any]) -> None:
        self.tokenize = tokenize  # TRL's method: ids come first
        self._ids: dict[str, np.ndarray] = {}  # arrays become tensors faster than lists

    def __call__(self, prompts: list[Any]) -> list[np.ndarray]:
        if len(self._ids) > MAX_CACHED_PROMPTS:
            self._ids = {}

        keys = keys_of(prompts)
        new = {}
        for key, prompt in zip(keys, prompts, strict=True):
            if key not in self._ids:
                new[key] = prompt

        if new:
            ids, *_ = self.tokenize(list(new.values()))
            self._ids |= dict(zip(new, map(np.array, ids), strict=True))

        return [self._ids[key] for key in keys]


def keys_of(prompts: list[Any]) -> list[str]:
    """A text for each prompt; those of a group stand together, so most are the one before."""
    keys: list[str] = []
    for k, prompt in enumerate(prompts):
        is_repeated = k > 0 and (prompt is prompts[k - 1] or prompt == prompts[k - 1])
        keys.append(keys[-1] if is_repeated else repr(prompt))

    return keys


@dataclass(frozen=True)
class FastPaths:
    sampler: type[GraphSampler] | None = None  # None for TRL's own sampling
    share_prompts: bool = False
    record: bool = False
    ragged: bool = False


def choose_fast_paths(trainer: Any) -> FastPaths:
    model = trainer.model
    args = trainer.args
    sharded = {"DeepSpeed": trainer.is_deepspeed_enabled, "FSDP": trainer.is_fsdp_enabled}

    sampling = sharded | {
        "vLLM samples": trainer.use_vllm,
        "continuous batching": args.use_transformers_continuous_batching,
        "tools": bool(trainer.tools),
        "rollout_func": trainer.rollout_func is not None,
        "min_p": bool(trainer.min_p),
        "repetition_penalty": trainer.repetition_penalty != 1.0,
        "generation_kwargs": bool(args.generation_kwargs),
        "images": trainer.reads_images,
    }

    packing = {"images": trainer.reads_images, "a router loss": trainer.aux_loss_enabled}
    rotary = any("rotary" in name for name, _ in model.named_modules())
    packing["absolute positions"] = not rotary  # of packed rows they begin before the padding

    own_pass = sharded | {
        "no GPU": trainer.accelerator.device.type != "cuda",
        "several processes": trainer.accelerator.num_processes > 1,
        "torch_compile": args.torch_compile,
        "cast_lm_head_to_fp32": args.cast_lm_head_to_fp32,
    }
    recording = own_pass | {
        "a billion weights or more": model.num_parameters() >= RECORD_BELOW,
        "gradient checkpointing": args.gradient_checkpointing,
    }
    is_half = args.bf16 or args.fp16 or model.dtype in (torch.bfloat16, torch.float16)
    ragged_rows = own_pass | {
        "float32": not is_half,
        "no Triton, or an older GPU": not triton.available(trainer.accelerator.device),
    }

    left_out: dict[str, str] = {}

    def usable(name: str, settings: dict[str, bool], obstacle: str | None) -> bool:
        reason = reason_against(settings, obstacle)
        if reason:
            left_out[name] = reason
        return reason is None

    sampler = None
    if usable(FusedSampler.name, sampling, FusedSampler.obstacle(model)):
        sampler = FusedSampler
    elif usable(GraphSampler.name, sampling, GraphSampler.obstacle(model)):
        sampler = GraphSampler

    share = usable("shared prompts", packing, attention_obstacle(model))
    obstacle = recording_obstacle(model)
    record = share and usable("recorded passes", recording, obstacle)
    ragged = share and usable("ragged rows", ragged_rows, obstacle or ragged_obstacle(model))

    if left_out:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in left_out.items())
        log.warning("rollout.fast runs without %s", reasons)

    return FastPaths(sampler, share, record, ragged)


def reason_against(settings: dict[str, bool], obstacle: str | None) -> str | None:
    """The first setting that is on, else the model's own obstacle."""
    for setting, is_on in settings.items():
        if is_on:
            return setting

    return obstacle
