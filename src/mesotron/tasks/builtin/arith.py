"""Word problems in five levels, from one addition to three operations."""

import random
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from operator import add, floordiv, mul, sub
from pathlib import Path
from typing import Literal

from mesotron.config import TaskConfig
from mesotron.tasks.generated import Draw, Split, draw_problems, draw_splits
from mesotron.tasks.problem import Problem
from mesotron.tasks.registry import Loaded, task

Operation = Literal["+", "-", "*", "/"]

_TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
NAMES: list[str] = _TEXTS["names"]
OBJECTS: list[str] = _TEXTS["objects"]
OPENINGS: list[str] = _TEXTS["openings"]
QUESTIONS: list[str] = _TEXTS["questions"]
SENTENCES: dict[Operation, list[str]] = _TEXTS["sentences"]

APPLY: dict[Operation, Callable[[int, int], int]] = {
    "+": add,
    "-": sub,
    "*": mul,
    "/": floordiv,
}


@dataclass(frozen=True)
class Level:
    operations: str
    num_operations: int
    first: tuple[int, int]  # range of the first number
    change: tuple[int, int]  # range of numbers added or subtracted
    largest: int  # largest value of any step
    factor: int = 9  # largest multiplier or divisor


LEVELS: dict[int, Level] = {
    1: Level("+", 1, (2, 9), (1, 9), 18),
    2: Level("+-", 1, (2, 19), (1, 9), 28),
    3: Level("+-*/", 1, (2, 99), (2, 99), 198),
    4: Level("+-*/", 2, (2, 60), (2, 40), 100, factor=5),
    5: Level("+-*/", 3, (2, 99), (2, 99), 200),
}

# The tiny model was trained on these; level 5 has to be requested.
DEFAULT_LEVELS = (1, 2, 3, 4)
NUM_TRAIN = 20_000


@task(
    "arith",
    about="generated from `--task.seed`, levels 1 to 5 (default 1 to 4)",
    gold="the last worked result",
    has_levels=True,
    num_train=NUM_TRAIN,
    question_tokens=40,
)
def arith(config: TaskConfig) -> Loaded:
    return draw_splits("arith", config, draw_from(config.levels), NUM_TRAIN)


def generate(split: Split, count: int, levels: tuple[int, ...], seed: int) -> list[Problem]:
    """Distinct word problems of some levels (1 to 4 if empty); splits never share a question."""
    return draw_problems("arith", split, count, draw_from(levels), seed)


def draw_from(levels: tuple[int, ...] = ()) -> Draw:
    """Draws word problems, the levels in turn."""
    levels = levels or DEFAULT_LEVELS

    def draw(rng: random.Random, number: int) -> Problem:
        level = levels[number % len(levels)]
        question, steps = write_problem(rng, LEVELS[level])
        gold = steps.rsplit(" ", 1)[-1]

        return Problem(question, gold, level=level, solution=steps)

    return draw


def write_problem(rng: random.Random, level: Level) -> tuple[str, str]:
    """A question, and its worked steps such as "3 + 4 = 7", one in a line."""
    objects = rng.choice(OBJECTS)
    name, *other_names = rng.sample(NAMES, level.num_operations + 1)
    value, operations = draw_operations(rng, level)

    opening = rng.choice(OPENINGS)
    sentences = [opening.format(name=name, n=value, objects=objects)]
    steps = []

    for (operation, n), other in zip(operations, other_names):
        sentence = rng.choice(SENTENCES[operation])
        sentences.append(sentence.format(name=name, other=other, n=n))

        result = APPLY[operation](value, n)
        steps.append(f"{value} {operation} {n} = {result}")
        value = result

        if operation == "*":  # the sentence is about the other person's objects
            name = other

    question = rng.choice(QUESTIONS)
    sentences.append(question.format(objects=objects, name=name))

    return " ".join(sentences), "\n".join(steps)


def draw_operations(rng: random.Random, level: Level) -> tuple[int, list[tuple[Operation, int]]]:
    """The first number, and the operations on it. A draw that leads nowhere is thrown away."""
    while True:
        first = rng.randint(*level.first)
        value = first
        operations: list[tuple[Operation, int]] = []

        for _ in range(level.num_operations):
            operation: Operation = rng.choice(level.operations)  # type: ignore[assignment]
            choices = operands(value, operation, level)
            if not choices:
                break

            n = rng.choice(choices)
            operations.append((operation, n))
            value = APPLY[operation](value, n)

        if len(operations) == level.num_operations:
            return first, operations


def operands(value: int, operation: Operation, level: Level) -> list[int]:
    """Second numbers that keep every value whole and within the level's range."""
    low, high = level.change if operation in "+-" else (2, level.factor)
    numbers = range(low, high + 1)
    if operation == "/":
        numbers = [n for n in numbers if value % n == 0]

    return [n for n in numbers if 1 <= APPLY[operation](value, n) <= level.largest]


def vocabulary() -> tuple[str, ...]:
    """Every word, digit and sign of the problems and their solutions."""
    templates = " ".join([*OPENINGS, *QUESTIONS, *chain(*SENTENCES.values())])
    words = re.findall(r"[A-Za-z]+|[.?]", re.sub(r"\{\w+\}", " ", templates))
    return tuple(sorted({*words, *NAMES, *OBJECTS, *"0123456789+-*/="}))
