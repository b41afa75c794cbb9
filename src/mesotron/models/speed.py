"""The settings left to us that decide how fast a run samples and steps."""

from dataclasses import replace

from mesotron.config import TrainConfig
from mesotron.runs.extras import is_installed
from mesotron.runs.process import num_processes

# Weights below which `rollout.fast` beats vLLM on one GPU (benchmarks/stack).
FAST_BELOW = 1_000_000_000
FAST_BELOW_FUSED = 2_000_000_000  # with the fused decoder
RECORD_BELOW = 1_000_000_000  # weights; above, recorded passes take memory and gain nothing
FUSED_FROM = 100  # steps that repay the compilation (benchmarks/speedrun/step_time.json)


def choose_speed(
    config: TrainConfig, on_gpu: bool, num_weights: int, fuses: bool = True
) -> TrainConfig:
    """The run's config with `rollout.fast`, `rollout.vllm` and `optim.fused` resolved; `fuses` if
    the fused decoder takes the model."""
    fast = config.rollout.fast
    vllm = config.rollout.vllm
    fused = config.optim.fused

    is_small = num_weights < (FAST_BELOW_FUSED if fuses else FAST_BELOW)
    if vllm == "auto":
        usable = on_gpu and not fast and not is_small and is_installed("vllm")
        vllm = "colocate" if usable else "off"

    if fast is None:
        is_faster = on_gpu and is_small
        needs_it = config.rollout.max_staleness > 0
        fast = (is_faster or needs_it) and can_sample_fast(config, vllm)

    if fused is None:
        fused = config.steps >= FUSED_FROM

    rollout = replace(config.rollout, fast=fast, vllm=vllm)
    optim = replace(config.optim, fused=fused)
    return replace(config, rollout=rollout, optim=optim)


def can_sample_fast(config: TrainConfig, vllm: str) -> bool:
    return num_processes() == 1 and vllm == "off" and config.model.load == "full"
