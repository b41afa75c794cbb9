"""Seconds and memory of a training step before it runs: plain arithmetic on a model's shape and a
GPU's published peak numbers, with a few constants that `benchmarks/plan` measures.

Decoding is bound by memory traffic (weights and keys and values for each token) or by the host's
launches, training passes by products and by the traffic of activations. Torch is not imported.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mesotron.config import GpuName, TrainConfig
from mesotron.rlvr.models import TINY_WEIGHTS
from mesotron.rlvr.objectives import ANCHORED, first_round_prompts, resolve, trl_arguments
from mesotron.runs.process import num_processes

GIB = 2**30


class Device(NamedTuple):
    """Peak numbers of a GPU: dense TFLOP/s, GB/s, usable GiB."""

    bf16: float  # 0 without bfloat16
    fp32: float
    bandwidth: float
    memory: float
    pattern: str  # in the name that the driver gives


# From the vendors' data sheets, without sparsity.
DEVICES: dict[GpuName, Device] = {
    "b200": Device(2250, 80, 8000, 178, r"B200"),
    "h200": Device(989, 67, 4800, 139, r"H200"),
    "h100": Device(989, 67, 3350, 79, r"H100"),
    "a100": Device(312, 19.5, 2039, 79, r"A100"),
    "l40s": Device(362, 91, 864, 44, r"L40S"),
    "a6000": Device(155, 38, 768, 47, r"A6000"),
    "a10": Device(125, 31, 600, 22, r"A10\b"),
    "a10g": Device(70, 31, 600, 22, r"A10G"),
    "l4": Device(121, 30, 300, 22, r"L4\b"),
    "t4": Device(0, 8.1, 320, 14.5, r"T4\b"),
    "4090": Device(165, 82, 1008, 23.5, r"4090"),
}
# One core; its memory is not judged.
CPU = Device(0, 0.05, 12, 1e9, "")


class Shape(NamedTuple):
    """A decoder-only transformer with a gated MLP."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = True
    head_norms: bool = False  # RMSNorm on queries and keys

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Outputs and inputs of the linear layers of one layer."""
        h, q, kv, f = self.hidden, self.query, self.key_value, self.intermediate
        return [(q, h), (kv, h), (kv, h), (h, q), (f, h), (f, h), (h, f)]

    @property
    def linear(self) -> int:
        return self.layers * sum(m * n for m, n in self.matrices)

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        return self.linear + self.embedding * (1 if self.tied else 2)


# Published configs, by the part of the model's name that they share.
SHAPES = {
    "smollm2-135m": Shape(30, 576, 1536, 9, 3, 64, 49152),
    "smollm2-360m": Shape(32, 960, 2560, 15, 5, 64, 49152),
    "smollm2-1.7b": Shape(24, 2048, 8192, 32, 32, 64, 49152),
    "qwen2.5-0.5b": Shape(24, 896, 4864, 14, 2, 64, 151936),
    "qwen2.5-1.5b": Shape(28, 1536, 8960, 12, 2, 128, 151936),
    "qwen2.5-3b": Shape(36, 2048, 11008, 16, 2, 128, 151936),
    "qwen2.5-7b": Shape(28, 3584, 18944, 28, 4, 128, 152064, tied=False),
    "qwen2.5-14b": Shape(48, 5120, 13824, 40, 8, 128, 152064, tied=False),
    "qwen3-0.6b": Shape(28, 1024, 3072, 16, 8, 128, 151936, head_norms=True),
    "qwen3-1.7b": Shape(28, 2048, 6144, 16, 8, 128, 151936, head_norms=True),
    "qwen3-4b": Shape(36, 2560, 9728, 32, 8, 128, 151936, head_norms=True),
    "qwen3-8b": Shape(36, 4096, 12288, 32, 8, 128, 151936, tied=False, head_norms=True),
    "qwen3-14b": Shape(40, 5120, 17408, 40, 8, 128, 151936, tied=False, head_norms=True),
    "llama-3.2-1b": Shape(16, 2048, 8192, 32, 8, 64, 128256),
    "llama-3.2-3b": Shape(28, 3072, 8192, 24, 8, 128, 128256),
    "llama-3.1-8b": Shape(32, 4096, 14336, 32, 8, 128, 128256, tied=False),
    "gemma-2-2b": Shape(26, 2304, 9216, 8, 4, 256, 256000),
    "gemma-3-270m": Shape(18, 640, 2048, 4, 1, 256, 262144, head_norms=True),
    "gemma-3-1b": Shape(26, 1152, 6912, 4, 1, 256, 262144, head_norms=True),
    "gemma-3-4b": Shape(34, 2560, 10240, 8, 4, 256, 262208, head_norms=True),
}

# Measured on an H200 by benchmarks/plan.
MATMUL = 0.60  # share of the peak that large products reach
TRAFFIC = 0.75  # share of the peak bandwidth that elementwise kernels reach
EAGER_TOKEN = 0.90e-3  # seconds of host per layer and decoded token of `generate`
EAGER_LORA = 0.75e-3  # the same for the adapters of a layer
HEAD_NORMS = 0.15e-3  # the same for norms of queries and keys
GRAPH_TOKEN = 0.20e-3  # seconds of GPU per layer and token replayed as a graph, beside traffic
FUSED_TOKEN = 0.09e-3  # the same with the fused decoder
EAGER_FORWARD = 0.45e-3  # seconds of host per layer of a forward pass
EAGER_TRAINING = 1.4e-3  # the same of a forward and backward pass
LAUNCHES_LORA = 2.0  # how many times as many launches a pass has with adapters
OPTIMIZER_LAUNCH = 0.08e-3  # seconds of host per matrix without our kernels
SECONDS_PER_ROW = 0.4e-3  # tokenizing, scoring and collecting one completion
SECONDS_PER_STEP = 0.05  # logs, callbacks and the trainer's loop
HEAD_TILE = 4096 * 32768 * 6  # bytes of logits that are live at once
WORKSPACE = 0.25 * GIB  # of cuBLAS and of batches
CONTEXT = 0.6  # GiB of the CUDA context and kernels, outside torch's allocator
FRAGMENTS = 1.08  # reserved for each byte allocated
VLLM_SHARE = 0.3  # of the GPU, TRL's default


def find_shape(name: str) -> Shape | None:
    """The shape of a model by its folder, its name, or the hub's cache; None if unknown."""
    path = Path(name).expanduser()
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HF_HOME", "~/.cache/huggingface")
    cached = Path(cache).expanduser() / ("hub" if "HF_HUB_CACHE" not in os.environ else "")
    files = [TINY_WEIGHTS if name == "tiny" else path]
    files += (cached / f"models--{name.replace('/', '--')}" / "snapshots").glob("*")
    for folder in files:
        if (folder / "config.json").is_file():
            return _shape_of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    plain = re.sub(r"-(math|coder|it|pt)\b", "", name.lower().replace("_", "-"))
    plain = "smollm2-135m" if plain == "smollm2" else plain
    return next((shape for key, shape in SHAPES.items() if f"{key}-" in f"{plain}-"), None)


