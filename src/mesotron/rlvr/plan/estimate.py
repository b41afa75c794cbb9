"""Seconds and memory of a training step before it runs.

`predict` is plain arithmetic on a model's shape and a GPU's published peak numbers;
`benchmarks/plan` checks its constants. Earlier runs on the same machine correct it. Torch is not
imported.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, mean, median
from typing import Any, NamedTuple

from mesotron.config import GpuName, PlanConfig, TrainConfig, find_gpu
from mesotron.config.base import from_plain
from mesotron.rlvr.plan.memory import CONTEXT, FRAGMENTS, memory_parts
from mesotron.rlvr.plan.problems import lengths_of, solution_tokens, typical_question
from mesotron.rlvr.plan.seconds import phase_seconds, supervised_seconds
from mesotron.rlvr.plan.setup import Lengths, make_setup
from mesotron.rlvr.plan.shapes import Shape, find_shape
from mesotron.runs.doctor import list_gpus
from mesotron.runs.files import Row, read_json, read_rows

LENGTH = "completions/mean_length"
RUNS_READ = 12  # newest runs that may calibrate an estimate
WARM_UP = 2  # steps of a run that are not counted
LEAST_STEPS = 4


class Prediction(NamedTuple):
    seconds: dict[str, float]  # of an optimizer step, by phase
    supervised: float  # seconds of a step of the supervised start; 0 without one
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


def predict(config: TrainConfig, shape: Shape, gpu: GpuName | None, lengths: Lengths) -> Prediction:
    """Estimate one optimizer step of a config; `gpu` None is one core of a CPU."""
    setup = make_setup(config, shape, gpu, lengths)
    supervised = 0.0
    if config.sft.steps:
        supervised = supervised_seconds(setup, solution_tokens(config))

    return Prediction(
        seconds=phase_seconds(setup),
        supervised=supervised,
        memory=memory_parts(setup),
        capacity=setup.device.memory,
    )


# What is known about a step on this machine


@dataclass(frozen=True)
class StepEstimate:
    """The prediction for a config, and by how much earlier runs correct it."""

    config: PlanConfig
    question_tokens: float
    gpu: GpuName | None
    shape: Shape | None
    prediction: Prediction | None = None  # None if the model's shape or the GPU is unknown
    problem: str = ""  # which of the two
    factor: float = 1.0  # how many times as long as predicted earlier runs took
    runs: tuple[str, ...] = ()  # those runs

    def predict(self, config: PlanConfig, gpu: GpuName | None) -> Prediction:
        """The prediction for a changed config, or for another GPU."""
        assert self.shape is not None
        lengths = lengths_of(config, self.question_tokens, config.completion_tokens)
        return predict(config, self.shape, gpu, lengths)


def estimate_step(
    config: PlanConfig, question_tokens: float, root: Path = Path("runs")
) -> StepEstimate:
    shape = find_shape(config.model.name)
    gpu = config.gpu
    problem = ""

    if gpu is None and config.device != "cpu":
        gpu, problem = find_own_gpu()

    if shape is None:
        problem = f"the shape of {config.model.name} is unknown: give its folder"

    if shape is None or problem:
        return StepEstimate(config, question_tokens, gpu, shape, problem=problem)

    lengths = lengths_of(config, question_tokens, config.completion_tokens)
    factor, runs = calibration(config, gpu, root)
    return StepEstimate(
        config,
        question_tokens,
        gpu,
        shape,
        prediction=predict(config, shape, gpu, lengths),
        factor=factor,
        runs=runs,
    )


def find_own_gpu() -> tuple[GpuName | None, str]:
    """This machine's GPU, None without one, and what is wrong if it is not in the table."""
    gpus = list_gpus()
    if not gpus:
        return None, ""

    gpu = find_gpu(gpus[0].name)

    if gpu:
        problem = ""
    else:
        problem = f"{gpus[0].name} is not in the table: give a similar one by --gpu"

    return gpu, problem


# Earlier runs


class MeasuredRun(NamedTuple):
    path: Path
    config: TrainConfig
    device: str  # as the driver names it
    rows: list[Row]


def calibration(
    config: TrainConfig, gpu: GpuName | None, root: Path
) -> tuple[float, tuple[str, ...]]:
    """How many times as long as estimated earlier runs took, and which: those with the same model
    on the same device, else any on that device, else any on a GPU."""
    ranked: dict[int, list[tuple[float, str]]] = {}
    for run in recent_runs(root):
        ratio = _measured_ratio(run, gpu)
        if ratio is not None:
            is_other_device = find_gpu(run.device) != gpu
            is_other_model = run.config.model.name != config.model.name
            rank = 2 * is_other_device + is_other_model
            ranked.setdefault(rank, []).append((ratio, str(run.path)))

    if not ranked:
        return 1.0, ()

    best = ranked[min(ranked)]
    factor = geometric_mean(ratio for ratio, _ in best)
    return factor, tuple(name for _, name in best)


def recent_runs(root: Path) -> list[MeasuredRun]:
    """The newest training runs in a folder, without those of other commands or versions."""
    files = [path for path in root.glob("*/config.json") if not path.parent.is_symlink()]
    files.sort(key=lambda path: path.stat().st_mtime, reverse=True)

    runs = []
    for file in files[:RUNS_READ]:
        try:
            config = from_plain(TrainConfig, read_json(file), str(file))
            device = str(read_json(file.with_name("env.json")).get("device", ""))
            rows = read_rows(file.with_name("metrics.jsonl"))
        except (OSError, ValueError):
            continue  # of another command or version, or without a step

        runs.append(MeasuredRun(file.parent, config, device, rows))

    return runs


def _measured_ratio(run: MeasuredRun, gpu: GpuName | None) -> float | None:
    """How many times as long as predicted a step took; None if the run tells nothing about this
    kind of device."""
    device = find_gpu(run.device)
    shape = _known_shape(run.config.model.name)
    times = _positive(run.rows, "time/step")
    lengths = _positive(run.rows, LENGTH)

    is_same_kind = run.device == "cpu" if gpu is None else device is not None
    if shape is None or len(times) < LEAST_STEPS or not is_same_kind:
        return None

    question = typical_question(run.config.task)
    completion = mean(lengths) if lengths else None
    predicted = predict(run.config, shape, device, lengths_of(run.config, question, completion))
    return median(times[WARM_UP:]) / predicted.step


def _known_shape(name: str) -> Shape | None:
    try:
        return find_shape(name)
    except (OSError, ValueError):
        return None  # a damaged folder


def _positive(rows: Sequence[Row], name: str) -> list[float]:
    values: list[Any] = [row.get(name) for row in rows]
    numbers = []
    for value in values:
        if isinstance(value, int | float):
            numbers.append(value)

    return [number for number in numbers if 0 < number < math.inf]
