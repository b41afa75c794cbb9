"""Sums of three one-digit numbers, such as 3 + 9 - 5: all 4,000 of them, without words or steps.

For pretrained models that answer in a few tokens. The hash of its terms, whatever their order,
decides whether a question is for training or held out: 7 + 1 - 5 is never asked in one where
1 - 5 + 7 or 1 + 7 - 5 is in the other. The seed only orders them.
"""

from __future__ import annotations

from itertools import product
from typing import Literal

from mesotron.rlvr.tasks.problem import Problem, digest

Split = Literal["train", "eval"]

HELD_OUT_EVERY = 6  # one set of terms in six is held out: 647 questions, an evaluation has 512
# The answer is the whole completion: an empty text, unlike None, can be shown as an example.
NO_STEPS = ""


def generate(split: Split, count: int | None, seed: int) -> list[Problem]:
    """Distinct problems of one split.

    Args:
        split: "train" or "eval"; no question of one has the terms of one of the other.
        count: how many problems; None is all there are.
        seed: the same seed gives the same problems in the same order.

    Raises:
        ValueError: there are fewer than `count`.

    Example:
        >>> problem = generate("eval", 1, seed=0)[0]
        >>> problem.question, problem.gold
        ('5 - 8 + 8 =', '5')
    """
    asked = questions_of(split)
    if count is not None and count > len(asked):
        raise ValueError(
            f"sums has {len(asked)} {split} questions, and {count} were asked for: lower "
            f"--task.num-{split}"
        )
    ordered = sorted(asked, key=lambda question: digest(question, f"sums {seed}"))
    return [
        Problem(question, str(value_of(question)), f"sums-{split}-{k}", solution=NO_STEPS)
        for k, question in enumerate(ordered[:count])
    ]


def questions_of(split: Split) -> list[str]:
    """Every question of a split."""
    return [question for question in all_questions() if split_of(question) == split]


def all_questions() -> list[str]:
    """Every a ± b ± c with digits 0 to 9."""
    digits = range(10)
    return [
        f"{a} {first} {b} {second} {c} ="
        for a, first, b, second, c in product(digits, "+-", digits, "+-", digits)
    ]


def value_of(question: str) -> int:
    """What a question comes to, from left to right.

    Example:
        >>> value_of("3 - 9 + 5 =")
        -1
    """
    a, first, b, second, c, _ = question.split()
    signs = {"+": 1, "-": -1}
    return int(a) + signs[first] * int(b) + signs[second] * int(c)


def split_of(question: str) -> Split:
    """Which split a question belongs to, by its terms alone."""
    return "eval" if digest(" ".join(terms_of(question))) % HELD_OUT_EVERY == 0 else "train"


def terms_of(question: str) -> list[str]:
    """The signed terms in an order of their own; nothing added and nothing taken away are one.

    Example:
        >>> terms_of("7 - 0 - 5 ="), terms_of("7 - 5 + 0 =")
        (['+0', '+7', '-5'], ['+0', '+7', '-5'])
    """
    a, first, b, second, c, _ = question.split()
    return sorted(term.replace("-0", "+0") for term in (f"+{a}", first + b, second + c))
