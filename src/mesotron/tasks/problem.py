"""A problem, and a task: training problems, held-out problems and an answer format."""

import hashlib
import heapq
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mesotron.answers.formats import FORMATS, AnswerFormat
from mesotron.config import TaskConfig

log = logging.getLogger("mesotron")


@dataclass(frozen=True)
class Problem:
    question: str
    gold: str | None  # the correct answer; None if there is none, for majority-vote pseudo-labels
    id: str = ""  # task, split and number
    level: int | None = None
    solution: str | None = None
    """Worked steps without the formatted answer; empty if the answer needs no steps, None if there
    is no solution."""
    messages: list[dict[str, str]] | None = None  # the prompt of chat data, up to the question
    columns: dict[str, Any] = field(default_factory=dict)  # of the user's table, for the reward
    reply: str | None = None  # of chat data, to be imitated as it is


@dataclass(frozen=True)
class Task:
    train: list[Problem]
    eval: list[Problem]  # held out: shares no question with `train`
    format: AnswerFormat
    examples: tuple[Problem, ...] = ()  # few-shot examples; in neither list


def own_row(problem: Problem) -> dict[str, Any]:
    """What a reward may read of a problem."""
    prompt = problem.messages or [{"role": "user", "content": problem.question}]
    return {
        "prompt": prompt,
        "gold": problem.gold,
        "id": problem.id,
        "columns": problem.columns,
    }


def digest(text: str, seed: int | str = 0) -> int:
    """A hash in [0, 2^64) of text and seed, the same on every machine."""
    hashed = hashlib.sha256(f"{seed}:{text}".encode()).digest()
    return int.from_bytes(hashed[:8], "big")


def ranked(problems: Sequence[Problem], seed: int) -> list[Problem]:
    """Problems by the hash of their question, an order that no other row changes."""
    return sorted(problems, key=lambda problem: digest(problem.question, seed))


def first_ranked(problems: Sequence[Problem], count: int, seed: int) -> list[Problem]:
    """The first of the ranked problems, without putting the others in order."""
    if count >= len(problems):
        return ranked(problems, seed)

    return heapq.nsmallest(count, problems, key=lambda problem: digest(problem.question, seed))


def hold_out(
    problems: Sequence[Problem], num_eval: int, seed: int
) -> tuple[list[Problem], list[Problem]]:
    """Split into training problems and `num_eval` held-out ones by the hash of the question: adding
    rows moves few others, and equal questions are never on both sides."""
    held_out = first_ranked(problems, num_eval, seed)
    return without(problems, held_out), held_out


def without(problems: Sequence[Problem], removed: Sequence[Problem]) -> list[Problem]:
    """Problems whose question is not among the removed ones."""
    questions = {problem.question for problem in removed}
    return [problem for problem in problems if problem.question not in questions]


def assemble(train: Sequence[Problem], held_out: Sequence[Problem], config: TaskConfig) -> Task:
    """Take the few-shot examples from the training problems and cut both lists to size."""
    train = without(train, held_out)
    examples = choose_examples(train, config)
    train = without(train, examples)

    num_train = config.num_train
    if num_train is not None and len(train) < num_train:
        message = "--task.num-train %d: %s has only %d"
        log.warning(message, num_train, config.title, len(train))

    train = cut(train, num_train, config.seed)
    held_out = cut(held_out, config.num_eval, config.seed)
    if not train or (not held_out and config.num_eval):
        purpose = "evaluate" if train else "train"
        raise ValueError(
            f"the task {config.title} has no problem left to {purpose} on: give it more "
            "different rows, or check --data, --task.levels and --task.num-eval"
        )

    return Task(
        train=train,
        eval=held_out,
        format=FORMATS[config.answer_format],
        examples=tuple(examples),
    )


def choose_examples(problems: Sequence[Problem], config: TaskConfig) -> list[Problem]:
    if not config.few_shot:
        return []

    solved = []
    for problem in problems:
        if problem.solution is not None and problem.gold:
            solved.append(problem)

    if len(solved) < config.few_shot:
        raise ValueError(
            f"few_shot={config.few_shot} needs as many solved training problems, but "
            f"{config.title} has {len(solved)}: lower --task.few-shot"
        )

    return first_ranked(solved, config.few_shot, config.seed)


def cut(problems: Sequence[Problem], count: int | None, seed: int) -> list[Problem]:
    """The `count` problems of the lowest hashes (None: all), in the order that they have."""
    if count is None or count >= len(problems):
        return list(problems)

    hashes = [digest(problem.question, seed) for problem in problems]
    lowest = sorted(range(len(problems)), key=hashes.__getitem__)[:count]
    return [problems[i] for i in sorted(lowest)]
