"""One config on one device: the numbers that the time and the memory of a step depend on."""

from dataclasses import dataclass
from typing import NamedTuple

from mesotron.config import GPUS, GpuModel, GpuName, ObjectiveConfig, TrainConfig
from mesotron.models.precision import choose_precision
from mesotron.models.speed import choose_speed
from mesotron.rlvr.objectives import get, resolve
from mesotron.rlvr.plan.shapes import Shape
from mesotron.rlvr.trl_arguments import first_round_prompts, trl_arguments
from mesotron.runs.process import num_processes

CPU_CORE = GpuModel(0, 0.05, 12, 1e9)  # its memory is not judged


class Lengths(NamedTuple):
    """Tokens of a typical prompt and completion, and of the longest completion of a batch."""

    prompt: float
    completion: float
    longest: float

    @property
    def row(self) -> float:
        """Tokens of a row of a padded batch."""
        return self.prompt + self.longest


@dataclass(frozen=True)
class StepRows:
    """How many completions one process handles."""

    sampled: float  # in a rollout
    prompts: float  # whose completions train in an update; the fast path reads each once
    trained: int  # in an update
    micro: int  # in a forward pass
    passes: int  # micro-batches of an update


@dataclass(frozen=True)
class Setup:
    config: TrainConfig  # with precision and speed resolved
    objective: ObjectiveConfig
    shape: Shape
    gpu: GpuName | None  # None is one core of a CPU
    device: GpuModel
    lengths: Lengths
    rows: StepRows
    trained_matrices: list[tuple[int, int]]  # of one layer
    trained: int  # weights that train
    trained_bytes: int  # of one of them
    weight_bytes: int  # of a loaded weight
    compute_bytes: int  # of a number in products and activations

    @property
    def lora(self) -> bool:
        return bool(self.config.model.lora)

    @property
    def recomputes(self) -> bool:
        return self.config.model.gradient_checkpointing

    @property
    def in_float32(self) -> bool:
        """Whether the products are of float32 numbers."""
        return self.compute_bytes == 4

    @property
    def mixed(self) -> bool:
        """Whether float32 weights are cast for bfloat16 products."""
        return self.config.model.dtype == "mixed" and not self.in_float32

    @property
    def activation_bytes(self) -> float:
        """Saved for the backward pass by one layer for one token."""
        s = self.shape
        b = self.compute_bytes

        norms = 2 * (4 + 2 * b) * s.hidden
        attention = (5 if s.heads != s.kv_heads else 4) * b * s.query
        if s.head_norms:
            attention += (4 + b) * (s.query + s.key_value)

        return norms + attention + 4 * b * s.intermediate

    def cache_bytes(self, rows: float, tokens: float) -> float:
        """Keys and values of so many rows."""
        s = self.shape
        return 2 * s.key_value * s.layers * self.compute_bytes * rows * tokens


def make_setup(config: TrainConfig, shape: Shape, gpu: GpuName | None, lengths: Lengths) -> Setup:
    device = CPU_CORE if gpu is None else GPUS[gpu]
    config = choose_precision(config, device.bf16 > 0)
    config = choose_speed(config, gpu is not None, shape.parameters)

    dtype = config.model.dtype
    in_float32 = dtype == "float32" or not device.bf16
    weight_bytes = 4 if in_float32 or dtype == "mixed" else 2

    rank = config.model.lora
    if rank:
        matrices = adapter_matrices(shape, rank)
        trained = shape.layers * sum(m * n for m, n in matrices)
        trained_bytes = 4  # PEFT keeps adapters in float32
    else:
        matrices = shape.matrices
        trained = shape.parameters
        trained_bytes = weight_bytes

    return Setup(
        config=config,
        objective=resolve(config.objective, config.rollout.generations),
        shape=shape,
        gpu=gpu,
        device=device,
        lengths=lengths,
        rows=count_rows(config),
        trained_matrices=matrices,
        trained=trained,
        trained_bytes=trained_bytes,
        weight_bytes=weight_bytes,
        compute_bytes=4 if in_float32 else 2,
    )


def adapter_matrices(shape: Shape, rank: int) -> list[tuple[int, int]]:
    """A and B of the linear layers of one layer."""
    matrices = []
    for m, n in shape.matrices:
        matrices += [(rank, n), (m, rank)]

    return matrices


def count_rows(config: TrainConfig) -> StepRows:
    rollout = config.rollout
    world = num_processes()
    sizes = trl_arguments(config.objective, rollout, config.optim, world)
    micro = sizes["per_device_train_batch_size"]
    passes = sizes["gradient_accumulation_steps"]
    trained = micro * passes

    first_round = first_round_prompts(config.objective, rollout, world) / world
    generations = rollout.generations + generations_beside(config)

    return StepRows(
        sampled=first_round * generations,
        prompts=trained / (rollout.generations if rollout.fast else 1),
        trained=trained,
        micro=micro,
        passes=passes,
    )


def generations_beside(config: TrainConfig) -> int:
    """Completions per prompt that an anchor samples beside the policy's, if it labels alone."""
    objective = resolve(config.objective, config.rollout.generations)
    if not get(objective.name).anchor_labels:
        return 0

    return objective.momentum_generations or 0
