"""What one process measures: a contender's step by phase, or a run with fresh or stale weights."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from benchmarks._lib.results import read_json
from benchmarks.speedrun.contenders import make_ours, make_stock
from benchmarks.speedrun.stopwatch import Measured
from benchmarks.stack.plan import (
    CONTENDERS,
    GENERATIONS,
    LITTLE,
    MICRO,
    MODELS,
    PROMPTS,
    RECIPE,
    ROWS,
    SMALL,
    STALE_FROM,
    VLLM,
    Contender,
)
from mesotron.answers.verify import Verifier
from mesotron.compare.change import change
from mesotron.config import ModelConfig
from mesotron.models.load import CHAT_END, load_model
from mesotron.recipes import make_recipe
from mesotron.rlvr.lifecycle import quiet_libraries
from mesotron.rlvr.parts import load
from mesotron.runs import RunFolder, describe_environment
from mesotron.runs.files import read_rows

Cell = dict[str, Any]
# Of the phases of `speedrun.stopwatch`, what is not sampling, scoring, forward or backward pass.
BOOKKEEPING = ("clip", "optimizer", "log", "callbacks")
GAPS = (
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/mean",
    "sampling/masked",
    "reward",
)


def make_folder(name: str, folder: Path, smollm2: str) -> Path:
    """A model folder whose completions never end early: random weights, or SmolLM2's own, and a
    tokenizer whose end token is one that the model does not write."""
    if (folder / "config.json").is_file():
        return folder

    model, tokenizer = load_model(ModelConfig(name=smollm2, dtype="float32"))
    if name != "smollm2":
        kind, settings = MODELS[name]
        config = AutoConfig.for_model(kind.lower(), **settings)
        torch.manual_seed(0)

        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    # `load_model` takes the end of a chat turn for the end token wherever a template has it.
    tokenizer.chat_template = tokenizer.chat_template.replace(CHAT_END, "\n")
    unused = tokenizer.added_tokens_decoder[max(tokenizer.added_tokens_decoder)].content
    tokenizer.eos_token = unused
    tokenizer.pad_token = unused
    for holder in (model.config, model.generation_config):
        holder.eos_token_id = tokenizer.eos_token_id
        holder.pad_token_id = tokenizer.eos_token_id
        holder.bos_token_id = None

    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    return folder


# Few short rollouts in float32, to try everything on a CPU.
SMALL_RUN = {
    "rollout.prompts": 4,
    "rollout.generations": 4,
    "optim.fused": False,
    "model.dtype": "float32",
    "device": "cpu",
    "task.num_eval": 8,
}


def make_trainer(contender: Contender, folder: Path, **more: Any) -> tuple[Any, Any]:
    """A contender's trainer, and the verifier to close after it.

    Args:
        contender: what samples and what trains.
        folder: for what it writes.
        more: settings of the config, by path.
    """
    quiet_libraries()
    settings = {
        "rollout.prompts": PROMPTS,
        "rollout.generations": GENERATIONS,
        "steps": 100_000,
        "rollout.fast": False,
        "optim.fused": True,
        "model.dtype": "float32" if contender.stock else "mixed",
        **contender.settings,
        **more,
    }
    config = change(make_recipe(RECIPE), [f"{name}={value}" for name, value in settings.items()])
    verifier = Verifier(config.reward.timeout)
    parts = load(config, verifier)
    parts = replace(parts, config=replace(parts.config, save_every=0))
    if contender.stock:
        trainer = make_stock(parts, folder, **contender.trl, **VLLM)
    else:
        parts.objective_arguments.update(VLLM)
        environment = describe_environment(str(parts.device), config.seed)
        trainer = make_ours(parts, RunFolder.create(folder / "run", parts.config, environment))

    if contender.uses_vllm:  # ids above the tokenizer's vocabulary have no text
        trainer.vllm_generation.generation_kwargs["detokenize"] = False

    return trainer, verifier


def step(folder: Path, seconds: float, row: str, contender: str, given: Cell) -> Cell:
    """Milliseconds of a step, by phase, and tokens per second."""
    sizes = (ROWS | SMALL)[row]
    one = CONTENDERS[contender]
    small = row in SMALL
    VLLM["vllm_gpu_memory_utilization"] = sizes.share  # in this process alone

    settings: dict[str, Any] = {
        "model.name": given["model"],
        "rollout.max_tokens": sizes.tokens,
        "rollout.micro_batch": one.micro(sizes),
    }
    if small:
        settings |= SMALL_RUN

    trainer, verifier = make_trainer(one, folder, **settings)
    measured = Measured(trainer, given["warm"], given["count"], seconds)
    trainer.add_callback(measured)
    with verifier:
        trainer.train()

    rows = trainer.state.log_history
    cell = measured.row() | {"row": row, "contender": contender, **asdict(sizes)}
    cell["micro"] = one.micro(sizes)
    completions = 16 if small else PROMPTS * GENERATIONS
    if cell["step_ms"]:
        cell["tokens_per_s"] = 1e3 * completions * sizes.tokens / cell["step_ms"]

    phases = cell.get("phases_ms", {})
    cell["bookkeeping_ms"] = sum(phases.get(name, 0.0) for name in BOOKKEEPING)
    cell["mean_length"] = rows[-2].get("completions/mean_length") if len(rows) > 1 else None
    if torch.cuda.is_available():
        cell["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return cell


def mismatch(folder: Path, seconds: float, stale: bool, given: Cell) -> Cell:
    """The gap between vLLM and the trainer in a run, and what the watch says about it."""

    class Stale(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if stale and state.global_step == STALE_FROM:
                trainer.vllm_generation.sync_weights = lambda: None

    one = CONTENDERS["vLLM"]
    VLLM["vllm_gpu_memory_utilization"] = LITTLE  # in this process alone
    settings = {
        "model.name": given["model"],
        "rollout.max_tokens": 10,
        "rollout.micro_batch": MICRO,
        "steps": given["steps"],
    }
    trainer, verifier = make_trainer(one, folder, **settings)
    trainer.vllm_generation.generation_kwargs.pop("detokenize")
    trainer.add_callback(Stale())
    with verifier:
        trainer.train()

    rows = [row for row in trainer.state.log_history if "loss" in row]
    return {
        "stale_from": STALE_FROM if stale else None,
        "rows": [{name: row.get(name) for name in GAPS} for row in rows],
        "events": read_rows(folder / "run" / "events.jsonl"),
    }


def whole_run(folder: Path, seconds: float, flags: list[str], seed: int, given: Cell) -> Cell:
    """A run of `mesotron train`: greedy accuracy before and after, rewards and losses."""
    run = folder / "run"
    command = [sys.executable, "-m", "mesotron", "train", RECIPE, "--model", given["model"]]
    command += ["--steps", str(given["steps"]), "--seed", str(seed), "--out", str(run), *flags]

    done = subprocess.run(command, timeout=seconds, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])

    rows = read_rows(run / "metrics.jsonl")
    cell: Cell = {"seed": seed}
    for name in ("before", "after"):
        cell[name] = read_json(run / f"{name}.json")["greedy"]["strict"]["value"]
    for name in ("reward", "loss", "time/step"):
        cell[name] = [row.get(name) for row in rows]
    return cell
