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
import gc
import math
import os
import random
import time
from functools import cache
from typing import Any

from benchmarks.finetuning.plan import CONTENDERS, Cell

GRACE = 25.0  # seconds for what is being evaluated when the time is up
LEVELS = (3, 4, 5)
ALPHA = 32.0
ROWS = 32  # of an evaluation


def run_cell(cell: Cell, settings: dict[str, Any], deadline: float) -> Cell | None:
    given = argparse.Namespace(**settings)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    import torch

    torch.set_num_threads(given.threads)
    torch.set_float32_matmul_precision("high")  # for what autocast does not cover

    try:
        return supervised_cell(cell, given, deadline)
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def options_of(cell: Cell) -> tuple[str, dict[str, Any]]:
    optim, lora, leash = CONTENDERS[cell["contender"]]
    options: dict[str, Any] = {"weight_decay": 0.0}
    if optim != "adamw":
        options["fused"] = False  # kernels that would compile longer than a cell runs
        options |= {"leash": leash} if leash else {}
        options |= {"lora": lora} if lora else {}

    if optim == "pion":
        options["cutoff"] = "aligned"

    return optim, options


class Base:
    """What all cells of a process share: the starting model and its view of the held-out texts."""

    def __init__(self, given: Any) -> None:
        import torch

        from mesotron.config import ModelConfig, TaskConfig
        from mesotron.models.load import load_model
        from mesotron.probes.forgetting import read_text, text_blocks
        from mesotron.tasks.load import load_task

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
        self.read: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self.blocks = text_blocks(self.tokenizer, read_text())
        self.held_out = self.batches(self.task.eval, ROWS, range(len(self.task.eval)))
        self.before = self.measure(self.model)

    def batches(self, problems: Any, size: int, order: Any) -> list[dict[str, Any]]:
        """Solved problems, padded on the right; `at` are the flat positions that predict a token
        of a completion, `targets` those tokens and `problem` the row of each."""
        import torch

        from mesotron.tasks.prompts import demonstrate, render_prompts, solved_text

        made = []

        order = list(order)
        for first in range(0, len(order), size):
            some = [problems[k] for k in order[first : first + size]]
            prompts = render_prompts(some, self.task_config, self.tokenizer, self.task.examples)
            solved = [solved_text(problem, self.task.format) for problem in some]
            pairs = demonstrate(list(zip(prompts, solved, strict=True)), self.tokenizer)
            long = max(sum(map(len, pair)) for pair in pairs)
            pad = self.tokenizer.pad_token_id
            names = ("input_ids", "attention_mask", "at", "targets", "problem")

            rows: dict[str, list] = {name: [] for name in names}
            for k, (prompt, completion) in enumerate(pairs):
                used = len(prompt) + len(completion)
                rows["input_ids"].append([*prompt, *completion, *[pad] * (long - used)])
                rows["attention_mask"].append([1] * used + [0] * (long - used))
                first = k * long + len(prompt) - 1
                rows["at"] += range(first, first + len(completion))
                rows["targets"] += completion
                rows["problem"] += [k] * len(completion)

            made.append({k: torch.tensor(v, device=self.device) for k, v in rows.items()})

        return made

    def lessons(self, seed: int, steps: int) -> list[dict[str, Any]]:
        """The training batches of a seed."""
        if (seed, steps) not in self.read:
            order = list(range(len(self.task.train)))
            random.Random(f"finetuning {seed}").shuffle(order)
            size = self.given.batch
            self.read[seed, steps] = self.batches(self.task.train, size, order[: size * steps])

        return self.read[seed, steps]

    def measure(self, model: Any) -> dict[str, float]:
        """Held-out loss, share of problems whose solution greedy decoding would write exactly,
        forward KL from the starting model on the same tokens, and the nll of general text."""
        import torch

        from mesotron.probes.forgetting import text_nll

        total = right = tokens = problems = kl = 0.0
        with torch.no_grad(), self.autocast():
            for batch in self.held_out:
                logp = self.logits(model, batch).float().log_softmax(-1)
                start = self.logits(self.model, batch).float().log_softmax(-1)
                targets = batch["targets"]
                size = len(batch["input_ids"])
                total -= logp.gather(1, targets[:, None]).sum().item()
                wrong = (logp.argmax(-1) != targets).float()
                missed = torch.zeros(size, device=wrong.device).index_add(
                    0, batch["problem"], wrong
                )
                right += (missed == 0).sum().item()
                kl += (start.exp() * (start - logp)).sum().item()
                tokens += len(targets)
                problems += size

            nll = text_nll(model, self.blocks)

        return {
            "loss": total / tokens,
            "accuracy": right / problems,
            "kl": kl / tokens,
            "nll": nll,
        }

    def logits(self, model: Any, batch: dict[str, Any]) -> Any:
        """Of the tokens of the completions, [tokens, vocabulary]."""
        net = model.get_base_model() if hasattr(model, "get_base_model") else model
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        hidden = net.model(**inputs, use_cache=False).last_hidden_state

        return net.lm_head(hidden.flatten(0, 1)[batch["at"]])

    def autocast(self) -> Any:
        import torch

        return torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda")


@cache
def base_of(folder: str, device: str, held_out: int, batch: int) -> Base:
    names = {
        "folder": folder,
        "device": device,
        "held_out": held_out,
        "batch": batch,
    }
    return Base(argparse.Namespace(**names))


def trainable_model(base: Base, cell: Cell) -> Any:
    """A copy of the start whose linear layers train, by LoRA or themselves."""
    import torch
    from torch import nn

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
    import torch

    from mesotron.optim import BUILDERS
    from mesotron.optim.clipping import clip_gradients

    began = time.time()
    base = base_of(given.folder, given.device, given.held_out, given.batch)
    model = trainable_model(base, cell)
    model.train()
    name, options = options_of(cell)
    optimizer = BUILDERS[name](model, cell["rate"], **options)
    steps = given.steps
    warm = max(1, given.steps // 10)

    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min((k + 1) / warm, (steps - k) / (steps - warm + 1))
    )
    for step, batch in enumerate(base.lessons(cell["seed"], steps)):
        with base.autocast():
            logits = base.logits(model, batch)

        loss = torch.nn.functional.cross_entropy(logits.float(), batch["targets"])
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
    found = base.measure(model) | distances(model, base.model)
    found["forgetting"] = found["nll"] - base.before["nll"]
    found["leash"] = max((x for k, x in stats.items() if k.endswith("/distance")), default=None)

    return cell | found | {"before": base.before, "seconds": time.time() - began}


def distances(model: Any, start: Any) -> dict[str, float]:
    """The Frobenius distance to the start over the start's norm, all trained matrices together."""
    import torch

    moved = size = 0.0
    with torch.no_grad():
        if hasattr(model, "merge_and_unload"):
            model = model.merge_and_unload()

        first = dict(start.named_parameters())
        for name, p in model.named_parameters():
            if p.ndim == 2 and "embed" not in name and "lm_head" not in name:
                moved += (p - first[name]).square().sum().item()
                size += first[name].square().sum().item()

    return {"moved": (moved / max(size, 1e-30)) ** 0.5}
