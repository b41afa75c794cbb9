"""Generated arithmetic word problems, in five levels, over a small closed vocabulary.

A story is a chain of one to three operations on what somebody has. Everything follows from the
seed; a question's hash decides whether it is for training or held out, so the two never meet.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mesotron.rlvr.tasks.problem import Problem, digest

Split = Literal["train", "eval"]
Operation = Literal["+", "-", "*", "/"]

NAMES = ("Ann", "Ben", "Dan", "Eva", "Ida", "Leo", "Mia", "Sam", "Tom", "Zoe")
OBJECTS = (
    "apples", "balls", "books", "cards", "coins", "cups", "eggs", "pens", "rings", "shells",
)  # fmt: skip

OPENINGS = (
    "{name} has {n} {objects}.",
    "{name} finds {n} {objects}.",
    "There are {n} {objects} in the bag of {name}.",
)
# After each sentence the story is about the one who is named `{name}` in the next.
SENTENCES: dict[Operation, tuple[str, ...]] = {
    "+": (
        "{name} buys {n} more.",
        "{other} gives {n} more to {name}.",
        "Then {name} gets {n} more.",
    ),
    "-": (
        "{name} loses {n} of them.",
        "{name} gives {n} of them to {other}.",
        "Then {name} sells {n} of them.",
    ),
    "*": (
        "{other} has {n} times as many as {name}.",
        "{other} gets {n} times as many as {name}.",
    ),
    "/": (
        "{name} puts them into {n} equal bags and keeps one bag.",
        "{name} shares them with friends in {n} equal parts and keeps one part.",
    ),
}
QUESTIONS = (
    "How many {objects} does {name} have now?",
    "How many {objects} does {name} have in the end?",
    "Now how many {objects} does {name} have?",
)
HELD_OUT_EVERY = 8  # one question in eight is held out
PATIENCE = 3_000  # draws without a new question before a level counts as exhausted


@dataclass(frozen=True)
class Level:
    """What a level draws: how many operations, which, and how large its numbers get."""

    operations: str
    num_operations: int
    first: tuple[int, int]
    """Smallest and largest number that the story starts from."""
    change: tuple[int, int]
    """Smallest and largest number that is added or taken away."""
    largest: int
    """Largest value that any step may reach."""
    factor: int = 9
    """Largest number that is multiplied or divided by."""


LEVELS: dict[int, Level] = {
    1: Level("+", 1, (2, 9), (1, 9), 18),
    2: Level("+-", 1, (2, 19), (1, 9), 28),
    3: Level("+-*/", 1, (2, 99), (2, 99), 198),
    4: Level("+-*/", 2, (2, 60), (2, 40), 100, factor=5),
    5: Level("+-*/", 3, (2, 99), (2, 99), 200),
}

# What the shipped model was warm-started on; level 5 is asked for by name.
USUAL_LEVELS = (1, 2, 3, 4)


def check_levels(levels: tuple[int, ...]) -> None:
    """Refuse a level that is not there."""
    if unknown := [level for level in levels if level not in LEVELS]:
        raise ValueError(f"arith has the levels 1 to 5 and no level {unknown[0]}")


def generate(split: Split, count: int, levels: tuple[int, ...], seed: int) -> list[Problem]:
    """Distinct problems of one split, levels in turn.

    Args:
        split: "train" or "eval"; no question of one is ever in the other, whatever the seeds.
        count: how many problems.
        levels: difficulties to draw from, 1 to 5; the first four if empty.
        seed: the same seed gives the same problems.

    Example:
        >>> problem = generate("train", 1, (1,), seed=0)[0]
        >>> problem.solution.endswith(problem.gold)
        True
    """
    check_levels(levels)
    levels = levels or USUAL_LEVELS
    rng = random.Random(f"arith {split} {seed}")
    problems: dict[str, Problem] = {}
    fruitless = 0  # draws in a row that brought nothing new
    while len(problems) < count:
        level = levels[len(problems) % len(levels)]
        question, steps = _story(rng, LEVELS[level])
        fruitless += 1
        if split_of(question) == split and question not in problems:
            name = f"arith-{split}-{len(problems)}"
            gold = steps.rsplit(" ", 1)[-1]
            problems[question] = Problem(question, gold, name, level, steps)
            fruitless = 0
        if fruitless > PATIENCE:
            raise ValueError(
                f"arith found {len(problems)} distinct {split} questions of the levels {levels}, "
                f"and {count} were asked for: take fewer, or more levels"
            )
    return list(problems.values())


def split_of(question: str) -> Split:
    """Which split a question belongs to, by its hash alone."""
    return "eval" if digest(question) % HELD_OUT_EVERY == 0 else "train"


def vocabulary() -> tuple[str, ...]:
    """Every word and sign that questions and solutions are made of, digits singly, sorted."""
    templates = " ".join([*OPENINGS, *QUESTIONS, *(s for ss in SENTENCES.values() for s in ss)])
    words = re.findall(r"[A-Za-z]+|[.?]", re.sub(r"\{\w+\}", " ", templates))
    return tuple(sorted({*words, *NAMES, *OBJECTS, *"0123456789+-*/="}))


def _story(rng: random.Random, level: Level) -> tuple[str, str]:
    """A question and its worked steps, one on each line."""
    objects = rng.choice(OBJECTS)
    name, *others = rng.sample(NAMES, level.num_operations + 1)
    value, chain = _chain(rng, level)
    sentences = [rng.choice(OPENINGS).format(name=name, n=value, objects=objects)]
    steps = []
    for (operation, n), other in zip(chain, others):
        sentence = rng.choice(SENTENCES[operation])
        sentences.append(sentence.format(name=name, other=other, n=n))
        result = APPLY[operation](value, n)
        steps.append(f"{value} {operation} {n} = {result}")
        value, name = result, other if operation == "*" else name
    sentences.append(rng.choice(QUESTIONS).format(objects=objects, name=name))
    return " ".join(sentences), "\n".join(steps)


APPLY: dict[Operation, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
}


def _chain(rng: random.Random, level: Level) -> tuple[int, list[tuple[Operation, int]]]:
    """A first value and operations on it; drawn again until every step fits the level."""
    while True:
        first = value = rng.randint(*level.first)
        chain: list[tuple[Operation, int]] = []
        for _ in range(level.num_operations):
            operation: Operation = rng.choice(level.operations)  # type: ignore[assignment]
            n = _operand(rng, operation, value, level)
            if n is None:
                break
            chain.append((operation, n))
            value = APPLY[operation](value, n)
        if len(chain) == level.num_operations:
            return first, chain


def _operand(rng: random.Random, operation: Operation, value: int, level: Level) -> int | None:
    """A second number that keeps the result whole, at least 1 and within the level, if any."""
    low, high = level.change if operation in "+-" else (2, level.factor)
    fits = {
        "+": lambda n: value + n <= level.largest,
        "-": lambda n: value - n >= 1,
        "*": lambda n: value * n <= level.largest,
        "/": lambda n: value % n == 0,
    }[operation]
    choices = [n for n in range(low, high + 1) if fits(n)]
    return rng.choice(choices) if choices else None
