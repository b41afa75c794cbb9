"""Warm starts: a small LoRA adapter for each task, trained on solved problems, merged at loading.

    python -m benchmarks.tournament.warm --model FOLDER --state STATE

Stops at the first look at which `ENOUGH` of the first `LOOKS` validation problems are solved. All
contenders and seeds of a task start from the same merged weights, which STATE keeps; their hash is
in each cell. The protocol's own were made on an x86-64 CPU. Another CPU or another torch may round
differently and so give other bits: warm.json has the protocol's hashes, and git has its files:

    git show 39a8c89f:benchmarks/tournament/starts/sums.safetensors > ADAPTER

where ADAPTER is STATE/warm/sums/adapter.safetensors.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import time
from pathlib import Path
from typing import Any

from benchmarks._lib.results import read_json, write_json
from benchmarks.tournament.tasks import SYSTEM, TASKS, write_tasks

RANK = 4
ALPHA = 16.0
RATE = 1e-3
BATCH = 16
SEED = 77
LOOK_EVERY = 10
LONGEST = 256
LOOKS = 128
ENOUGH = 0.10
FILE = "adapter.safetensors"
PUBLISHED = Path(__file__).with_name("warm.json")  # of the protocol's starts


def adapter_of(name: str, state: Path) -> Path:
    return state / "warm" / name / FILE


def make(name: str, folder: str, state: Path, say: Any = print) -> Path:
    """A task's adapter; trained in float32 on the CPU, as the protocol says, unless it is there."""
    path = adapter_of(name, state)
    if not path.exists():
        train(name, folder, state, "cpu", say)

    made = hash_of(path)
    published = read_json(PUBLISHED)[name]["hash"]
    if made != published:
        say(f"{name}: this start is {made}, the protocol's is {published}")

    return path


def task_config(name: str, state: Path, use: str, num_eval: int) -> Any:
    from mesotron.config import TaskConfig

    folder = str(state / "tasks" / name / use)

    return TaskConfig(
        data=(folder,),
        format="answer",
        system=SYSTEM,
        num_eval=num_eval,
    )


def batches(task: Any, config: Any, tokenizer: Any, device: Any) -> Any:
    """Solved problems in the order of the seed; `at` are the flat positions before each target."""
    import torch

    from mesotron.tasks.prompts import demonstrate, render_prompts, solved_text

    order = list(range(len(task.train)))
    random.Random(SEED).shuffle(order)

    for first in range(0, BATCH * LONGEST, BATCH):
        problems = [task.train[k] for k in order[first : first + BATCH]]
        prompts = render_prompts(problems, config, tokenizer)
        solved = [solved_text(problem, task.format) for problem in problems]
        pairs = demonstrate(list(zip(prompts, solved, strict=True)), tokenizer)
        long = max(sum(map(len, pair)) for pair in pairs)
        ids = torch.full((len(pairs), long), tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        at = []

        targets = []
        for row, (prompt, completion) in enumerate(pairs):
            used = len(prompt) + len(completion)
            ids[row, :used], mask[row, :used] = torch.tensor(prompt + completion), 1
            start = row * long + len(prompt) - 1
            at += range(start, start + len(completion))
            targets += completion

        made = (ids, mask, torch.tensor(at), torch.tensor(targets))
        yield tuple(one.to(device) for one in made)


def train(name: str, folder: str, state: Path, device: str, say: Any = print) -> dict[str, Any]:
    """Train, save and measure one task's adapter; the record of it."""
    import peft
    import torch
    from safetensors.torch import save_file

    from mesotron.config import ModelConfig
    from mesotron.evaluate.evaluate import evaluate
    from mesotron.models.load import load_model
    from mesotron.tasks.load import load_task

    began = time.time()
    config = task_config(name, state, "tuning", LOOKS)
    task = load_task(config)
    model, tokenizer = load_model(ModelConfig(name=folder, dtype="float32"), torch.device(device))
    torch.manual_seed(SEED)
    lora = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")  # pyright: ignore
    net = peft.get_peft_model(model, lora)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], RATE)
    base = net.get_base_model()

    def look(step: int) -> float:
        found = evaluate(
            net, tokenizer, task.eval, config, max_tokens=TASKS[name].max_tokens, samples=0
        )
        say(f"{name}: step {step}, {found.greedy.strict.value:.3f}, {time.time() - began:.0f} s")
        net.train()

        return found.greedy.strict.value

    curve = [(0, look(0))]
    for step, (ids, mask, at, targets) in enumerate(batches(task, config, tokenizer, device), 1):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, step / 10)

        with torch.autocast("cuda", torch.bfloat16, enabled=device == "cuda"):
            hidden = base.model(
                input_ids=ids,
                attention_mask=mask,
                use_cache=False,
            )
            logits = base.lm_head(hidden.last_hidden_state.flatten(0, 1)[at])

        torch.nn.functional.cross_entropy(logits.float(), targets).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        if step % LOOK_EVERY == 0:
            curve.append((step, look(step)))
            if curve[-1][1] >= ENOUGH:
                break

    place = state / "warm" / name
    place.mkdir(parents=True, exist_ok=True)
    weights = {k: v.half().cpu() for k, v in peft.get_peft_model_state_dict(net).items()}
    save_file(weights, place / FILE)

    record = {
        "task": name,
        "curve": curve,
        "hash": hash_of(place / FILE),
        "device": device,
        "seconds": time.time() - began,
    }

    write_json(record, place / "record.json")
    return record


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def start(folder: str, adapter: Path | None, device: str) -> tuple[Any, Any]:
    """The model that a task starts from, the adapter merged into it, and its tokenizer."""
    import peft
    import torch
    from safetensors.torch import load_file

    from mesotron.config import ModelConfig
    from mesotron.models.load import load_model

    model, tokenizer = load_model(ModelConfig(name=folder, dtype="float32"), torch.device(device))
    if adapter is None:
        return model, tokenizer

    lora = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")  # pyright: ignore
    net = peft.get_peft_model(model, lora)
    weights = {name: value.float() for name, value in load_file(adapter).items()}
    peft.set_peft_model_state_dict(net, weights)
    model = net.merge_and_unload()

    return model.requires_grad_(True), tokenizer  # which peft had frozen


def main() -> None:
    from benchmarks.smollm2.place import model_folder

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder with a .gguf file, or a model")
    parser.add_argument("--state", type=Path, required=True)

    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=TASKS,
        default=list(TASKS),
    )

    given = parser.parse_args()
    folder = str(model_folder(given))
    write_tasks(given.state / "tasks")

    for name in given.tasks:
        make(name, folder, given.state, lambda text: print(text, flush=True))


if __name__ == "__main__":
    main()
