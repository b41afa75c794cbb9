"""Solved problems as rows for supervised training: tokens, and labels on the completion alone.

Prompt and completion are tokenized apart, as they are when a model continues a prompt, so what is
trained is what will be sampled. The order of the rows is fixed here for the whole run: a resumed
run skips what it has read and needs to know nothing of epochs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from mesotron.config import SftConfig
from mesotron.rlvr.answers.formats import AnswerFormat
from mesotron.rlvr.prompts import loose_text, solved_text
from mesotron.rlvr.rendering import demonstrate, render_prompts
from mesotron.rlvr.tasks.problem import Problem, Task, digest

IGNORED = -100  # the label that the loss leaves out


def make_demonstrations(task: Task, config: SftConfig, tokenizer: Any) -> Dataset:
    """The rows that a whole run reads, in order: as many as its steps take.

    Args:
        task: its training problems; those without a gold answer cannot be demonstrated.
        config: steps, batch, the longest row, the share outside the format, the seed.
        tokenizer: of the model.

    Returns:
        A dataset with the columns input_ids and labels.

    Raises:
        ValueError: no problem can be demonstrated within `max_tokens`.
    """
    problems = [problem for problem in task.train if problem.gold is not None]
    prompts = render_prompts(problems, config.task, tokenizer, task.examples)
    pairs = [
        demonstrate(prompt, solve(problem, task.format, config), tokenizer)
        for problem, prompt in zip(problems, prompts, strict=True)
    ]
    fitting = [pair for pair in pairs if sum(map(len, pair)) <= config.max_tokens]
    if not fitting:
        raise ValueError(
            f"none of the {len(task.train)} training problems has a gold answer and fits in "
            f"{config.max_tokens} tokens: raise --max-tokens or check the data"
        )
    rows = Dataset.from_dict(
        {
            "input_ids": [prompt + completion for prompt, completion in fitting],
            "labels": [[IGNORED] * len(prompt) + completion for prompt, completion in fitting],
        }
    )
    return rows.select(reading_order(len(fitting), config.steps * config.batch, config.seed))


def solve(problem: Problem, format: AnswerFormat, config: SftConfig) -> str:
    """The completion to learn; outside the format for a share that the question itself decides."""
    loose = digest(problem.question, "loose") / 2**64 < config.loose
    return loose_text(problem) if loose else solved_text(problem, format)


def reading_order(rows: int, count: int, seed: int) -> Sequence[int]:
    """Which row is read when: one shuffle after another until `count` are read.

    Example:
        >>> order = reading_order(3, 6, seed=0)
        >>> sorted(order[:3]), sorted(order[3:])
        ([0, 1, 2], [0, 1, 2])
    """
    rng = random.Random(f"sft {seed}")
    order: list[int] = []
    while len(order) < count:
        epoch = list(range(rows))
        rng.shuffle(epoch)
        order += epoch
    return order[:count]
