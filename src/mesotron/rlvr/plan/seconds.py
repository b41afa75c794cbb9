"""Seconds of one step, phase by phase: arithmetic on shapes, peak numbers and fitted constants.

Decoding is bound by memory traffic (weights and keys and values for each token) or by the host's
launches; training passes by products and by the traffic of activations.
"""

from dataclasses import replace
from typing import NamedTuple

from mesotron.config import OptimConfig
from mesotron.rlvr.plan.setup import Setup

# Seconds of host fit runs of benchmarks/plan and benchmarks/speedrun on an H200; the other
# constants are assumed.
MATMUL = 0.60  # share of the peak that large products reach
MATMUL_FLOAT32 = 0.8
TRAFFIC = 0.75  # share of the peak bandwidth that elementwise kernels reach

EAGER_TOKEN = 1.45e-3  # seconds of host per layer and decoded token of `generate`
EAGER_TOKEN_LORA = 1.2e-3  # the same for the adapters of a layer
EAGER_TOKEN_HEAD_NORMS = 0.25e-3  # the same for norms of queries and keys
GRAPH_TOKEN = 0.20e-3  # seconds of GPU per layer and token replayed as a graph, beside traffic
FUSED_TOKEN = 0.09e-3  # the same with the fused decoder

EAGER_FORWARD = 0.7e-3  # seconds of host per layer of a forward pass
EAGER_TRAINING = 2.2e-3  # the same of a forward and backward pass
LAUNCHES_LORA = 2.0  # how many times as many launches a pass has with adapters
RECORDED = 0.25  # share of the launches' time that recorded passes take

OPTIMIZER_LAUNCH = 0.08e-3  # seconds of host per matrix without our kernels
SECONDS_PER_ROW = 0.1e-3  # tokenizing, scoring and collecting one completion
SECONDS_PER_STEP = 0.05  # logs, callbacks and the trainer's loop
GAPS = 0.08  # between the phases, as a share of them
# Launches of a supervised step, whose trainer also measures entropy and accuracy, in units of a
# training pass; fits 900 steps of SmolLM2-135M on an H200.
SUPERVISED = 2.0


def phase_seconds(setup: Setup) -> dict[str, float]:
    """Seconds of one optimizer step, by phase."""
    rollout = setup.config.rollout
    rows = setup.rows
    lengths = setup.lengths

    tokens = rows.prompts * lengths.prompt + rows.trained * lengths.longest
    scored = rows.trained * lengths.completion

    # Log-probabilities of the policy that sampled, and of the reference.
    extra_passes = (rollout.updates > 1 or rollout.vllm != "off") + bool(setup.objective.beta)
    score = rows.sampled * SECONDS_PER_ROW / rollout.updates
    score += extra_passes * pass_seconds(setup, tokens, scored, rows.passes, training=False)

    seconds = {
        "generate": decode_seconds(setup, rows.sampled) / rollout.updates,
        "score": score,
        "train": pass_seconds(setup, tokens, scored, rows.passes, training=True),
        "optimizer": optimizer_seconds(setup),
    }
    seconds["other"] = SECONDS_PER_STEP + GAPS * sum(seconds.values())

    return seconds


def supervised_seconds(setup: Setup, answer: float) -> float:
    """Seconds of one step of a supervised start, on answers of so many tokens: AdamW, every weight,
    without a record of the passes."""
    rollout = replace(setup.config.rollout, fast=False)
    config = replace(setup.config, rollout=rollout, optim=OptimConfig(name="adamw"))
    plain = replace(setup, config=config)

    # A batch is padded to its longest row; logits are made for all of it.
    width = setup.lengths.prompt + 2 * answer
    tokens = setup.config.sft.batch * width
    seconds = pass_seconds(plain, tokens, tokens, 1, training=True)
    if setup.gpu is not None:
        host = setup.shape.layers * EAGER_TRAINING * SUPERVISED
        seconds = max(seconds, host)

    seconds += optimizer_seconds(plain)
    return SECONDS_PER_STEP + (1 + GAPS) * seconds


def flops_per_second(setup: Setup) -> float:
    if setup.in_float32:
        return 1e12 * (setup.device.fp32 * MATMUL_FLOAT32)

    return 1e12 * (setup.device.bf16 * MATMUL)


def bytes_per_second(setup: Setup) -> float:
    return 1e9 * setup.device.bandwidth * TRAFFIC


class PassWork(NamedTuple):
    """How much a pass does, in units of one forward pass or of one layer."""

    layers: int  # products of the layers
    head: int  # products of the head
    activations: int  # reads and writes of what the layers save
    logits: int  # reads and writes of the logits
    host: float  # seconds of launches per layer


