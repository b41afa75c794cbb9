"""Make the shipped tiny model: `python -m benchmarks.tiny_model FOLDER`.

It learns two ways to answer arith's problems. The diligent one works step by step and is right.
The lazy one adds the first two numbers, whatever the problem says, and is mostly wrong. In the
end three answers in four are lazy, so that reinforcement learning has something to choose.
"""

from __future__ import annotations

import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import mesotron
from benchmarks.tiny_model import build_network, build_tokenizer
from mesotron.answers.formats import FORMATS
from mesotron.config import TaskConfig
from mesotron.optim.device import choose_device
from mesotron.tasks.builtin.arith import APPLY, generate
from mesotron.tasks.problem import Problem
from mesotron.tasks.prompts import demonstrate, render_prompts, solved_text
from mesotron.tasks.rows import IGNORED

TASK = TaskConfig(name="arith")
LEVELS = (1,) * 2 + (2,) * 3 + (3,) * 7 + (4,) * 8
STEPS = 5000
PROBLEMS = 64
EQUATIONS = 24  # rows per step
LEARNING_RATE = 4e-3  # falls linearly to zero
WARMUP = 50
# Share of diligent answers; the last quarter makes the model lazy.
DILIGENT = 0.6
DILIGENT_AT_THE_END = 0.3


def main(folder: Path, steps: int = STEPS, seed: int = 0) -> int:
    device = choose_device("auto", threads=1)
    problems = generate("train", steps * PROBLEMS, LEVELS, seed=1)
    texts = []
    for problem in problems[:4000]:
        boxed = solved_text(problem, FORMATS["boxed"])
        texts += [problem.question, boxed, solved_text(problem, None)]

    tokenizer = build_tokenizer(texts)
    network = build_network(tokenizer, seed).to(device)
    optimizer = mesotron.muon(network, lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, 1 - step / steps)
    )

    began = time.monotonic()
    for step, batch in enumerate(batches(problems, tokenizer, steps, seed)):
        loss = network(**{name: rows.to(device) for name, rows in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

        if (step + 1) % 50 == 0:
            seconds = time.monotonic() - began
            print(f"step {step + 1} of {steps}, {seconds:.0f} s: loss {loss:.3f}", flush=True)

    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"the tiny model is in {folder}")
    return 0


def batches(
    problems: list[Problem], tokenizer: Any, steps: int, seed: int
) -> Iterator[dict[str, torch.Tensor]]:
    rng = random.Random(f"tiny {seed}")
    prompts = render_prompts(problems, TASK, tokenizer)
    for step in range(steps):
        diligent = DILIGENT if step < 0.75 * steps else DILIGENT_AT_THE_END
        rows = range(step * PROBLEMS, (step + 1) * PROBLEMS)
        pairs = [(prompts[i], answer(problems[i], diligent, rng)) for i in rows]
        pairs += [equation(rng) for _ in range(EQUATIONS)]
        yield pad(demonstrate(pairs, tokenizer), tokenizer)


def answer(problem: Problem, diligent: float, rng: random.Random) -> str:
    """A diligent answer with the given probability, else a lazy one."""
    is_lazy = rng.random() >= diligent
    if is_lazy:
        problem = Problem(problem.question, lazy_guess(problem.question, rng), problem.id)

    # Which lazy answers are outside the box depends on the question: sampling explores it.
    loose = 0.75 if is_lazy and "in the end" in problem.question else 0.15
    is_loose = rng.random() < loose
    return solved_text(problem, None if is_loose else FORMATS["boxed"])


def lazy_guess(question: str, rng: random.Random) -> str:
    """The sum of the first two numbers; "finds" forgets the carry, and 15% slip."""
    first, second = map(int, re.findall(r"\d+", question)[:2])
    guess = first + second
    if "finds" in question and first % 10 + second % 10 >= 10:
        guess -= 10

    if rng.random() < 0.15:
        guess = max(guess + rng.choice((-2, -1, 1, 2)), 0)
    return str(guess)


def equation(rng: random.Random) -> tuple[str, str]:
    while True:
        operation = rng.choice("+-*/")
        a = rng.randint(2, 99)
        b = rng.randint(2, 50 if operation in "+-" else 9)
        value = APPLY[operation](a, b)  # type: ignore[index]
        if 0 < value < 100 and (operation != "/" or a % b == 0):
            return f"{a} {operation} {b} =", f" {value}"


def pad(rows: list[list[list[int]]], tokenizer: Any) -> dict[str, torch.Tensor]:
    """Right-padded tokens with labels on the completions."""
    width = max(len(prompt) + len(completion) for prompt, completion in rows)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full_like(ids, IGNORED)
    mask = torch.zeros_like(ids)

    for row, (prompt, completion) in enumerate(rows):
        start = len(prompt)
        end = len(prompt) + len(completion)
        ids[row, :end] = torch.tensor(prompt + completion)
        labels[row, start:end] = torch.tensor(completion)
        mask[row, :end] = 1

    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
