"""One training cell: the recipe with the cell's changes, and what is kept of the run.

The trainer, rewards, evaluation and watch are the library's own; no checkpoint is written. On a GPU
weights, gradients and momentum are float32 (updates of 1e-5 are below the spacing of bfloat16
weights), forward and backward run in bfloat16 autocast, and a bfloat16 copy of the weights samples.
"""

from __future__ import annotations

import math
import shutil
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, TrainerCallback, set_seed
from trl.trainer.grpo_config import GRPOConfig

from benchmarks._lib.plain_trl import plain_reward
from benchmarks._lib.rows import values
from benchmarks.smollm2.plan import Cell, key_of, warm_folder
from mesotron.answers.verify import Verifier
from mesotron.compare.health import diverged_at, health_of
from mesotron.compare.language import LanguageKind
from mesotron.config import TrainConfig
from mesotron.models.adapters import lora_config
from mesotron.rewards.call import as_reward_function
from mesotron.rlvr.callbacks import EvalEvery, SnrProbe
from mesotron.rlvr.lifecycle import quiet_libraries
from mesotron.rlvr.objectives import resolve
from mesotron.rlvr.parts import Parts, evaluate_part, grpo_arguments, load
from mesotron.rlvr.trl_trainer import GRPOTrainer
from mesotron.runs import RunFolder
from mesotron.tasks.rows import make_rows

KEPT = (
    "reward",
    "facts/correct",
    "facts/formatted",
    "facts/truncated",
    "groups/zero_signal",
    "entropy",
    "grad_norm",
    "completions/mean_length",
    "answers/top_share",
    "gradient/snr",
    "ratio/log_max",
    "clip_ratio/region_mean",
    "step_time",
)
LONG = 300  # steps from which rows are kept as means of ten
SNR_EVERY = 10
# Sampling with few kernels, and passes that read a prompt once for its completions.
FAST = ("rollout.fast=true",)
GSM8K = (
    "task.name=gsm8k",
    "task.few_shot=0",
    "task.system=none",
    "task.format=hashes",
    "task.num_eval=1024",
    "rollout.max_tokens=150",
    "rollout.micro_batch=32",
)


class Rows(TrainerCallback):
    """Keeps the logged rows; ends a run whose loss is not finite, or that is out of time."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.rows: list[dict[str, Any]] = []
        self.late = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            known = {}
            for name, value in logs.items():
                if value is not None:
                    known[name] = value

            self.rows.append({"step": state.global_step, **known})
            control.should_training_stop |= not math.isfinite(logs["loss"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.late = time.time() > self.deadline
        control.should_training_stop |= self.late


def config_of(cell: Cell, given: Any, run: Path) -> TrainConfig:
    """The recipe's config with everything that a cell changes."""
    warm = warm_folder(given.state, cell["part"])
    changes = [
        f"model.name={warm if warm.exists() else given.folder}",
        f"device={given.device}",
        f"rollout.micro_batch={given.micro_batch}",
        f"watch.snr_every={SNR_EVERY}",
    ]
    if not given.plain:
        changes += FAST
    if cell["part"] == "gsm8k":
        changes += [*GSM8K, f"task.data={given.gsm8k}"]
    changes += [*given.set, f"steps={cell['steps']}", *cell["set"]]

    kind = LanguageKind("arith_smollm2", changes)
    (contender,) = kind.contenders([cell["optim"]], [cell["objective"]])
    config = kind.settings(contender, cell["rate"], cell["seed"], run, cell["gain"])
    return fit_micro_batch(config)


def fit_micro_batch(config: TrainConfig) -> TrainConfig:
    """Smaller micro-batches where an update has fewer rows, or rows that it does not divide."""
    rollout = config.rollout
    rows = rollout.prompts * rollout.generations // rollout.updates
    most = min(rollout.micro_batch or rows, rows)
    micro = next(k for k in range(most, 0, -1) if rows % k == 0)
    return replace(config, rollout=replace(rollout, micro_batch=micro))


def train_cell(cell: Cell, given: Any, deadline: float) -> Cell | None:
    """Train and evaluate; None if time was up before, except for a lever: its curve counts."""
    began = time.time()
    quiet_libraries()
    path = given.state / "runs" / f"{abs(hash(key_of(cell))):x}-{time.time_ns():x}"
    config = config_of(cell, given, path)

    run = RunFolder.create(path, config, {})
    with Verifier(config.reward.timeout) as verifier:
        parts = load(config, verifier)
        make = build_stock if cell["stage"].startswith("stock") else build
        trainer, kept = make(parts, run, given, deadline)
        curve_every(cell, parts, trainer, given)
        trainer.train()
        if kept.late and cell["part"] != "levers":
            return None

        found = summary(parts, trainer, kept.rows)

    shutil.rmtree(path)
    return cell | found | {"whole": not kept.late, "seconds": time.time() - began}


