"""Measured against planned: seconds per step and peak memory of real training steps on this GPU.

    python -m benchmarks.plan --out results

Models have published shapes and random weights, so nothing is downloaded; their completions never
end early. Each case is one line of JSON as soon as it is measured, and `result.json` holds all of
them. `--small` shrinks everything for a dry run on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
import trl
from transformers import AutoModelForCausalLM, TrainerCallback

from benchmarks._lib.parts import parts_around
from benchmarks._lib.results import write_json
from benchmarks._lib.rows import values
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
from mesotron.tasks.prompts import render_prompts

KINDS = {
    "smollm2": "llama",
    "qwen2.5": "qwen2",
    "qwen3": "qwen3",
}
MUON = OptimConfig(name="muon")
ADAMW = OptimConfig(name="adamw")
NO_KL = ObjectiveConfig(beta=0.0)
TINY = Shape(2, 64, 128, 4, 2, 16, 512)
# Phases of a step and the methods that they are.
PHASES = {
    "generate": "_generate_single_turn",
    "rollout": "_generate_and_score_completions",
    "optimizer": "_clip_grad_norm",
}


def case(name: str, optim: OptimConfig, *, tokens: int = 96, **more: Any) -> TrainConfig:
    """Full training in bfloat16 without a KL term, unless `more` of the model's fields say so."""
    rollout = RolloutConfig(prompts=16, generations=8, max_tokens=tokens, fast=False)
    model = ModelConfig(**{"name": name, "dtype": "bfloat16", **more})  # type: ignore[arg-type]
    return TrainConfig(model=model, optim=optim, objective=NO_KL, rollout=rollout)


def fast(config: TrainConfig) -> TrainConfig:
    return replace(config, rollout=replace(config.rollout, fast=True))


CHECKPOINTED = case("qwen3-1.7b", ADAMW, tokens=64, gradient_checkpointing=True)
CHECKPOINTED = replace(
    CHECKPOINTED,
    objective=ObjectiveConfig(beta=0.04),
    rollout=replace(CHECKPOINTED.rollout, micro_batch=32),
)

# The most wanted first: the rest is left out when the time is up.
CASES = {
    "smollm2 full": case("smollm2-135m", MUON),
    "qwen2.5-0.5b full": case("qwen2.5-0.5b", ADAMW),
    "qwen3-1.7b full": case("qwen3-1.7b", MUON),
    "smollm2 lora": case("smollm2-135m", MUON, lora=16),
    "qwen2.5-0.5b lora": case("qwen2.5-0.5b", ADAMW, lora=16, tokens=64),
    "qwen3-1.7b lora": case("qwen3-1.7b", ADAMW, lora=16, tokens=64),
    "smollm2 fast": fast(case("smollm2-135m", MUON)),
    "qwen2.5-0.5b fast": fast(case("qwen2.5-0.5b", MUON, tokens=192)),
    "qwen3-1.7b fast": fast(case("qwen3-1.7b", ADAMW, tokens=192)),
    "qwen3-1.7b checkpointed": CHECKPOINTED,
    "smollm2 float32": case("smollm2-135m", ADAMW, tokens=48, dtype="float32"),
    "smollm2 mixed fast": fast(case("smollm2-135m", ADAMW, dtype="mixed")),
}


class PhaseClock(TrainerCallback):
    """Seconds of each step, and of its phases with the GPU waited for."""

    def __init__(self, device: torch.device, deadline: float) -> None:
        self.device = device
        self.deadline = deadline
        self.ends: list[float] = []
        self.phases: list[dict[str, float]] = []
        self._now: dict[str, float] = defaultdict(float)

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self.now()
            result = call(*args, **kwargs)
            self._now[name] += self.now() - began

            return result

        return timed

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.ends.append(self.now())

    def on_step_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
        self.ends.append(self.now())
        self.phases.append(dict(self._now))
        self._now.clear()
        control.should_training_stop |= self.ends[-1] > self.deadline and len(self.ends) > 2


def kind_of(name: str) -> str:
    """The architecture of a size."""
    return next(kind for prefix, kind in KINDS.items() if name.startswith(prefix))


def build(shape: Shape, kind: str, dtype: torch.dtype, device: torch.device, ends: int) -> Any:
    """A model of a published shape with random weights.

    Args:
        shape: of the model.
        kind: its architecture.
        dtype: of the weights.
        device: where it is made.
        ends: the token that ends a completion.
    """
    settings = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": ends,
    }
    config = transformers.AutoConfig.for_model(kind, **settings)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)

    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = ends
    return model.to(device).eval()


def shrink(config: TrainConfig) -> TrainConfig:
    """A few short rollouts in float32, for a CPU."""
    sizes = {"prompts": 2, "generations": 2, "max_tokens": 8, "micro_batch": None}
    config = replace(config, rollout=replace(config.rollout, **sizes))
    if config.model.dtype == "mixed":
        config = replace(config, model=replace(config.model, dtype="float32"))
    return config


@dataclass(frozen=True)
class Timed:
    """A finished training of a case."""

    clock: PhaseClock
    log: list[dict[str, Any]]
    lengths: Lengths
    fast: str | None
    start_gib: float  # allocated before it


