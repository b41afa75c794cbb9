"""Builds a contender's trainer: plain TRL with AdamW, or what `mesotron train` builds.

Task, prompt, reward and evaluation are those of the recipe for everybody.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks._lib.plain_trl import plain_reward
from benchmarks._lib.random_model import random_model
from benchmarks.speedrun.entries import NAMES, RECIPE
from mesotron.answers.verify import Verifier
from mesotron.compare.change import change
from mesotron.config import TrainConfig
from mesotron.evaluate.evaluate import evaluate
from mesotron.recipes import make_recipe
from mesotron.rlvr.callbacks import WATCHED, RunLog
from mesotron.rlvr.lifecycle import quiet_libraries
from mesotron.rlvr.optimizer import OptimizerLog
from mesotron.rlvr.parts import Parts, build_trainer, load
from mesotron.rlvr.session import make_watch
from mesotron.runs import RunFolder, describe_environment
from mesotron.runs.console import LiveView
from mesotron.tasks.rows import make_rows

VLLM_SHARE = 0.05  # of the GPU's memory: several runs share it
VLLM_LENGTH = 512


def make_config(
    name: str, seed: int, model: str | None, small: bool, common: Sequence[str] = ()
) -> TrainConfig:
    """The recipe with a contender's changes.

    Args:
        name: one of `NAMES`.
        seed: of training.
        model: a name or place of a model instead of SmolLM2.
        small: few short rollouts in float32, to try everything on a CPU.
        common: NAME=VALUE settings of all contenders, such as task.few_shot=8.
    """
    config = change(make_recipe(RECIPE), common)
    changes = {"rollout.fast": False, **NAMES[name]}
    if name.startswith("stock"):
        changes["model.dtype"] = "float32"  # TRL's way: float32 weights, bfloat16 products

    if small:
        changes |= {
            "model.dtype": "float32",
            "rollout.prompts": 4,
            "rollout.generations": 4,
            "task.num_eval": 16,
        }

    if small or model is not None:
        folder = Path(tempfile.gettempdir()) / "speedrun-model"
        changes["model.name"] = model or str(random_model(folder, "smollm2"))

    # Constant rates, since the number of steps is unknown; a contender with a decaying rate names
    # its steps and loses if they do not suffice.
    config = replace(config, seed=seed, steps=100_000, save_every=0)
    for path, value in changes.items():
        part, _, field = path.rpartition(".")
        if part:
            value = replace(getattr(config, part), **{field: value})
        config = replace(config, **{part or field: value})
    return config


class Contestant:
    """A trainer that is ready to run, and its greedy accuracy.

    Args:
        name: one of `NAMES`.
        config: from `make_config`.
        folder: for what it writes.
    """

    def __init__(self, name: str, config: TrainConfig, folder: Path) -> None:
        quiet_libraries()
        self.name = name
        self.config = config
        self.verifier = Verifier(config.reward.timeout)
        self.parts: Parts = load(config, self.verifier)
        environment = describe_environment(str(self.parts.device), config.seed)
        self.run = RunFolder.create(folder, config, environment)
        self.trainer: Any
        if name.startswith("stock"):
            self.trainer = make_stock(self.parts, folder)
        else:
            self.trainer = make_ours(self.parts, self.run)

    def accuracy(self) -> float:
        """Greedy accuracy on the recipe's held-out problems."""
        parts = self.parts
        trainer = self.trainer
        trainer.model.eval()

        with nullcontext() if self.name.startswith("stock") else trainer.averaged():
            found = evaluate(
                trainer.model,
                parts.tokenizer,
                parts.task.eval,
                self.config.task,
                examples=parts.task.examples,
                name=self.name,
                samples=0,
                judge=parts.judge,
                max_tokens=self.config.rollout.max_tokens,
                seed=self.config.seed,
            )

        trainer.model.train()
        return found.to_json()["greedy"]["strict"]["value"]


def make_ours(parts: Parts, run: RunFolder) -> Any:
    """What `mesotron train` trains with: its log, its watch and its probes are running."""
    trainer = build_trainer(parts, run)
    view = LiveView(parts.config.steps, WATCHED, Console(quiet=True))
    trainer.add_callback(make_watch(trainer, parts, run))
    trainer.add_callback(RunLog(run, view, trainer))
    trainer.add_callback(OptimizerLog(run))

    return trainer


def make_stock(parts: Parts, folder: Path, vllm: bool = False, **more: Any) -> Any:
    """Plain TRL: its own AdamW, schedule and sampling, its defaults where they cost no time; `vllm`
    samples with vLLM in the same process, `more` are fields of `GRPOConfig`."""
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    config = parts.config
    on_cpu = parts.device.type == "cpu"
    rollout = config.rollout
    rows_of_step = rollout.prompts * rollout.generations
    micro = rollout.micro_batch or rows_of_step

    vllm_options = {
        "vllm_gpu_memory_utilization": VLLM_SHARE,
        "vllm_max_model_length": VLLM_LENGTH,
    }
    args = GRPOConfig(
        output_dir=str(folder / "checkpoints"),
        max_steps=config.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows_of_step // micro,
        num_generations=rollout.generations,
        max_completion_length=rollout.max_tokens,
        learning_rate=config.optim.lr,
        lr_scheduler_type=config.optim.schedule,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=config.seed,
        use_cpu=on_cpu,
        bf16=not on_cpu,
        dataloader_pin_memory=not on_cpu,
        use_vllm=vllm,
        vllm_mode="colocate",
        **(vllm_options | more),
    )

    rows = make_rows(parts.task, config.task, parts.tokenizer)
    trainer = GRPOTrainer(
        model=parts.model,
        reward_funcs=plain_reward(parts.reward, parts.tokenizer),
        args=args,
        train_dataset=Dataset.from_dict(rows.to_dict()),  # whose rows are read one by one
        processing_class=parts.tokenizer,
    )

    trainer.remove_callback(PrinterCallback)
    return trainer
