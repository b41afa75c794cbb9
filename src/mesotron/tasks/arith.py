"""Generated arithmetic: word problems in five levels (arith), and sums of digits (sums).

Everything follows from the seed; a question's hash decides whether it is held out.
"""

import random
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from operator import add, floordiv, mul, sub
from pathlib import Path
from typing import Literal

from mesotron.tasks.problem import Problem, digest

Split = Literal["train", "eval"]
Operation = Literal["+", "-", "*", "/"]

_TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
NAMES, OBJECTS, OPENINGS, QUESTIONS = (
    tuple(_TEXTS[key]) for key in ("names", "objects", "openings", "questions")
)
SENTENCES: dict[Operation, list[str]] = _TEXTS["sentences"]
HELD_OUT_EVERY = 8  # one question in eight is held out
MAX_DUPLICATES = 3_000  # draws in a row without a new question before a level is exhausted
# One set of terms in six of the sums is held out: 647 questions; an evaluation has 512.
SUMS_HELD_OUT_EVERY = 6


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


def generate(split: Split, count: int, levels: tuple[int, ...], seed: int) -> list[Problem]:
    """Distinct word problems, levels in turn (1 to 4 if empty); splits never share a question."""
    levels = levels or DEFAULT_LEVELS
    rng = random.Random(f"arith {split} {seed}")
    problems: dict[str, Problem] = {}

    duplicates = 0  # in a row
    while len(problems) < count:
        level = levels[len(problems) % len(levels)]
        question, steps = _word_problem(rng, LEVELS[level])
        duplicates += 1

        is_held_out = digest(question) % HELD_OUT_EVERY == 0
        if is_held_out == (split == "eval") and question not in problems:
            name = f"arith-{split}-{len(problems)}"
            gold = steps.rsplit(" ", 1)[-1]
            problems[question] = Problem(
                question,
                gold,
                name,
                level,
                steps,
            )

            duplicates = 0

        if duplicates > MAX_DUPLICATES:
            raise ValueError(
                f"arith has only {len(problems)} distinct {split} questions of levels {levels}, "
                f"not {count}: request fewer, or more levels"
            )

    return list(problems.values())


def vocabulary() -> tuple[str, ...]:
    templates = " ".join([*OPENINGS, *QUESTIONS, *(s for ss in SENTENCES.values() for s in ss)])
    words = re.findall(r"[A-Za-z]+|[.?]", re.sub(r"\{\w+\}", " ", templates))
    return tuple(sorted({*words, *NAMES, *OBJECTS, *"0123456789+-*/="}))


def _word_problem(rng: random.Random, level: Level) -> tuple[str, str]:
    objects = rng.choice(OBJECTS)
    name, *others = rng.sample(NAMES, level.num_operations + 1)
    value, chain = _chain(rng, level)

    sentences = [
        rng.choice(OPENINGS).format(
            name=name,
            n=value,
            objects=objects,
        )
    ]

    steps = []
    for (operation, n), other in zip(chain, others):
        sentence = rng.choice(SENTENCES[operation])
        sentences.append(
            sentence.format(
                name=name,
                other=other,
                n=n,
            )
        )

        result = APPLY[operation](value, n)
        steps.append(f"{value} {operation} {n} = {result}")
        value = result
        name = other if operation == "*" else name

    sentences.append(rng.choice(QUESTIONS).format(objects=objects, name=name))
    return " ".join(sentences), "\n".join(steps)


APPLY: dict[Operation, Callable[[int, int], int]] = {
    "+": add,
    "-": sub,
    "*": mul,
    "/": floordiv,
}


def _chain(rng: random.Random, level: Level) -> tuple[int, list[tuple[Operation, int]]]:
    while True:
        first = value = rng.randint(*level.first)
        chain: list[tuple[Operation, int]] = []
        for _ in range(level.num_operations):
            operation: Operation = rng.choice(level.operations)  # type: ignore[assignment]
            low, high = level.change if operation in "+-" else (2, level.factor)
            choices = [n for n in range(low, high + 1) if operation != "/" or value % n == 0]
            choices = [n for n in choices if 1 <= APPLY[operation](value, n) <= level.largest]
            if not choices:
                break

            n = rng.choice(choices)
            chain.append((operation, n))
            value = APPLY[operation](value, n)

        if len(chain) == level.num_operations:
            return first, chain


def generate_sums(split: Split, count: int | None, seed: int) -> list[Problem]:
    """Distinct sums of three one-digit numbers, such as 3 + 9 - 5: 4,000 in all. For pretrained
    models that answer in a few tokens. The hash of the terms, in any order, decides the split: 7 +
    1 - 5 and 1 - 5 + 7 are in the same one."""
    questions: dict[str, int] = {}
    digits = range(10)
    for a, first, b, second, c in product(
        digits,
        "+-",
        digits,
        "+-",
        digits,
    ):
        # Sorted, and -0 is +0: the same terms in another order are the same set.
        terms = sorted(
            f"{sign if n else '+'}{n}" for sign, n in (("+", a), (first, b), (second, c))
        )
        is_held_out = digest(" ".join(terms)) % SUMS_HELD_OUT_EVERY == 0
        if is_held_out == (split == "eval"):
            value = a + (b if first == "+" else -b) + (c if second == "+" else -c)
            questions[f"{a} {first} {b} {second} {c} ="] = value

    if count is not None and count > len(questions):
        raise ValueError(
            f"sums has {len(questions)} {split} questions, not {count}: lower --task.num-{split}"
        )

    ordered = sorted(questions, key=lambda question: digest(question, f"sums {seed}"))
    return [
        # The answer is the whole completion; unlike None an empty solution can be an example.
        Problem(question, str(questions[question]), f"sums-{split}-{k}", solution="")
        for k, question in enumerate(ordered[:count])
    ]
