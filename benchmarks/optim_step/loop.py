"""Time `optimizer.step()` in an ordinary training loop on a GPU.

    python -m benchmarks.optim_step.loop OUT.json

Whole models with random weights, float32; every step has a forward and a backward pass and
`zero_grad(set_to_none=True)`, so gradients move. `busy`: the device is still busy with the backward
pass when the step begins, as in any loop that does not wait; `idle`: it has finished. Both are the
time until the step's last kernel ends; `host` is the time until `step()` returns. `captured` is our
step in a CUDA graph of the caller's, gradients at fixed addresses. `in TRL` is our step inside
`trl.GRPOTrainer`, the device idle. `compile_ms` is our first step of all: run it twice to see what
the cache on disk leaves of the compilation.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config, Qwen3Config

import mesotron
from benchmarks._lib.results import write_json
from mesotron.config import ModelConfig
from mesotron.models.load import load_model

REPEATS = 25
WARMUP = 6
BUSY_CYCLES = 150_000_000  # about 80 ms
CONFIGS = {
    "GPT-2 124M": GPT2Config(),
    "Qwen2.5-0.5B": Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "Qwen3-1.7B": Qwen3Config(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
}


class Both(torch.optim.Optimizer):
    """torch.optim.Muon for the matrices that ours takes, fused AdamW for the rest."""

    def __init__(self, model: torch.nn.Module) -> None:
        spectral = []
        rest = []
        for group in mesotron.muon(model, lr=1e-4).param_groups:
            params = spectral if group["rule"] == "muon" else rest
            params += group["params"]

        self.parts = [
            torch.optim.Muon(spectral, lr=1e-4),
            torch.optim.AdamW(rest, lr=1e-4, fused=True),
        ]
        super().__init__(spectral + rest, {})

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()


CONTENDERS: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]] = {
    "mesotron.muon": lambda model: mesotron.muon(model, lr=1e-4),
    "mesotron.pion": lambda model: mesotron.pion(model, lr=1e-4, cutoff="aligned"),
    "torch.optim.Muon + AdamW": Both,
    "torch.optim.AdamW fused": lambda model: torch.optim.AdamW(
        model.parameters(), lr=1e-4, fused=True
    ),
}


def timed(step: Callable[[], Any], cycles: int = 0) -> tuple[float, float]:
    """Milliseconds of the device, busy for some cycles before, and of the host."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if cycles:
        torch.cuda._sleep(cycles)

    begin = time.perf_counter()
    start.record()
    step()
    end.record()
    host = time.perf_counter() - begin
    torch.cuda.synchronize()
    return start.elapsed_time(end), 1e3 * host


def in_a_loop(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    torch.cuda.reset_peak_memory_stats()
    generator = torch.Generator().manual_seed(0)
    idle: list[tuple[float, float]] = []
    busy: list[tuple[float, float]] = []
    first = 0.0

    for step in range(WARMUP + 2 * REPEATS):
        # Lengths vary, so the allocator hands out other addresses.
        length = int(torch.randint(48, 128, (), generator=generator))
        ids = torch.randint(0, 50000, (2, length), generator=generator).cuda()
        model(input_ids=ids, labels=ids).loss.backward()
        is_busy = step % 2 == 1
        device_and_host = timed(optimizer.step, BUSY_CYCLES if is_busy else 0)
        first = first or device_and_host[1]
        if step >= WARMUP:
            (busy if is_busy else idle).append(device_and_host)
        optimizer.zero_grad(set_to_none=True)

    return {
        "busy_ms": median(device for device, _ in busy),
        "idle_ms": median(device for device, _ in idle),
        "host_ms": median(host for _, host in idle),
        "first_ms": first,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def in_trl(model: torch.nn.Module) -> dict[str, float]:
    """Our step in GRPO with one prompt and random rewards, timed by the optimizer's hooks."""
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    optimizer = mesotron.muon(model, lr=1e-4)
    generator = torch.Generator().manual_seed(0)
    rows: list[tuple[float, float]] = []
    began: list[Any] = []

    def before(*_: Any) -> None:
        torch.cuda.synchronize()
        start = torch.cuda.Event(enable_timing=True)
        began[:] = [start, time.perf_counter()]
        start.record()

    def after(*_: Any) -> None:
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        host = 1e3 * (time.perf_counter() - began[1])
        torch.cuda.synchronize()
        rows.append((began[0].elapsed_time(end), host))

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    args = GRPOConfig(
        tempfile.mkdtemp(),
        max_steps=WARMUP + REPEATS,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=8,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )

    trainer = GRPOTrainer(
        model,
        lambda completions, **_: torch.rand(len(completions), generator=generator).tolist(),
        args,
        Dataset.from_list([{"prompt": "What is 2 + 3?"}] * 64),
        processing_class=load_model(ModelConfig(name="tiny"))[1],
        optimizers=(optimizer, None),  # pyright: ignore[reportArgumentType]
    )

    trainer.train()
    counted = rows[WARMUP:]
    return {
        "idle_ms": median(device for device, _ in counted),
        "host_ms": median(host for _, host in counted),
    }


def captured(model: torch.nn.Module) -> dict[str, float]:
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-3

    optimizer = mesotron.muon(model, lr=1e-4)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())

    with torch.cuda.stream(side):
        _, first = timed(optimizer.step)

    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()

    replays = [timed(graph.replay)[0] for _ in range(REPEATS)]
    return {"captured_ms": median(replays), "compile_ms": first}


def main(out: Path) -> int:
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config)

        rows: dict[str, Any] = dict(captured(model))
        for contender, make in CONTENDERS.items():
            model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            optimizer = make(model)
            rows[contender] = in_a_loop(model, optimizer)
            del optimizer

        rows["in TRL"] = in_trl(model)
        result[name] = rows
        print(name, json.dumps(rows, indent=1), flush=True)
        write_json(result, out, indent=1)
        del model

    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