def pass_work(setup: Setup, training: bool) -> PassWork:
    if not training:
        return PassWork(layers=1, head=1, activations=2, logits=2, host=EAGER_FORWARD)

    # Frozen weights need no gradient; with checkpointing each layer runs forward again.
    again = int(setup.recomputes)
    return PassWork(
        layers=(2 if setup.lora else 3) + again,
        head=3 if setup.lora else 4,
        activations=6 + 2 * again,
        logits=7,
        host=EAGER_TRAINING,
    )


def pass_seconds(setup: Setup, tokens: float, scored: float, passes: int, training: bool) -> float:
    """A forward (and backward) pass over `tokens` with log-probabilities of `scored` of them, in
    `passes` micro-batches."""
    s = setup.shape
    work = pass_work(setup, training)

    per_token = 2 * s.linear + 4 * s.layers * s.query * setup.lengths.row
    flops = work.layers * tokens * per_token
    flops += work.head * scored * 2 * s.embedding

    traffic = work.activations * tokens * s.layers * setup.activation_bytes
    traffic += work.logits * scored * 2 * s.vocabulary

    on_device = flops / flops_per_second(setup) + traffic / bytes_per_second(setup)
    if setup.gpu is None:
        return on_device

    host = passes * s.layers * work.host
    if setup.lora:
        host *= LAUNCHES_LORA
    if setup.config.rollout.fast and not setup.recomputes:
        host *= RECORDED

    return max(on_device, host)


def decode_seconds(setup: Setup, rows: float) -> float:
    """Sampling so many completions, prompts included."""
    rollout = setup.config.rollout
    replays = rollout.fast or rollout.vllm != "off"

    if replays:
        token = _replayed_token(setup, rows)
    else:
        token = _eager_token(setup, rows)

    prompts = rows / rollout.generations if replays else rows
    reading = pass_seconds(setup, prompts * setup.lengths.prompt, 0, 1, training=False)
    return reading + setup.lengths.longest * token


def _replayed_token(setup: Setup, rows: float) -> float:
    """Seconds of a token that is replayed as a graph."""
    s = setup.shape
    weights = (s.linear + s.embedding) * setup.compute_bytes
    seconds = _device_token(setup, rows, weights, cache=_average_cache(setup, rows))
    if setup.gpu is None:
        return seconds

    is_fused = not (s.head_norms or setup.config.rollout.vllm != "off")
    return seconds + s.layers * (FUSED_TOKEN if is_fused else GRAPH_TOKEN)


def _eager_token(setup: Setup, rows: float) -> float:
    """Seconds of a token of Transformers' `generate`."""
    s = setup.shape
    weights = (s.linear + s.embedding) * setup.weight_bytes
    if setup.mixed:
        weights *= 2  # cast for each token

    # `generate` copies the cache for each token and repeats it for each group of heads.
    repeats = s.heads / s.kv_heads
    copies = 3 + 2 * repeats if repeats > 1 else 3
    seconds = _device_token(setup, rows, weights, cache=copies * _average_cache(setup, rows))
    if setup.gpu is None:
        return seconds

    host = EAGER_TOKEN
    if s.head_norms:
        host += EAGER_TOKEN_HEAD_NORMS
    if setup.lora:
        host += EAGER_TOKEN_LORA

    return max(seconds, s.layers * host)


def _average_cache(setup: Setup, rows: float) -> float:
    """Bytes of keys and values in the middle of decoding."""
    return setup.cache_bytes(rows, setup.lengths.prompt + setup.lengths.longest / 2)


def _device_token(setup: Setup, rows: float, weights: float, cache: float) -> float:
    """Seconds of traffic and products for one token of each row."""
    s = setup.shape
    logits = rows * s.vocabulary * 4 * 8
    flops = rows * 2 * (s.linear + s.embedding)

    traffic = weights + cache + logits
    return traffic / bytes_per_second(setup) + flops / flops_per_second(setup)


def optimizer_seconds(setup: Setup) -> float:
    optim = setup.config.optim

    # Weight, gradient and state are read and written.
    seconds = setup.trained * (2 * setup.trained_bytes + 20) / bytes_per_second(setup)
    if optim.name == "adamw":
        return seconds

    # Five steps on m x n: the Gram matrix, its square, and the product with X.
    flops = 0
    for pair in setup.trained_matrices:
        m, n = sorted(pair)
        flops += 5 * m * m * (4 * n + 2 * m)

    flops *= setup.shape.layers
    is_fused = optim.fused and setup.gpu in ("h100", "h200")
    seconds += flops / flops_per_second(setup) * (0.7 if is_fused else 1.5)

    if setup.gpu is not None and not is_fused:
        seconds += setup.shape.layers * len(setup.trained_matrices) * OPTIMIZER_LAUNCH

    return seconds