def build(parts: Parts, run: RunFolder, given: Any, deadline: float) -> tuple[GRPOTrainer, Rows]:
    """The trainer as `mesotron train` builds it, in mixed precision and without checkpoints."""
    config = parts.config
    set_seed(config.seed)
    mixed = {"bf16": given.device == "cuda", "save_strategy": "no"}

    trainer = GRPOTrainer(
        model=parts.model,
        reward_funcs=as_reward_function(parts.reward),
        args=GRPOConfig(**(grpo_arguments(parts, run) | mixed)),
        train_dataset=make_rows(parts.task, config.task, parts.tokenizer),
        processing_class=parts.tokenizer,
        peft_config=lora_config(config.model),
        optim=config.optim,
        objective=resolve(config.objective, config.rollout.generations),
        judge=parts.judge,
        fast=config.rollout.fast,
    )

    trainer.remove_callback(PrinterCallback)
    kept = Rows(deadline)
    trainer.add_callback(kept)

    if config.watch.snr_every:
        trainer.callback_handler.callbacks.insert(0, SnrProbe(config.watch.snr_every, trainer))

    return trainer, kept


def build_stock(
    parts: Parts, run: RunFolder, given: Any, deadline: float
) -> tuple[GRPOTrainer, Rows]:
    """Plain TRL with its own AdamW, loss and sampling; the reward is ours."""
    config = parts.config
    rollout = config.rollout
    args = GRPOConfig(
        output_dir=str(run.checkpoints),
        max_steps=config.steps,
        seed=config.seed,
        per_device_train_batch_size=rollout.prompts * rollout.generations,
        num_generations=rollout.generations,
        max_completion_length=rollout.max_tokens,
        learning_rate=config.optim.lr,
        lr_scheduler_type="constant",
        logging_steps=1,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=given.device == "cpu",
        bf16=given.device == "cuda",
        dataloader_pin_memory=given.device == "cuda",
    )

    rows = make_rows(parts.task, config.task, parts.tokenizer)
    reward = plain_reward(parts.reward, parts.tokenizer)
    trainer = GRPOTrainer(
        parts.model, reward, args, train_dataset=rows, processing_class=parts.tokenizer
    )
    trainer.remove_callback(PrinterCallback)
    kept = Rows(deadline)
    trainer.add_callback(kept)

    return trainer, kept


def curve_every(cell: Cell, parts: Parts, trainer: GRPOTrainer, given: Any) -> None:
    """Evaluate during training where the curve is the result."""
    if cell["part"] != "levers":
        return

    def now() -> float:
        return evaluate_part(parts, trainer.model, "on the way")["greedy"]["strict"]["value"]

    every = given.final_steps // 4
    problems = len(parts.task.eval)
    trainer.add_callback(EvalEvery(every, trainer, now, start=now(), problems=problems))


def summary(parts: Parts, trainer: GRPOTrainer, rows: list[dict[str, Any]]) -> Cell:
    """What is kept of a run: problems solved, curves, and what the watch says."""
    broken = diverged_at(rows) is not None
    if broken:
        solved = "0" * len(parts.task.eval)
        formatted = 0.0
    else:
        after = evaluate_part(parts, trainer.model, "after")
        solved = "".join(str(int(one["correct"])) for one in after["transcripts"])
        formatted = after["greedy"]["rates"]["facts/formatted"]

    health = health_of(rows)
    times = values(rows, "step_time")
    return {
        "solved": solved,
        "accuracy": solved.count("1") / len(solved),
        "formatted": formatted,
        "diverged": broken,
        "steps_done": len(rows),
        "step_seconds": statistics.median(times) if times else None,
        "curve": [[row["step"], row["eval/greedy"]] for row in rows if "eval/greedy" in row],
        "dead_blocks": dead_blocks(rows),
        "health": [health.verdict, health.cause, health.story],
        "rows": {name: column(rows, name) for name in KEPT if any(name in row for row in rows)},
    }


def dead_blocks(rows: list[dict[str, Any]]) -> float | None:
    """The mean share of filtered blocks that made no step; None without a filter."""
    if not rows:
        return None

    shares = []
    for name in rows[-1]:
        if name.endswith("/dead_blocks"):
            shares += values(rows, name)
    return statistics.fmean(shares) if shares else None


def column(rows: list[dict[str, Any]], name: str) -> list[list[float]]:
    """[step, value] pairs to four digits; of a long run, means of ten."""
    pairs = [(row["step"], row[name]) for row in rows if name in row]
    size = 10 if len(rows) > LONG else 1

    means = []
    for first in range(0, len(pairs), size):
        block = pairs[first : first + size]
        mean = statistics.fmean(value for _, value in block)
        means.append([block[-1][0], float(f"{mean:.4g}")])
    return means