def _shape_of(config: Mapping[str, Any]) -> Shape | None:
    text = config.get("text_config") or config
    try:
        hidden, heads = text["hidden_size"], text["num_attention_heads"]
        return Shape(
            text["num_hidden_layers"], hidden, text["intermediate_size"], heads,
            text.get("num_key_value_heads") or heads, text.get("head_dim") or hidden // heads,
            text["vocab_size"], bool(text.get("tie_word_embeddings", True)),
            "qwen3" in text.get("model_type", "") or "gemma3" in text.get("model_type", ""),
        )  # fmt: skip
    except KeyError:
        return None  # another architecture


def find_device(name: str) -> GpuName | None:
    """The GPU behind the name that its driver gives."""
    return next((key for key, one in DEVICES.items() if re.search(one.pattern, name)), None)


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of a typical prompt and completion, and of the longest completion of a batch."""

    prompt: float
    completion: float
    longest: float


@dataclass(frozen=True)
class Prediction:
    seconds: dict[str, float]  # of an optimizer step, by phase
    memory: dict[str, float]  # GiB held throughout, and the largest of what phases add
    capacity: float  # GiB

    @property
    def step(self) -> float:
        return sum(self.seconds.values())

    @property
    def allocated(self) -> float:
        """GiB of tensors at the peak."""
        return sum(self.memory.values())

    @property
    def needed(self) -> float:
        return self.allocated * FRAGMENTS + CONTEXT

    @property
    def fits(self) -> bool:
        return self.needed <= self.capacity


class _Model:
    """The numbers of one config on one device, as far as several phases need them."""

    def __init__(self, config: TrainConfig, shape: Shape, device: Device) -> None:
        self.config, self.shape, self.device = config, shape, device
        dtype = config.model.dtype
        self.lora = config.model.lora
        self.wide = dtype == "float32" or not device.bf16  # float32 products
        self.weight_bytes = 4 if self.wide or dtype == "mixed" else 2
        self.compute_bytes = 4 if self.wide else 2
        self.flops = 1e12 * (device.fp32 * 0.8 if self.wide else device.bf16 * MATMUL)
        self.bytes = 1e9 * device.bandwidth * TRAFFIC
        self.objective = resolve(config.objective, config.rollout.generations)
        adapters = shape.layers * sum(self.lora * (m + n) for m, n in shape.matrices)
        self.trained = adapters or shape.parameters
        # PEFT keeps adapters in float32.
        self.trained_bytes = 4 if self.lora else self.weight_bytes

    @property
    def activation_bytes(self) -> float:
        """Saved for the backward pass by one layer for one token."""
        s, b = self.shape, self.compute_bytes
        norms = 2 * (4 + 2 * b) * s.hidden
        attention = (5 if s.heads != s.kv_heads else 4) * b * s.query
        if s.head_norms:
            attention += (4 + b) * (s.query + s.key_value)
        mlp = 4 * b * s.intermediate
        if self.lora:  # each adapter keeps a cast copy of its input
            mlp += b * (5 * s.hidden + s.query + s.intermediate)
        return norms + attention + mlp

    def pass_seconds(
        self, tokens: float, scored: float, context: float, passes: int, training: bool
    ) -> float:
        """A forward (and backward) pass over `tokens` with log-probabilities of `scored` of them,
        in `passes` micro-batches."""
        s, checkpointed = self.shape, self.config.model.gradient_checkpointing
        through = (2 if self.lora else 3) + checkpointed if training else 1
        head = (3 if self.lora else 4) if training else 1
        layer_flops = 2 * s.linear + 4 * s.layers * s.query * context
        flops = through * tokens * layer_flops + head * scored * 2 * s.embedding
        moved = (6 + 2 * checkpointed) if training else 2
        traffic = moved * tokens * s.layers * self.activation_bytes
        traffic += (7 if training else 2) * scored * 2 * s.vocabulary
        per_layer = EAGER_TRAINING if training else EAGER_FORWARD
        host = passes * s.layers * per_layer * (LAUNCHES_LORA if self.lora else 1)
        if self.config.rollout.fast and not checkpointed:
            host *= 0.25  # recorded passes
        if not self.device.bf16 and not self.device.pattern:
            host = 0.0  # on a CPU there is nothing to launch
        return max(flops / self.flops + traffic / self.bytes, host)

    def decode_seconds(self, rows: float, lengths: Lengths) -> float:
        """Sampling `rows` completions, prompts included."""
        s, rollout = self.shape, self.config.rollout
        graph = rollout.fast or rollout.vllm != "off"
        context = lengths.prompt + lengths.longest / 2
        cache = 2 * s.key_value * s.layers * self.compute_bytes * rows * context
        # `generate` copies the cache for each token and repeats it for each group of heads.
        repeats = s.heads / s.kv_heads
        cache *= 1 if graph else 3 + (2 * repeats if repeats > 1 else 0)
        weights = (s.linear + s.embedding) * (self.compute_bytes if graph else self.weight_bytes)
        if self.config.model.dtype == "mixed" and not graph:
            weights *= 2  # cast for each token
        logits = rows * s.vocabulary * 4 * 8
        gpu = (weights + cache + logits) / self.bytes
        gpu += rows * 2 * (s.linear + s.embedding) / self.flops
        host = s.layers * (EAGER_TOKEN + HEAD_NORMS * s.head_norms + EAGER_LORA * bool(self.lora))
        if not self.device.pattern:
            token = gpu
        elif graph:
            fused = not (self.lora or s.head_norms) and rollout.vllm == "off"
            token = gpu + s.layers * (FUSED_TOKEN if fused else GRAPH_TOKEN)
        else:
            token = max(gpu, host)
        prompts = rows / rollout.generations if graph else rows
        prefill = self.pass_seconds(prompts * lengths.prompt, 0, lengths.prompt, 1, False)
        return prefill + lengths.longest * token

    def optimizer_seconds(self) -> float:
        s, optim = self.shape, self.config.optim
        # Weight, gradient and state are read and written.
        seconds = self.trained * (2 * self.trained_bytes + 20) / self.bytes
        if optim.name == "adamw":
            return seconds
        shapes = s.matrices if not self.lora else [
            pair for m, n in s.matrices for pair in ((self.lora, n), (m, self.lora))
        ]  # fmt: skip
        # Five steps on m x n: the Gram matrix, its square, and the product with X.
        flops = s.layers * sum(5 * min(p) ** 2 * (4 * max(p) + 2 * min(p)) for p in shapes)
        fast = optim.fused and self.device.pattern in ("H100", "H200")
        seconds += flops / self.flops * (0.7 if fast else 1.5)
        launches = 0.0 if fast or not self.device.pattern else s.layers * len(shapes)
        return seconds + launches * OPTIMIZER_LAUNCH

    def memory(self, rows: float, micro: int, lengths: Lengths) -> dict[str, float]:
        s, config = self.shape, self.config
        tokens = micro * (lengths.prompt + lengths.longest)
        layers = s.layers
        if config.model.gradient_checkpointing:
            saved = tokens * (layers * self.compute_bytes * s.hidden + self.activation_bytes)
        else:
            saved = tokens * layers * self.activation_bytes
        mask = micro * (lengths.prompt + lengths.longest) ** 2 * self.compute_bytes
        head = HEAD_TILE * min(1, micro * lengths.completion / 4096) * min(1, s.vocabulary / 32768)
        head += 0 if self.lora else 4 * s.embedding  # the head's gradient is summed in float32
        gradients = self.trained * self.trained_bytes
        state = self.trained * 8.0
        if config.optim.name != "adamw" and not self.lora:
            state = s.linear * 4 + (s.parameters - s.linear) * 8
        elif config.optim.name != "adamw":
            state = self.trained * 4
        cache = 2 * s.key_value * layers * self.compute_bytes * rows
        cache *= lengths.prompt + lengths.longest
        sampling = cache * (1 + 1 / layers) + rows * s.vocabulary * 4 * 4
        sampling += rows * lengths.prompt * (6 * s.hidden + 3 * s.intermediate) * self.compute_bytes
        if config.rollout.fast or config.model.dtype == "mixed":
            state += s.parameters * self.compute_bytes * (config.model.dtype == "mixed")
        stepping = gradients + min(3.2 * GIB, 12 * s.linear) * (config.optim.name != "adamw")
        copies = s.parameters * self.weight_bytes
        reference = bool(self.objective.beta) and not self.lora
        anchored = self.objective.name in ANCHORED
        parts = {
            "weights": copies + (self.trained * 4 if self.lora else 0),
            "optimizer": state,
            "reference": copies * (reference + anchored),
            "vllm": VLLM_SHARE * self.device.memory * GIB * (config.rollout.vllm == "colocate"),
        }
        phases = {
            "generation": sampling,
            "activations and gradients": saved + mask + head + gradients,
            "optimizer step": stepping,
        }
        largest = max(phases, key=lambda name: phases[name])
        parts = {name: size for name, size in parts.items() if size}
        parts[largest] = phases[largest] + WORKSPACE
        return {name: size / GIB for name, size in parts.items()}


def predict(config: TrainConfig, shape: Shape, gpu: GpuName | None, lengths: Lengths) -> Prediction:
    """Estimate one optimizer step of a config; `gpu` None is one core of a CPU."""
    device = CPU if gpu is None else DEVICES[gpu]
    model = _Model(config, shape, device)
    rollout, world = config.rollout, num_processes()
    sizes = trl_arguments(config.objective, rollout, config.optim, world)
    micro, accumulated = sizes["per_device_train_batch_size"], sizes["gradient_accumulation_steps"]
    trained = micro * accumulated  # rows of one update
    first = first_round_prompts(config.objective, rollout, world) / world
    beside = (model.objective.momentum_generations or 0) if model.objective.name in ANCHORED else 0
    beside = beside if model.objective.name == "corewarding" else 0
    rows = first * (rollout.generations + beside)
    scored, width = trained * lengths.completion, lengths.prompt + lengths.longest
    prompts = trained / (rollout.generations if rollout.fast else 1)
    tokens = prompts * lengths.prompt + trained * lengths.longest
    extra = (rollout.updates > 1 or rollout.vllm != "off") + bool(model.objective.beta)
    once = 1 / rollout.updates  # rollouts per update
    seconds = {
        "generate": once * model.decode_seconds(rows, lengths),
        "score": once * rows * SECONDS_PER_ROW
        + extra * model.pass_seconds(tokens, scored, width, accumulated, False),
        "train": model.pass_seconds(tokens, scored, width, accumulated, True),
        "optimizer": model.optimizer_seconds(),
        "other": SECONDS_PER_STEP,
    }
    return Prediction(seconds, model.memory(rows, micro, lengths), device.memory)
