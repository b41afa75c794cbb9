"""Peak memory of two training steps: three sizes x full, LoRA, QLoRA x three optimizers.

    python -m benchmarks.memory --out benchmarks/memory

Models have published shapes and random weights, so nothing is downloaded. The rollout is small (8
prompts x 8 completions of 128 tokens, 8 rows per pass): weights, gradients and optimizer state are
compared, not batches. Two steps, because only the second has optimizer state and activations at
once. Each cell runs in its own process and is a line of JSON as soon as it is measured;
`result.json` holds all of them, and what is in it is not measured again; the table is printed at
the end. `--small` shrinks everything for a dry run on a CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks._lib.parts import parts_around
from benchmarks._lib.results import read_json, write_json
from benchmarks._lib.rows import table as markdown
from benchmarks._lib.rows import where
from benchmarks.plan.__main__ import TINY, build, kind_of
from mesotron.answers.verify import Verifier
from mesotron.config import ModelConfig, ObjectiveConfig, OptimConfig, RolloutConfig, TrainConfig
from mesotron.models.load import load_model
from mesotron.optim.device import choose_device, name_device
from mesotron.rlvr.lifecycle import quiet_libraries
from mesotron.rlvr.parts import build_trainer
from mesotron.rlvr.plan.estimate import predict
from mesotron.rlvr.plan.setup import Lengths
from mesotron.rlvr.plan.shapes import GIB, SHAPES, Shape, find_device
from mesotron.runs import RunFolder

SIZES = ("qwen2.5-0.5b", "qwen3-1.7b", "qwen3-4b")
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": {"lora": 16},
    "QLoRA": {"lora": 16, "load": "4bit"},
}
OPTIMIZERS = ("adamw", "muon", "muon_sgd")
NAMES = ("size", "method", "optim")
CELLS = list(product(SIZES, METHODS, OPTIMIZERS))
ROLLOUT = RolloutConfig(prompts=8, generations=8, max_tokens=128, micro_batch=8, fast=False)
SMALL = replace(ROLLOUT, prompts=2, generations=2, max_tokens=8, micro_batch=4)


def measure(
    size: str, method: str, optim: str, models: Path, small: bool, checkpointing: bool
) -> dict[str, Any]:
    """Train two steps and compare the memory with the plan's."""
    quiet_libraries()
    device = choose_device("auto")
    on_gpu = device.type == "cuda"
    shape = SHAPES[size]
    if small:
        shape = TINY._replace(head_norms=shape.head_norms)

    config = config_of(size, method, optim, on_gpu, small, checkpointing)
    _, tokenizer = load_model(ModelConfig(name="tiny"))
    model = make_model(config.model, shape, tokenizer, device, models / size)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
    else:
        start = model.get_memory_footprint()

    trainer, seconds = train(config, model, tokenizer, device)
    trained = [p for p in model.parameters() if p.requires_grad]
    tokens = config.rollout.max_tokens
    lengths = Lengths(prompt=64, completion=tokens, longest=tokens)
    plan = predict(config, shape, find_device(name_device(device)), lengths)

    row: dict[str, Any] = {
        "size": size,
        "method": method,
        "optim": optim,
        "parameters": shape.parameters,
        "trained": sum(p.numel() for p in trained),
        "weights_gib": start / GIB,
        "seconds": round(seconds, 1),
        "device": name_device(device),
        "state_gib": state_gib(trainer.optimizer),
        "finite": all(bool(p.isfinite().all()) for p in trained),
        "planned_gib": plan.allocated,
    }
    if on_gpu:
        row["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    return row


def config_of(
    size: str, method: str, optim: str, on_gpu: bool, small: bool, checkpointing: bool
) -> TrainConfig:
    options = METHODS[method]
    dtype = "float32"
    if on_gpu:  # as `--model.dtype auto` resolves
        dtype = "bfloat16" if options else "mixed"

    model = {"name": size, "dtype": dtype, "gradient_checkpointing": checkpointing, **options}
    return TrainConfig(
        model=ModelConfig(**model),
        optim=OptimConfig(name=optim),
        rollout=SMALL if small else ROLLOUT,
        steps=2,
        objective=ObjectiveConfig(beta=0.0),
        save_every=0,
        guard="off",
    )  # type: ignore[arg-type]


def make_model(
    config: ModelConfig, shape: Shape, tokenizer: Any, device: torch.device, whole: Path
) -> Any:
    """A model with random weights; one that is rounded to 4 bits is read from a folder.

    Args:
        config: of the model.
        shape: of the matrices.
        tokenizer: whose end token ends completions.
        device: where it trains.
        whole: the folder of the model in full precision, made if it is not there.
    """

    if config.dtype in ("float32", "mixed"):
        width = torch.float32
    else:
        width = torch.bfloat16

    is_rounded = config.load != ModelConfig().load
    if not is_rounded or not whole.is_dir():
        model = build(shape, kind_of(config.name), width, device, tokenizer.eos_token_id)
        if not is_rounded:
            return model
        model.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        del model

    return load_model(replace(config, name=str(whole)), device)[0]


def train(
    config: TrainConfig, model: Any, tokenizer: Any, device: torch.device
) -> tuple[Any, float]:
    """The trainer after its steps, and the seconds that they took."""
    small_task = replace(config.task, num_train=64, num_eval=2)
    with Verifier() as verifier, tempfile.TemporaryDirectory() as folder:
        parts = parts_around(model, tokenizer, config, device, verifier, small_task)
        trainer = build_trainer(parts, RunFolder.create(Path(folder) / "run", config, {}))
        trainer._save_checkpoint = lambda *_, **__: None  # type: ignore
        began = time.perf_counter()
        trainer.train()
        return trainer, time.perf_counter() - began


def state_gib(optimizer: torch.optim.Optimizer) -> float:
    """Memory of the optimizer's state."""
    total = 0
    for state in optimizer.state.values():
        for one in state.values():
            if isinstance(one, torch.Tensor):
                total += one.numel() * one.element_size()
    return total / GIB


def table(rows: list[dict[str, Any]]) -> str:
    """Peak (planned) GiB, a line per size and method; without a GPU the state of the optimizer."""
    lines = []
    for size, method in product(SIZES, METHODS):
        shown = []
        for optim in OPTIMIZERS:
            found = where(rows, size=size, method=method, optim=optim)
            shown.append(memory_of(found[0]) if found else "-")
        lines.append([f"{size} {method}", *shown])
    return markdown(["peak (planned) GiB", *OPTIMIZERS], lines)


def memory_of(row: dict[str, Any]) -> str:
    if "error" in row:
        return "error"
    if "peak_gib" in row:
        return f"{row['peak_gib']:.1f} ({row['planned_gib']:.1f})"
    return f"state {row['state_gib']:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--seconds", type=float, default=540, help="start no cell after this")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--models", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()

    if given.cell:
        row = measure(*given.cell, given.models, given.small, given.checkpointing)
        print(json.dumps(row))
        return

    with tempfile.TemporaryDirectory() as models:
        print(table(measure_all(given, models)))


