"""Supervised steps on solved problems: warm starts, and gradients to compare with RLVR's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.smollm2.plan import Cell, warm_folder
from benchmarks.smollm2.training import config_of
from mesotron.config import OptimConfig, SftConfig, TrainConfig
from mesotron.evaluate.evaluate import evaluate
from mesotron.models.load import load_model
from mesotron.rlvr.optimizer import build_optimizer
from mesotron.tasks.load import load_task
from mesotron.tasks.problem import Task
from mesotron.tasks.rows import IGNORED, make_demonstrations

ROWS = 8  # of a batch that are in memory at once
RATE = 2e-5
GSM8K_ROWS = 2 * 7473  # two epochs


class Supervised:
    """A model, its problems and their solutions in batches.

    Args:
        config: whose model, task and device are used; a batch has its rollout's prompts.
        steps: most batches that are needed.
    """

    def __init__(self, config: TrainConfig, steps: int) -> None:
        self.config = config
        self.device = torch.device(config.device)
        self.task: Task = load_task(config.task)
        self.model, self.tokenizer = load_model(config.model, self.device)
        self.batch = config.rollout.prompts

        solved = SftConfig(model=config.model, task=config.task, steps=steps, batch=self.batch)
        self.rows = make_demonstrations(self.task, solved, self.tokenizer)
        self.model.train()

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Batches in their order, padded on the right."""
        for first in range(0, len(self.rows), self.batch):
            rows = self.rows[first : first + self.batch]
            ones = [[1] * len(ids) for ids in rows["input_ids"]]
            yield {
                "input_ids": self.padded(rows["input_ids"], self.tokenizer.pad_token_id),
                "labels": self.padded(rows["labels"], IGNORED),
                "attention_mask": self.padded(ones, 0),
            }

    def padded(self, rows: list[list[int]], value: int) -> Tensor:
        """[B, S], filled up on the right."""
        longest = max(map(len, rows))
        filled = [row + [value] * (longest - len(row)) for row in rows]
        return torch.tensor(filled, device=self.device)

    def backward(self, batch: dict[str, Tensor]) -> None:
        """The gradient of the mean over the completions' tokens, a few rows at a time; in bfloat16
        on a GPU."""
        learned = (batch["labels"][:, 1:] != IGNORED).sum()
        for first in range(0, len(batch["labels"]), ROWS):
            piece = {name: x[first : first + ROWS] for name, x in batch.items()}
            share = (piece["labels"][:, 1:] != IGNORED).sum() / learned
            with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
                loss = self.model(**piece).loss  # pyright: ignore
            (loss * share).backward()

    def accuracy(self) -> float:
        """Greedy, on the held-out problems."""
        found = evaluate(
            self.model,
            self.tokenizer,
            self.task.eval,
            self.config.task,
            examples=self.task.examples,
            max_tokens=self.config.rollout.max_tokens,
            samples=0,
        )
        return found.greedy.strict.value

    def train(self, until: Callable[[int], bool]) -> None:
        """AdamW steps until stopped, or until the batches are used up."""
        optimizer = build_optimizer(self.model, OptimConfig(name="adamw", lr=RATE))
        for step, batch in enumerate(self.batches(), 1):
            self.backward(batch)
            optimizer.step()
            optimizer.zero_grad()
            if until(step):
                return


def warm_cell(cell: Cell, given: Any, deadline: float) -> Cell | None:
    """Train the model that a part starts from; None if time was up."""
    began = time.time()
    usual: Cell = {"optim": "adamw", "objective": "grpo", "rate": RATE, "gain": 1.0}
    full = usual | {"steps": 1, "set": []} | cell
    config = config_of(full, given, Path("unused"))
    made = Supervised(config, given.gsm8k_sft or GSM8K_ROWS // config.rollout.prompts)
    curve = [[0, made.accuracy()]]
    made.train(lambda _: time.time() > deadline)
    if time.time() > deadline:
        return None

    curve.append([len(made.rows) // made.batch, made.accuracy()])
    folder = warm_folder(given.state, cell["part"])
    draft = folder.with_suffix(".draft")
    made.model.save_pretrained(draft)
    made.tokenizer.save_pretrained(draft)
    draft.rename(folder)
    return cell | {"curve": curve, "accuracy": curve[-1][1], "seconds": time.time() - began}
