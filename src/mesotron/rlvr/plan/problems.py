"""How many problems a task has and how long their questions are, without a download."""

import math
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from mesotron.answers.formats import FORMATS
from mesotron.config import TaskConfig, TrainConfig
from mesotron.rlvr.plan.setup import Lengths, count_rows
from mesotron.rlvr.plan.shapes import TABLES
from mesotron.tasks.load import load_task
from mesotron.tasks.prompts import SYSTEM
from mesotron.tasks.registry import find_source

DATASETS: dict[str, tuple[int, int]] = TABLES["datasets"]  # rows, tokens of a typical question
ANSWERS: dict[str, tuple[int, int]] = TABLES["answers"]
QUESTION_TOKENS = 80  # where nothing is known
CHARACTERS_PER_TOKEN = 3.5
CHAT_TOKENS = 20  # marks of a chat around its messages
SOLUTION_TOKENS = 100  # of a solved example

# Of the 7,500 rows of MATH; two have no level.
MATH_LEVELS = {1: 564, 2: 1348, 3: 1592, 4: 1690, 5: 2304}
MATH_ROWS = 7500


class Problems(NamedTuple):
    number: int
    question_tokens: float


def find_problems(task: TaskConfig) -> Problems:
    if task.env:  # their first messages; what they reply later counts as completion
        return _count(task)

    if task.has_own_data:
        return _own_problems(task)

    source = find_source(task)
    if source.num_train is not None:
        number = source.num_train if task.num_train is None else task.num_train
        return Problems(number, source.question_tokens or QUESTION_TOKENS)

    if task.data:
        name = task.data[0]
        is_on_disk = Path(name).expanduser().exists()
    else:
        name = task.name
        is_on_disk = name not in DATASETS or Path(name).expanduser().exists()

    if is_on_disk:
        return _count(task)

    return _hub_problems(name, task)


def _own_problems(task: TaskConfig) -> Problems:
    """Files are read, names on the hub are looked up."""
    local = tuple(name for name in task.data if Path(name).expanduser().exists())
    parts = []
    if local:
        parts.append(_count(replace(task, data=local, weights=())))

    for name in task.data:
        if name not in local:
            hub, _, _ = name.partition(":")
            parts.append(_hub_problems(hub, task))

    number = sum(part.number for part in parts)
    return Problems(number, mean(part.question_tokens for part in parts))


def _count(task: TaskConfig) -> Problems:
    lengths = [len(problem.question) for problem in load_task(task).train]
    average = sum(lengths) / max(len(lengths), 1)
    return Problems(len(lengths), average / CHARACTERS_PER_TOKEN)


def _hub_problems(hub: str, task: TaskConfig) -> Problems:
    """The problems of a dataset on the hub, from a table."""
    number, question_tokens = DATASETS.get(hub, (task.num_train, QUESTION_TOKENS))
    if number is None:
        raise ValueError(
            f"the size of {hub} is not known here and plan downloads nothing: give the number "
            "of its problems with --task.num-train"
        )

    if task.levels and number == MATH_ROWS:
        number = sum(MATH_LEVELS[level] for level in task.levels)

    number -= task.few_shot
    return Problems(min(number, task.num_train or number), question_tokens)


def typical_question(task: TaskConfig) -> float:
    """Tokens of a question, by the task's name alone."""
    name = task.data[0] if task.data else task.title
    _, tokens = DATASETS.get(name, (0, QUESTION_TOKENS))
    return tokens


def lengths_of(config: TrainConfig, question: float, completion: float | None = None) -> Lengths:
    """Tokens of a prompt and a completion; without a measured completion the task's typical one,
    else half the longest."""
    most = config.rollout.max_tokens
    prompt = prompt_tokens(config.task, question, most)

    whole = None if completion else typical_answer(config)
    if whole is not None:
        # As if each further token had the same chance to be the last: the limit cuts the rest.
        completion = most * -math.expm1(-whole / most)
        longest = whole * math.log(max(count_rows(config).sampled, math.e))
        return Lengths(prompt=prompt, completion=completion, longest=min(most, longest))

    # Among many completions the longest is often cut off at the limit.
    completion = min(completion or most / 2, most)
    return Lengths(prompt=prompt, completion=completion, longest=min(most, 2 * completion))


def prompt_tokens(task: TaskConfig, question: float, most: int) -> float:
    """Tokens of a prompt with its system message and solved examples."""
    system = task.system
    if system is None:
        system = f"{SYSTEM} {FORMATS[task.answer_format].instruction}"

    prompt = CHAT_TOKENS + len(system) / CHARACTERS_PER_TOKEN + question
    return prompt + task.few_shot * (question + min(SOLUTION_TOKENS, most))  # within the limit


def typical_answer(config: TrainConfig) -> float | None:
    """Tokens of an answer to the task's questions that nothing cuts; None if unknown."""
    known = ANSWERS.get(config.task.name)
    if known is None or config.task.env:
        return None

    reasoned, solved = known
    return solved if config.sft.steps else reasoned


def solution_tokens(config: TrainConfig) -> float:
    """Tokens of a solved problem's answer."""
    known = ANSWERS.get(config.task.name)
    return SOLUTION_TOKENS if known is None else known[1]
