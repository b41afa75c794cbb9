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
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._lib.results import read_json, write_json
from benchmarks.tournament.tasks import SYSTEM, TASKS, write_tasks

if TYPE_CHECKING:
    from benchmarks._lib.lessons import Lesson

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
        train(name, folder, state, say)

    made = hash_of(path)
    published = read_json(PUBLISHED)[name]["hash"]
    if made != published:
        say(f"{name}: this start is {made}, the protocol's is {published}")
    return path


def task_config(name: str, state: Path, use: str, num_eval: int) -> Any:
    from mesotron.config import TaskConfig

    folder = str(state / "tasks" / name / use)
    return TaskConfig(data=(folder,), format="answer", system=SYSTEM, num_eval=num_eval)


def lessons(task: Any, config: Any, tokenizer: Any) -> Iterator[Lesson]:
    """Solved problems in the order of the seed."""
    import torch

    from benchmarks._lib.lessons import make_lesson

    order = list(range(len(task.train)))
    random.Random(SEED).shuffle(order)
    for first in range(0, BATCH * LONGEST, BATCH):
        problems = [task.train[k] for k in order[first : first + BATCH]]
        yield make_lesson(problems, task, config, tokenizer, torch.device("cpu"))


def with_adapter(model: Any) -> Any:
    import peft

    lora = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")  # pyright: ignore
    return peft.get_peft_model(model, lora)


def train(name: str, folder: str, state: Path, say: Any) -> None:
    """Train one task's adapter on the CPU until it solves enough, and save it."""
    import torch

    from mesotron.config import ModelConfig
    from mesotron.evaluate.evaluate import evaluate
    from mesotron.models.load import load_model
    from mesotron.tasks.load import load_task

    began = time.time()
    config = task_config(name, state, "tuning", LOOKS)
    task = load_task(config)
    cpu = torch.device("cpu")
    model, tokenizer = load_model(ModelConfig(name=folder, dtype="float32"), cpu)
    torch.manual_seed(SEED)
    net = with_adapter(model)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], RATE)

    def look(step: int) -> float:
        max_tokens = TASKS[name].max_tokens
        found = evaluate(net, tokenizer, task.eval, config, max_tokens=max_tokens, samples=0)
        accuracy = found.greedy.strict.value
        say(f"{name}: step {step}, {accuracy:.3f}, {time.time() - began:.0f} s")
        net.train()
        return accuracy

    curve = [(0, look(0))]
    for step, lesson in enumerate(lessons(task, config, tokenizer), 1):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, step / 10)
        update(net, lesson, optimizer)

        if step % LOOK_EVERY == 0:
            curve.append((step, look(step)))
            if curve[-1][1] >= ENOUGH:
                break

    path = adapter_of(name, state)
    save(net, path)
    record = {"task": name, "curve": curve, "hash": hash_of(path), "device": "cpu"}
    write_json(record | {"seconds": time.time() - began}, path.with_name("record.json"))


def update(net: Any, lesson: Lesson, optimizer: Any) -> None:
    """One step on the likelihood of the completions."""
    import torch

    logits = lesson.logits(net.get_base_model())
    torch.nn.functional.cross_entropy(logits.float(), lesson.targets).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def save(net: Any, path: Path) -> None:
    """Write the adapter's weights in float16."""
    import peft
    from safetensors.torch import save_file

    weights = peft.get_peft_model_state_dict(net)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.half().cpu() for name, value in weights.items()}, path)


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

    net = with_adapter(model)
    weights = {name: value.float() for name, value in load_file(adapter).items()}
    peft.set_peft_model_state_dict(net, weights)

    merged = net.merge_and_unload()
    return merged.requires_grad_(True), tokenizer  # which peft had frozen


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
