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
from pathlib import Path
from typing import Any

import torch

from benchmarks.plan.__main__ import KINDS, TINY, build
from mesotron.answers.facts import Judge
from mesotron.answers.verify import Verifier
from mesotron.config import ModelConfig, ObjectiveConfig, OptimConfig, RolloutConfig, TrainConfig
from mesotron.models.load import load_model
from mesotron.optim.device import choose_device, name_device
from mesotron.rewards.call import make_reward
from mesotron.rlvr.lifecycle import quiet_libraries
from mesotron.rlvr.parts import Parts, build_trainer
from mesotron.rlvr.plan.estimate import predict
from mesotron.rlvr.plan.setup import Lengths
from mesotron.rlvr.plan.shapes import GIB, SHAPES, find_device
from mesotron.rlvr.trl_arguments import trl_arguments
from mesotron.runs import RunFolder
from mesotron.tasks.load import load_task

SIZES = ("qwen2.5-0.5b", "qwen3-1.7b", "qwen3-4b")
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": {"lora": 16},
    "QLoRA": {"lora": 16, "load": "4bit"},
}
OPTIMIZERS = ("adamw", "muon", "muon_sgd")
CELLS = [(size, method, optim) for size in SIZES for method in METHODS for optim in OPTIMIZERS]


def measure(
    size: str, method: str, optim: str, models: Path, small: bool, checkpointing: bool
) -> dict[str, Any]:
    quiet_libraries()
    device = choose_device("auto")
    on_gpu = device.type == "cuda"
    options = METHODS[method]

    # As `--model.dtype auto` resolves: mixed for full training, bfloat16 below LoRA.
    dtype = "float32" if not on_gpu else "bfloat16" if options else "mixed"
    rollout = RolloutConfig(
        prompts=8,
        generations=8,
        max_tokens=128,
        micro_batch=8,
        fast=False,
    )

    shape = SHAPES[size]
    if small:
        shape = TINY._replace(head_norms=shape.head_norms)
        rollout = replace(
            rollout,
            prompts=2,
            generations=2,
            max_tokens=8,
            micro_batch=4,
        )

    model_config = ModelConfig(
        name=size, dtype=dtype, gradient_checkpointing=checkpointing, **options
    )  # type: ignore[arg-type]
    config = TrainConfig(
        model=model_config,
        optim=OptimConfig(name=optim),
        rollout=rollout,
        steps=2,
        objective=ObjectiveConfig(beta=0.0),
        save_every=0,
        guard="off",
    )  # type: ignore[arg-type]

    _, tokenizer = load_model(ModelConfig(name="tiny"))
    kind = next(kind for prefix, kind in KINDS.items() if size.startswith(prefix))
    width = torch.float32 if dtype in ("float32", "mixed") else torch.bfloat16

    whole = models / size
    if "load" not in options or not whole.is_dir():
        model = build(
            shape,
            kind,
            width,
            device,
            tokenizer.eos_token_id,
        )

    if "load" in options:  # weights are rounded while they are read
        if not whole.is_dir():
            model.save_pretrained(whole)
            tokenizer.save_pretrained(whole)
            del model

        model, _ = load_model(replace(model_config, name=str(whole)), device)

    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    start = torch.cuda.memory_allocated() / GIB if on_gpu else model.get_memory_footprint() / GIB
    task = load_task(replace(config.task, num_train=64, num_eval=2))
    with Verifier() as verifier, tempfile.TemporaryDirectory() as folder:
        judge = Judge(task.format, verifier)
        reward = make_reward(config.reward, judge, rollout.max_tokens)
        arguments = trl_arguments(config.objective, rollout, config.optim)

        parts = Parts(
            config,
            device,
            model,
            tokenizer,
            task,
            judge,
            reward,
            arguments,
        )

        trainer = build_trainer(parts, RunFolder.create(Path(folder) / "run", config, {}))
        trainer._save_checkpoint = lambda *_, **__: None  # type: ignore
        began = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - began

    states = [one for state in trainer.optimizer.state.values() for one in state.values()]
    tensors = [one for one in states if isinstance(one, torch.Tensor)]
    row: dict[str, Any] = {
        "size": size,
        "method": method,
        "optim": optim,
        "parameters": shape.parameters,
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "weights_gib": start,
        "seconds": round(seconds, 1),
        "device": name_device(device),
        "state_gib": sum(one.numel() * one.element_size() for one in tensors) / GIB,
        "finite": all(bool(p.isfinite().all()) for p in model.parameters() if p.requires_grad),
    }

    lengths = Lengths(
        prompt=64,
        completion=rollout.max_tokens,
        longest=rollout.max_tokens,
    )

    plan = predict(config, shape, find_device(name_device(device)), lengths)
    row["planned_gib"] = plan.allocated

    if on_gpu:
        row["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB

    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Peak (planned) GiB, a line per size and method; without a GPU the state of the optimizer."""
    found = {(row["size"], row["method"], row["optim"]): row for row in rows}

    def cell(row: dict[str, Any] | None) -> str:
        if row is None or "error" in row:
            return "-" if row is None else "error"
        if "peak_gib" in row:
            return f"{row['peak_gib']:.1f} ({row['planned_gib']:.1f})"

        return f"state {row['state_gib']:.4f}"

    lines = [f"| peak (planned) GiB | {' | '.join(OPTIMIZERS)} |", "|---" * 4 + "|"]
    for size, method in dict.fromkeys((size, method) for size, method, _ in CELLS):
        cells = [cell(found.get((size, method, optim))) for optim in OPTIMIZERS]
        lines.append(f"| {size} {method} | {' | '.join(cells)} |")

    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument(
        "--seconds",
        type=float,
        default=540,
        help="start no cell after this",
    )

    parser.add_argument(
        "--sizes",
        nargs="+",
        default=list(SIZES),
        choices=SIZES,
    )

    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--models", type=Path, help=argparse.SUPPRESS)

    given = parser.parse_args()
    if given.cell:
        print(json.dumps(measure(*given.cell, given.models, given.small, given.checkpointing)))
        return

    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as models:
        print(table(measure_all(given, models)))


def measure_all(given: argparse.Namespace, models: str) -> list[dict[str, Any]]:
    began = time.perf_counter()
    path = given.out / "result.json"
    rows = json.loads(path.read_text())["rows"] if path.is_file() else []
    rows = [row for row in rows if "error" not in row]
    known = {(row["size"], row["method"], row["optim"]) for row in rows}

    flags = ["--small"] * given.small + ["--checkpointing"] * given.checkpointing
    for cell in (cell for cell in CELLS if cell[0] in given.sizes and cell not in known):
        row: dict[str, Any] = dict(zip(("size", "method", "optim"), cell, strict=True))
        if time.perf_counter() - began > given.seconds:
            row["error"] = "no time left"
        else:
            # Its own process: what a cell leaves behind must not count for the next.
            command = [sys.executable, "-m", "benchmarks.memory", *flags, "--models", models]
            done = subprocess.run(
                [*command, "--cell", *cell], capture_output=True, text=True, check=False
            )

            lines = done.stdout.strip().splitlines()
            if done.returncode == 0 and lines:
                row = json.loads(lines[-1])
            else:
                row["error"] = (done.stderr.strip().splitlines() or ["?"])[-1][:300]

        rows.append(row)
        print(json.dumps(row), flush=True)
        record = {
            "checkpointing": given.checkpointing,
            "small": given.small,
            "rows": rows,
        }

        path.write_text(json.dumps(record, indent=1) + "\n")

    return rows


if __name__ == "__main__":
    main()
