"""Seconds and memory of a training step before it runs: plain arithmetic on a model's shape and a
GPU's published peak numbers, with constants that `benchmarks/plan` checks (`estimate.toml`).

Decoding is bound by memory traffic (weights and keys and values for each token) or by the host's
launches, training passes by products and by the traffic of activations. Torch is not imported.
"""

import os
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from mesotron.config import GpuName, TrainConfig
from mesotron.models.names import TINY_WEIGHTS
from mesotron.models.precision import choose_precision
from mesotron.models.speed import RECORD_BELOW, choose_speed
from mesotron.rlvr.objectives import ANCHORED, first_round_prompts, resolve, trl_arguments
from mesotron.runs.files import read_json
from mesotron.runs.process import num_processes

GIB = 2**30
TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


class Device(NamedTuple):
    bf16: float  # TFLOP/s
    fp32: float
    bandwidth: float  # GB/s
    memory: float  # GiB


DEVICES: dict[GpuName, Device] = {name: Device(*row) for name, row in TABLES["devices"].items()}
CPU = Device(0, 0.05, 12, 1e9)  # one core; its memory is not judged


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
    def matrices(self) -> list[tuple[int, int]]:
        """Outputs and inputs of the linear layers of one layer."""
        h = self.hidden
        q = self.query
        kv = self.key_value
        f = self.intermediate

        return [(q, h), (kv, h), (kv, h), (h, q), (f, h), (f, h), (h, f)]

    query = property(lambda self: self.heads * self.head_dim)
    key_value = property(lambda self: self.kv_heads * self.head_dim)
    linear = property(lambda self: self.layers * sum(m * n for m, n in self.matrices))
    embedding = property(lambda self: self.vocabulary * self.hidden)
    parameters = property(lambda self: self.linear + self.embedding * (1 if self.tied else 2))


SHAPES = {name: Shape(*row) for name, row in TABLES["shapes"].items()}
DATASETS: dict[str, tuple[int, int]] = TABLES["datasets"]  # rows, tokens of a typical question

FIT = SimpleNamespace(**TABLES["fit"])
HEAD_TILE = 4096 * 32768 * 6  # bytes of logits that are live at once
WORKSPACE = 0.25 * GIB  # of cuBLAS and of batches
QUANTIZED_BYTES = {"4bit": 0.52, "8bit": 1.01}  # of a rounded weight with its scales


