r"""A calculator that the tiny model learns to call, in minutes on a CPU.

    python examples/calculator.py out
    mesotron train --model out/model --data out/data --tools examples/calculator.py:calculate \
        --steps 40 --lr 3e-3 --max-tokens 48

The problems are products of numbers with two digits, which the tiny model cannot compute. The first
command writes them, and teaches the syntax of a call, `[12 * 70]`, by solved problems of which one
in five calls the calculator. The second is reinforcement learning: only the answer is rewarded, and
the model finds out that a call pays.
"""

import json
import random
import re
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import mesotron
from mesotron.answers.formats import FORMATS
from mesotron.config import ModelConfig, TaskConfig
from mesotron.models.load import load_model
from mesotron.tasks.builtin import arith
from mesotron.tasks.problem import Problem
from mesotron.tasks.prompts import build_prompt

CALLS = 0.2  # share of the demonstrations that call the calculator
STEPS = 100
BATCH = 32
RATE = 3e-3
# The roles are tokens of the tiny model, which knows no role "tool": a result comes from the user.
TEMPLATE = (
    "{% for m in messages %}{{ '<|user|>= ' if m.role == 'tool' else '<|' + m.role + '|>' }}"
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}{% set f = call.function %}"
    "{% if f.name == 'calculate' and f.arguments.expression is defined %}"
    "{{ '[' + f.arguments.expression + ']' }}"
    "{% else %}{{ '[' + f.name + ' ' + f.arguments | tojson + ']' }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# How Transformers reads a call in a completion.
CALL = {"name": "calculate", "arguments": {"expression": "{content}"}}
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "[",
            "close": "]",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": CALL},
        },
        "content": {"close_pattern": r"<\|im_end\|>|$", "content": "text"},
    },
}


def calculate(expression: str) -> str:
    """Compute a sum, difference, product or quotient of two whole numbers.

    Args:
        expression: such as 12 * 7.
    """
    match = re.fullmatch(r"\s*(\d{1,6}) *([-+*/]) *(\d{1,6})\s*", expression)
    if match is None:
        raise ValueError("write two numbers and one of + - * /")
    return str(arith.APPLY[match[2]](int(match[1]), int(match[3])))


def make_problems(count: int, seed: int) -> list[Problem]:
    rng = random.Random(seed)
    problems = {}
    while len(problems) < count:
        a = rng.randint(11, 99)
        b = rng.randint(11, 99)
        things = rng.choice(arith.OBJECTS)
        one, other = rng.sample(arith.NAMES, 2)

        question = (
            f"{one} has {a} {things}. {other} has {b} times as many as {one}. "
            f"How many {things} does {other} have now?"
        )

        steps = f"{a} * {b} = {a * b}"
        problems[question] = Problem(
            question,
            str(a * b),
            f"product-{len(problems)}",
            None,
            steps,
        )

    return list(problems.values())


def write_data(problems: list[Problem], path: Path) -> None:
    rows = [{"question": one.question, "answer": one.gold} for one in problems]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def demonstrate(problem: Problem, tokenizer, calls: bool) -> tuple[list[int], list[int]]:
    """Tokens of a solved problem, and labels that leave out what the model does not write."""
    chat = build_prompt(problem, TaskConfig(), FORMATS["boxed"])
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    answer = FORMATS["boxed"].render(problem.gold)

    parts = [(prompt, False)]
    if calls:
        expression, result = problem.solution.split(" = ")
        parts += [(f"[{expression}]<|im_end|>", True)]
        parts += [(f"<|user|>= {result}<|im_end|><|assistant|>", False)]
        parts += [(f"{answer}<|im_end|>", True)]
    else:
        parts += [(f"{problem.solution}\n{answer}<|im_end|>", True)]

    ids = []
    labels = []
    for text, is_written in parts:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        ids += tokens
        labels += tokens if is_written else [-100] * len(tokens)

    return ids, labels


def warm_start(problems: list[Problem], folder: Path, steps: int = STEPS, seed: int = 0) -> None:
    model, tokenizer = load_model(ModelConfig())
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = RESPONSE
    rng = random.Random(seed)
    torch.manual_seed(seed)

    optimizer = mesotron.muon(model, lr=RATE)
    for step in range(steps):
        batch = [
            demonstrate(p, tokenizer, rng.random() < CALLS) for p in rng.sample(problems, BATCH)
        ]
        width = max(len(ids) for ids, _ in batch)
        ids, labels = (
            torch.tensor([row[k] + [fill] * (width - len(row[k])) for row in batch])
            for k, fill in ((0, tokenizer.pad_token_id), (1, -100))
        )

        logits = model(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id).long()).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("start", group["lr"]) * (1 - step / steps)

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if step % 25 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(folder: Path, steps: int = STEPS) -> None:
    problems = make_problems(2200, seed=0)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    write_data(problems[:2000], folder / "data" / "train.jsonl")
    write_data(problems[2000:], folder / "data" / "test.jsonl")
    warm_start(problems[:2000], folder / "model", steps)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "calculator"))
