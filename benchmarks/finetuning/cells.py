"""One cell in a worker: supervised steps on word problems, with forgetting.

Linear warm-up over a tenth of the steps, then linear decay to zero; batches of solved problems; the
weights of the transformer's linear layers are trained, by LoRA or themselves, and everything else
is frozen, so that all ranks and "full" train the same matrices. Float32 weights, bfloat16 autocast
on a GPU. Logits are computed for the completions' tokens alone, which are a third of all and whose
vocabulary is most of the work. A process loads the model and its texts once.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks._lib.crew import torch_process
from benchmarks._lib.lessons import Lesson, make_lesson
from benchmarks.finetuning.plan import CONTENDERS, Cell
from mesotron.config import ModelConfig, TaskConfig
from mesotron.models.load import load_model
from mesotron.optim import BUILDERS
from mesotron.optim.clipping import clip_gradients
from mesotron.probes.forgetting import read_text, text_blocks, text_nll
from mesotron.tasks.load import load_task

GRACE = 25.0  # seconds for what is being evaluated when the time is up
LEVELS = (3, 4, 5)
ALPHA = 32.0
ROWS = 32  # of an evaluation


def run_cell(cell: Cell, settings: dict[str, Any], deadline: float) -> Cell | None:
    with torch_process(settings) as given:
        return supervised_cell(cell, given, deadline)


def options_of(cell: Cell) -> tuple[str, dict[str, Any]]:
    """The name of the optimizer and its options."""
    optim, lora, leash = CONTENDERS[cell["contender"]]
    options: dict[str, Any] = {"weight_decay": 0.0}
    if optim != "adamw":
        options["fused"] = False  # kernels that would compile longer than a cell runs
        if leash:
            options["leash"] = leash
        if lora:
            options["lora"] = lora

    if optim == "pion":
        options["cutoff"] = "aligned"
    return optim, options


class Base:
    """What all cells of a process share: the starting model and its view of the held-out texts."""

    def __init__(self, given: Any) -> None:
        self.given = given
        self.device = torch.device(given.device)
        config = ModelConfig(name=given.folder, dtype="float32")
        self.model, self.tokenizer = load_model(config, self.device)

        self.task_config = TaskConfig(
            name="arith",
            levels=LEVELS,
            num_train=20_000,
            num_eval=given.held_out,
            format="boxed" if given.folder == "tiny" else "answer",
        )
        self.task = load_task(self.task_config)

        self.known: dict[tuple[int, int], list[Lesson]] = {}
        self.blocks = text_blocks(self.tokenizer, read_text())
        self.held_out = self.batches(self.task.eval, ROWS)
        self.before = self.measure(self.model)

    def batches(self, problems: Sequence[Any], size: int) -> list[Lesson]:
        made = []
        for first in range(0, len(problems), size):
            some = problems[first : first + size]
            made.append(make_lesson(some, self.task, self.task_config, self.tokenizer, self.device))
        return made

    def lessons(self, seed: int, steps: int) -> list[Lesson]:
        """The training batches of a seed."""
        if (seed, steps) not in self.known:
            order = list(range(len(self.task.train)))
            random.Random(f"finetuning {seed}").shuffle(order)
            size = self.given.batch
            chosen = [self.task.train[k] for k in order[: size * steps]]
            self.known[seed, steps] = self.batches(chosen, size)
        return self.known[seed, steps]

    @torch.no_grad()
    def measure(self, model: Any) -> dict[str, float]:
        """Held-out loss, share of problems whose solution greedy decoding would write exactly,
        forward KL from the starting model on the same tokens, and the nll of general text."""
        total = 0.0
        kl = 0.0
        right = 0
        tokens = 0
        problems = 0

        with self.autocast():
            for lesson in self.held_out:
                logp = logits_of(model, lesson).float().log_softmax(-1)  # [N, V]
                start = logits_of(self.model, lesson).float().log_softmax(-1)
                total -= logp.gather(1, lesson.targets[:, None]).sum().item()
                kl += (start.exp() * (start - logp)).sum().item()

                wrong = (logp.argmax(-1) != lesson.targets).float()
                missed = torch.zeros(len(lesson.ids), device=wrong.device)  # [B]
                missed.index_add_(0, lesson.problem, wrong)
                right += int((missed == 0).sum())
                tokens += len(lesson.targets)
                problems += len(lesson.ids)

            nll = text_nll(model, self.blocks)

        return {
            "loss": total / tokens,
            "accuracy": right / problems,
            "kl": kl / tokens,
            "nll": nll,
        }

    def autocast(self) -> Any:
        return torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda")


def logits_of(model: Any, lesson: Lesson) -> torch.Tensor:
    with_adapter = hasattr(model, "get_base_model")
    return lesson.logits(model.get_base_model() if with_adapter else model)


@cache
def base_of(folder: str, device: str, held_out: int, batch: int) -> Base:
    given = argparse.Namespace(folder=folder, device=device, held_out=held_out, batch=batch)
    return Base(given)


def trainable_model(base: Base, cell: Cell) -> Any:
    """A copy of the start whose linear layers train, by LoRA or themselves."""
    model = copy.deepcopy(base.model)
    torch.manual_seed(cell["seed"])

    if cell["rank"]:
        import peft

        lora = peft.LoraConfig(r=cell["rank"], lora_alpha=ALPHA, target_modules="all-linear")  # pyright: ignore
        return peft.get_peft_model(model, lora)

    for p in model.parameters():
        p.requires_grad_(False)

    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not head:
            module.weight.requires_grad_(True)
    return model


def supervised_cell(cell: Cell, given: Any, deadline: float) -> Cell | None:
    """Train on solved problems and measure; None if time was up."""
    began = time.time()
    base = base_of(given.folder, given.device, given.held_out, given.batch)
    model = trainable_model(base, cell)
    model.train()

    name, options = options_of(cell)
    optimizer = BUILDERS[name](model, cell["rate"], **options)
    steps = given.steps
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min((k + 1) / warm, (steps - k) / (steps - warm + 1))
    )

    for step, lesson in enumerate(base.lessons(cell["seed"], steps)):
        with base.autocast():
            logits = logits_of(model, lesson)
        loss = cross_entropy(logits.float(), lesson.targets)
        loss.backward()

        clip_gradients(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

        if time.time() > deadline + GRACE / 2:
            return None
        if step % 20 == 0 and not math.isfinite(loss.item()):
            break

    stats = optimizer.stats()
    leashes = []
    for key, value in stats.items():
        if key.endswith("/distance"):
            leashes.append(value)

    found = base.measure(model)
    return cell | {
        **found,
        "moved": distance(model, base.model),
        "forgetting": found["nll"] - base.before["nll"],
        "leash": max(leashes, default=None),
        "before": base.before,
        "seconds": time.time() - began,
    }


@torch.no_grad()
def distance(model: Any, start: Any) -> float:
    """The Frobenius distance to the start over the start's norm, all trained matrices together."""
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()

    first = dict(start.named_parameters())
    moved = 0.0
    size = 0.0
    for name, p in model.named_parameters():
        if p.ndim == 2 and "embed" not in name and "lm_head" not in name:
            moved += (p - first[name]).square().sum().item()
            size += first[name].square().sum().item()
    return (moved / max(size, 1e-30)) ** 0.5