def find_shape(name: str) -> Shape | None:
    """The shape of a model by its folder, its name, or the hub's cache; None if unknown."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    folders = [TINY_WEIGHTS if name == "tiny" else Path(name).expanduser()]
    folders += (cache / f"models--{name.replace('/', '--')}" / "snapshots").glob("*")

    file = next((one / "config.json" for one in folders if (one / "config.json").is_file()), None)
    if file is None:
        plain = re.sub(r"-(math|coder|it|pt)\b", "", name.lower().replace("_", "-"))
        plain = "smollm2-135m" if plain == "smollm2" else plain
        return next((shape for key, shape in SHAPES.items() if f"{key}-" in f"{plain}-"), None)

    config = read_json(file)
    text = config.get("text_config") or config
    try:
        hidden = text["hidden_size"]
        heads = text["num_attention_heads"]
        kind = text.get("model_type", "")

        return Shape(
            text["num_hidden_layers"],
            hidden,
            text["intermediate_size"],
            heads,
            text.get("num_key_value_heads") or heads,
            text.get("head_dim") or hidden // heads,
            text["vocab_size"],
            bool(text.get("tie_word_embeddings", True)),
            "qwen3" in kind or "gemma3" in kind,
        )
    except (KeyError, TypeError, ZeroDivisionError):
        return None  # another architecture


def find_device(name: str) -> GpuName | None:
    words = re.split(r"[^a-z0-9]+", name.lower())
    return next((key for key in DEVICES if key in words), None)


class Lengths(NamedTuple):
    """Tokens of a typical prompt and completion, and of the longest completion of a batch."""

    prompt: float
    completion: float
    longest: float


class Prediction(NamedTuple):
    seconds: dict[str, float]  # of an optimizer step, by phase
    memory: dict[str, float]  # GiB held throughout, and the largest of what phases add
    capacity: float  # GiB

    step = property(lambda self: sum(self.seconds.values()))
    allocated = property(lambda self: sum(self.memory.values()))  # GiB of tensors at the peak
    needed = property(lambda self: self.allocated * FIT.fragments + FIT.context)
    fits = property(lambda self: self.needed <= self.capacity)


def predict(config: TrainConfig, shape: Shape, gpu: GpuName | None, lengths: Lengths) -> Prediction:
    """Estimate one optimizer step of a config; `gpu` None is one core of a CPU."""
    device = CPU if gpu is None else DEVICES[gpu]
    config = choose_precision(config, device.bf16 > 0)
    config = choose_speed(config, gpu is not None, shape.parameters)
    model = _Model(config, shape, gpu, lengths)
    rollout = config.rollout
    objective = model.objective
    world = num_processes()
    sizes = trl_arguments(config.objective, rollout, config.optim, world)
    micro = sizes["per_device_train_batch_size"]
    accumulated = sizes["gradient_accumulation_steps"]
    trained = micro * accumulated  # rows of one update
    first = first_round_prompts(config.objective, rollout, world) / world
    beside = objective.momentum_generations or 0 if objective.name == "corewarding" else 0
    rows = first * (rollout.generations + beside)
    prompts = trained / (rollout.generations if rollout.fast else 1)  # fast shares them
    tokens = prompts * lengths.prompt + trained * lengths.longest
    scored = trained * lengths.completion

    # Log-probabilities of the policy that sampled, and of the reference.
    extra = (rollout.updates > 1 or rollout.vllm != "off") + bool(objective.beta)
    seconds = {
        "generate": model.decode_seconds(rows) / rollout.updates,
        "score": rows * FIT.seconds_per_row / rollout.updates
        + extra * model.pass_seconds(tokens, scored, accumulated, training=False),
        "train": model.pass_seconds(tokens, scored, accumulated, training=True),
        "optimizer": model.optimizer_seconds(),
    }

    seconds["other"] = FIT.seconds_per_step + FIT.rest * sum(seconds.values())
    return Prediction(seconds, model.memory(rows, micro), device.memory)


class _Model:
    """The numbers of one config on one device that several phases need."""

    def __init__(
        self, config: TrainConfig, shape: Shape, gpu: GpuName | None, lengths: Lengths
    ) -> None:
        self.config = config
        self.shape = shape
        self.gpu = gpu
        self.lengths = lengths
        self.device = CPU if gpu is None else DEVICES[gpu]
        self.objective = resolve(config.objective, config.rollout.generations)
        dtype = config.model.dtype
        self.lora = config.model.lora
        wide = dtype == "float32" or not self.device.bf16  # float32 products
        self.mixed = dtype == "mixed" and not wide
        self.weight_bytes = 4 if wide or self.mixed else 2
        self.compute_bytes = 4 if wide else 2
        self.flops = 1e12 * (self.device.fp32 * 0.8 if wide else self.device.bf16 * FIT.matmul)
        self.bytes = 1e9 * self.device.bandwidth * FIT.traffic
        r = self.lora

        self.trained_matrices = (
            shape.matrices
            if not r
            else [pair for m, n in shape.matrices for pair in ((r, n), (m, r))]
        )

        adapters = shape.layers * sum(m * n for m, n in self.trained_matrices)
        self.trained = adapters if r else shape.parameters
        self.trained_bytes = 4 if r else self.weight_bytes  # PEFT keeps adapters in float32

    @property
    def activation_bytes(self) -> float:
        """Saved for the backward pass by one layer for one token."""
        s = self.shape
        b = self.compute_bytes
        norms = 2 * (4 + 2 * b) * s.hidden
        attention = (5 if s.heads != s.kv_heads else 4) * b * s.query
        attention += (4 + b) * (s.query + s.key_value) * s.head_norms

        return norms + attention + 4 * b * s.intermediate

    def pass_seconds(self, tokens: float, scored: float, passes: int, training: bool) -> float:
        """A forward (and backward) pass over `tokens` with log-probabilities of `scored` of them,
        in `passes` micro-batches."""
        s = self.shape
        again = self.config.model.gradient_checkpointing
        through = (2 if self.lora else 3) + again if training else 1
        head = (3 if self.lora else 4) if training else 1
        context = self.lengths.prompt + self.lengths.longest
        flops = through * tokens * (2 * s.linear + 4 * s.layers * s.query * context)
        flops += head * scored * 2 * s.embedding
        traffic = (6 + 2 * again if training else 2) * tokens * s.layers * self.activation_bytes
        traffic += (7 if training else 2) * scored * 2 * s.vocabulary
        launches = (
            passes * s.layers * (FIT.launches_lora if self.lora else 1) * (self.gpu is not None)
        )

        host = launches * (FIT.eager_training if training else FIT.eager_forward)
        if self.config.rollout.fast and not again:
            host *= 0.25  # recorded passes

        return max(flops / self.flops + traffic / self.bytes, host)

    def decode_seconds(self, rows: float) -> float:
        """Sampling `rows` completions, prompts included."""
        s = self.shape
        rollout = self.config.rollout
        lengths = self.lengths
        graph = rollout.fast or rollout.vllm != "off"
        cache = self.cache_bytes(rows, lengths.prompt + lengths.longest / 2)

        # `generate` copies the cache for each token and repeats it for each group of heads.
        repeats = s.heads / s.kv_heads
        cache *= 1 if graph else 3 + (2 * repeats if repeats > 1 else 0)
        weights = (s.linear + s.embedding) * (self.compute_bytes if graph else self.weight_bytes)
        weights *= 2 if self.mixed and not graph else 1  # cast for each token
        token = (weights + cache + rows * s.vocabulary * 4 * 8) / self.bytes
        token += rows * 2 * (s.linear + s.embedding) / self.flops

        host = FIT.eager_token + FIT.head_norms * s.head_norms + FIT.eager_lora * bool(self.lora)
        if self.gpu is not None and graph:
            fused = not (s.head_norms or rollout.vllm != "off")
            token += s.layers * (FIT.fused_token if fused else FIT.graph_token)
        elif self.gpu is not None:
            token = max(token, s.layers * host)

        prompts = rows / rollout.generations if graph else rows
        return self.pass_seconds(prompts * lengths.prompt, 0, 1, False) + lengths.longest * token

    def optimizer_seconds(self) -> float:
        s = self.shape
        optim = self.config.optim

        # Weight, gradient and state are read and written.
        seconds = self.trained * (2 * self.trained_bytes + 20) / self.bytes
        if optim.name == "adamw":
            return seconds

        # Five steps on m x n: the Gram matrix, its square, and the product with X.
        sides = [sorted(pair) for pair in self.trained_matrices]
        flops = s.layers * sum(5 * m * m * (4 * n + 2 * m) for m, n in sides)
        fused = optim.fused and self.gpu in ("h100", "h200")
        seconds += flops / self.flops * (0.7 if fused else 1.5)
        launches = 0 if fused or self.gpu is None else s.layers * len(sides)

        return seconds + launches * FIT.optimizer_launch

    def cache_bytes(self, rows: float, tokens: float) -> float:
        s = self.shape
        return 2 * s.key_value * s.layers * self.compute_bytes * rows * tokens

    def memory(self, rows: float, micro: int) -> dict[str, float]:
        s = self.shape
        config = self.config
        lengths = self.lengths
        b = self.compute_bytes
        width = lengths.prompt + lengths.longest

        saved = micro * width * s.layers * self.activation_bytes
        if config.model.gradient_checkpointing:
            saved = micro * width * (s.layers * b * s.hidden + self.activation_bytes)

        saved += micro * width**2 * b  # the mask
        tile = min(1, micro * lengths.completion / 4096) * min(1, s.vocabulary / 32768)

        # The head's gradient is summed in float32.
        head = HEAD_TILE * tile + (0 if self.lora else 4 * s.embedding)
        gradients = self.trained * self.trained_bytes
        matrices = self.trained if self.lora else s.linear
        adamw = config.optim.name == "adamw"

        phases = {
            "generation": self.cache_bytes(rows, width * (1 + 1 / s.layers))
            + rows * (s.vocabulary * 16 + lengths.prompt * b * (6 * s.hidden + 3 * s.intermediate)),
            "activations and gradients": saved + head + gradients,
            "optimizer step": gradients + (0 if adamw else min(3.2 * GIB, 12 * matrices)),
        }

        largest = max(phases, key=lambda name: phases[name])
        rounded = QUANTIZED_BYTES.get(config.model.load, self.weight_bytes)
        weights = s.linear * rounded + (s.parameters - s.linear) * self.weight_bytes

        # LoRA turns its adapters off instead; corewarding refers to its anchor.
        refers = self.objective.beta and not self.lora and self.objective.name != "corewarding"
        colocated = config.rollout.vllm == "colocate"

        # Held between the phases: merged weights, a static cache, and a recorded pass's gradients.
        sampler = (s.linear + 2 * s.embedding) * b + self.cache_bytes(rows, width)
        records = s.parameters < RECORD_BELOW and not config.model.gradient_checkpointing
        sampler += gradients * records

        parts = {
            "weights": weights + self.trained * 4 * bool(self.lora),
            "casts": s.parameters * b * self.mixed,
            "optimizer": 8 * self.trained - (0 if adamw else 4 * matrices),
            "reference": weights * bool(refers),
            "anchor": 4 * self.trained * (self.objective.name in ANCHORED),
            "average": 4 * self.trained * bool(config.average),
            "fast rollout": sampler * bool(config.rollout.fast),
            "vllm": FIT.vllm_share * self.device.memory * GIB * colocated,
            largest: phases[largest] + WORKSPACE,
        }
        return {name: size / GIB for name, size in parts.items() if size}