def measure(
    name: str, config: TrainConfig, small: bool, seconds: float, verifier: Verifier
) -> dict[str, Any]:
    """A case, measured and planned."""
    deadline = time.perf_counter() + seconds
    device = choose_device("auto")
    shape = SHAPES[config.model.name]
    kind = kind_of(config.model.name)
    if small:
        shape = TINY._replace(head_norms=shape.head_norms)
        config = shrink(config)

    warm, counted = (2, 3) if config.rollout.fast else (1, 2)
    config = replace(config, steps=warm + counted, save_every=0, guard="off")
    is_wide = device.type == "cpu" or config.model.dtype in ("float32", "mixed")
    dtype = torch.float32 if is_wide else torch.bfloat16

    _, tokenizer = load_model(ModelConfig(name="tiny"))
    model = build(shape, kind, dtype, device, tokenizer.eos_token_id)
    timed = train(config, model, tokenizer, PhaseClock(device, deadline), verifier)

    plan = predict(config, shape, find_device(name_device(device)), timed.lengths)
    row = {"case": name, "parameters": shape.parameters, "lengths": timed.lengths._asdict()}
    row |= compare_times(timed, warm, plan)
    if device.type == "cuda":
        row |= compare_memory(timed, plan)
    return row


def train(
    config: TrainConfig, model: Any, tokenizer: Any, clock: PhaseClock, verifier: Verifier
) -> Timed:
    """Some steps, their phases timed."""
    small_task = replace(config.task, num_train=200, num_eval=2)
    parts = parts_around(model, tokenizer, config, clock.device, verifier, small_task)
    lengths = lengths_of(parts, config.rollout.max_tokens)

    start = 0.0
    if clock.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated() / GIB  # with what an earlier case left

    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(parts, RunFolder.create(Path(folder) / "run", config, {}))
        time_phases(trainer, clock)

        # Weights are not worth writing: a 1.7B model with its state has 17 GB.
        trainer._save_checkpoint = lambda *_, **__: None  # type: ignore
        trainer.train()

    fast = str(trainer.fast) if config.rollout.fast else None
    return Timed(clock, trainer.state.log_history, lengths, fast, start)


def lengths_of(parts: Any, tokens: int) -> Lengths:
    """A batch of prompts is padded to its longest, completions never end early."""
    texts = render_prompts(parts.task.train, parts.config.task, parts.tokenizer)
    sizes = sorted(len(parts.tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    return Lengths(prompt=sizes[int(0.95 * len(sizes))], completion=tokens, longest=tokens)


def time_phases(trainer: Any, clock: PhaseClock) -> None:
    """Time the methods of `PHASES` and the optimizer's step."""
    for phase, method in PHASES.items():
        setattr(trainer, method, clock.around(phase, getattr(trainer, method)))

    create = trainer.create_optimizer

    def create_timed(*args: Any) -> Any:
        optimizer = create(*args)
        optimizer.step = clock.around("optimizer", optimizer.step)
        return optimizer

    trainer.create_optimizer = create_timed
    trainer.add_callback(clock)


def compare_times(timed: Timed, warm: int, plan: Any) -> dict[str, Any]:
    """Seconds of a step, by phase, next to the planned ones."""
    steps = [end - begin for begin, end in pairwise(timed.clock.ends)]
    first = min(warm, len(steps) - 1)  # steps before it do not count
    step = median(steps[first:])

    phases = {}
    for phase in PHASES:
        phases[phase] = median(one.get(phase, 0.0) for one in timed.clock.phases[first:])
    phases["train and rest"] = step - phases["rollout"] - phases["optimizer"]

    return {
        "steps_s": [round(one, 3) for one in steps],
        "measured_step_s": step,
        "planned_step_s": plan.step,
        "step_ratio": plan.step / step,
        "measured_phases_s": phases,
        "planned_phases_s": plan.seconds,
        "lengths_sampled": values(timed.log, "completions/mean_length"),
        "fast": timed.fast,
    }


def compare_memory(timed: Timed, plan: Any) -> dict[str, Any]:
    peak = torch.cuda.max_memory_allocated() / GIB
    return {
        "measured_gib": peak,
        "start_gib": timed.start_gib,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "planned_gib": plan.allocated,
        "planned_parts_gib": plan.memory,
        "memory_ratio": plan.allocated / peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--seconds", type=float, default=225, help="start no case after this")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a CPU")
    given = parser.parse_args()
    deadline = time.perf_counter() + given.seconds

    quiet_libraries()
    logging.getLogger("mesotron").setLevel(logging.ERROR)
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
    }
    rows: list[dict[str, Any]] = []
    record = {"device": name_device(choose_device("auto")), "versions": versions, "rows": rows}

    with Verifier() as verifier:
        for name in given.cases:
            left = deadline - time.perf_counter()
            if left < 5:
                print(json.dumps({"case": name, "left_out": "no time left"}), flush=True)
                continue

            rows.append(attempt(name, given.small, left, verifier))
            print(json.dumps(rows[-1]), flush=True)
            write_json(record, given.out / "result.json", indent=1)

    for row in rows:
        ratios = []
        for key in ("step_ratio", "memory_ratio"):
            if key in row:
                ratios.append(f"{key} {row[key]:.2f}")

        print(f"{row['case']:<28}", "  ".join(ratios) or row.get("error", ""))


def attempt(name: str, small: bool, seconds: float, verifier: Verifier) -> dict[str, Any]:
    """A case, or why it failed: the others are worth having."""
    began = time.perf_counter()
    try:
        row = measure(name, CASES[name], small, seconds, verifier)
    except Exception as error:
        traceback.print_exc()
        row = {"case": name, "error": f"{type(error).__name__}: {error}"[:300]}

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return row | {"case_s": round(time.perf_counter() - began, 1)}


if __name__ == "__main__":
    main()
