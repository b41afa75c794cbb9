"""GiB of one step: what is held throughout, and the largest of what the phases add."""

from mesotron.config import SftConfig, TrainConfig
from mesotron.models.speed import RECORD_BELOW
from mesotron.rlvr import objectives
from mesotron.rlvr.plan.setup import Setup
from mesotron.rlvr.plan.shapes import GIB, find_shape

CONTEXT = 0.6  # GiB of the CUDA context and kernels, outside torch's allocator
# Of torch's allocator: a step ran out of 140 GiB with 112 allocated (benchmarks/plan).
FRAGMENTS = 1.25
VLLM_SHARE = 0.3  # of the GPU, TRL's default

HEAD_TILE = 4096 * 32768 * 6  # bytes of logits that are live at once
WORKSPACE = 0.25 * GIB  # of cuBLAS and of batches
QUANTIZED_BYTES = {"4bit": 0.52, "8bit": 1.01}  # of a rounded weight with its scales
MATRIX_STEP = 3.2 * GIB  # of a matrix optimizer's buckets at most


def memory_parts(setup: Setup) -> dict[str, float]:
    """GiB by part."""
    phases = {
        "generation": generation_bytes(setup),
        "activations and gradients": gradient_bytes(setup) + training_bytes(setup),
        "optimizer step": gradient_bytes(setup) + optimizer_step_bytes(setup),
    }
    largest = max(phases, key=lambda name: phases[name])

    parts = held_bytes(setup) | {largest: phases[largest] + WORKSPACE}
    return {name: size / GIB for name, size in parts.items() if size}


# Held throughout


def held_bytes(setup: Setup) -> dict[str, float]:
    config = setup.config
    s = setup.shape
    weights = weights_bytes(setup)
    copies = 4 * setup.trained  # a copy of what trains, in float32

    # LoRA turns its adapters off instead of a reference; an anchor that labels alone is one.
    objective = objectives.get(setup.objective.name)
    is_own_reference = setup.lora or objective.anchor_labels
    refers = bool(setup.objective.beta) and not is_own_reference

    return {
        "weights": weights + copies * setup.lora,
        "casts": s.parameters * setup.compute_bytes * setup.mixed,
        "optimizer": optimizer_state_bytes(setup),
        "reference": weights * refers,
        "anchor": copies * objective.is_anchored,
        "average": copies * bool(config.average),
        "fast rollout": fast_rollout_bytes(setup) * bool(config.rollout.fast),
        "vllm": VLLM_SHARE * setup.device.memory * GIB * (config.rollout.vllm == "colocate"),
    }


def weights_bytes(setup: Setup) -> float:
    """The loaded model; rounding leaves the embeddings as they are."""
    s = setup.shape
    linear_bytes = QUANTIZED_BYTES.get(setup.config.model.load, setup.weight_bytes)
    return s.linear * linear_bytes + (s.parameters - s.linear) * setup.weight_bytes


def optimizer_state_bytes(setup: Setup) -> float:
    """Two float32 states per weight in AdamW, one per weight of a matrix elsewhere."""
    if setup.config.optim.name == "adamw":
        return 8 * setup.trained

    return 8 * setup.trained - 4 * matrix_weights(setup)


def matrix_weights(setup: Setup) -> int:
    if setup.lora:
        return setup.trained

    return setup.shape.linear


def fast_rollout_bytes(setup: Setup) -> float:
    """Held between the phases: merged weights, a static cache, and a recorded pass's gradients."""
    s = setup.shape
    held = (s.linear + 2 * s.embedding) * setup.compute_bytes
    held += setup.cache_bytes(setup.rows.sampled, setup.lengths.row)

    if s.parameters < RECORD_BELOW and not setup.recomputes:
        held += gradient_bytes(setup)

    return held


# Added by a phase


def generation_bytes(setup: Setup) -> float:
    s = setup.shape
    rows = setup.rows.sampled
    lengths = setup.lengths

    cache = setup.cache_bytes(rows, lengths.row * (1 + 1 / s.layers))
    logits = s.vocabulary * 16
    reading = lengths.prompt * setup.compute_bytes * (6 * s.hidden + 3 * s.intermediate)
    return cache + rows * (logits + reading)


def gradient_bytes(setup: Setup) -> float:
    return setup.trained * setup.trained_bytes


def training_bytes(setup: Setup) -> float:
    """Activations of a micro-batch, and its logits."""
    s = setup.shape
    lengths = setup.lengths
    micro = setup.rows.micro
    b = setup.compute_bytes
    width = lengths.row

    if setup.recomputes:
        saved = micro * width * (s.layers * b * s.hidden + setup.activation_bytes)
    else:
        saved = micro * width * s.layers * setup.activation_bytes

    mask = micro * width**2 * b
    tile = min(1, micro * lengths.completion / 4096) * min(1, s.vocabulary / 32768)
    head = HEAD_TILE * tile
    if not setup.lora:
        head += 4 * s.embedding  # the head's gradient is summed in float32

    return saved + mask + head


def optimizer_step_bytes(setup: Setup) -> float:
    if setup.config.optim.name == "adamw":
        return 0

    return min(MATRIX_STEP, 12 * matrix_weights(setup))


# The least, before anything is known but the model


def least_memory(config: TrainConfig | SftConfig, has_gpu: bool) -> float:
    """GiB of weights, gradients and momentum alone; 0 for a model of unknown shape."""
    model = config.model
    shape = find_shape(model.name)
    if shape is None:
        return 0.0

    is_half = has_gpu and (model.lora or model.dtype in ("auto", "bfloat16"))
    width = QUANTIZED_BYTES.get(model.load, 2 if is_half else 4)
    copies = 1 if model.lora else 3
    return shape.parameters * width * copies / GIB