def measure_all(given: argparse.Namespace, models: str) -> list[dict[str, Any]]:
    """Every cell that the result lacks."""
    deadline = time.perf_counter() + given.seconds
    path = given.out / "result.json"
    rows = []
    if path.is_file():
        rows = [row for row in read_json(path)["rows"] if "error" not in row]

    for cell in CELLS:
        named = dict(zip(NAMES, cell, strict=True))
        if named["size"] not in given.sizes or where(rows, **named):
            continue

        if time.perf_counter() > deadline:
            row = named | {"error": "no time left"}
        else:
            row = measure_apart(named, given, models)

        rows.append(row)
        print(json.dumps(row), flush=True)
        record = {"checkpointing": given.checkpointing, "small": given.small, "rows": rows}
        write_json(record, path, indent=1)
    return rows


def measure_apart(cell: dict[str, str], given: argparse.Namespace, models: str) -> dict[str, Any]:
    """In a process of its own: what a cell leaves behind must not count for the next."""
    command = [sys.executable, "-m", "benchmarks.memory", "--models", models]
    command += ["--cell", *cell.values()]
    if given.small:
        command.append("--small")
    if given.checkpointing:
        command.append("--checkpointing")

    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])

    errors = done.stderr.strip().splitlines() or ["?"]
    return cell | {"error": errors[-1][:300]}


if __name__ == "__main__":
    main()
