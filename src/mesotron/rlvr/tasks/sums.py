"""Sums of three one-digit numbers, such as 3 + 9 - 5: all 4,000 of them, without words or steps.

For pretrained models that answer in a few tokens. A question's hash decides whether it is for
training or held out, so the two never meet; the seed only orders them.
"""

from __future__ import annotations

from itertools import product
from typing import Literal

from mesotron.rlvr.tasks.problem import Problem, digest

Split = Literal["train", "eval"]

HELD_OUT_EVERY = 6  # one question in six is held out: 665, enough for an evaluation on 512
# The answer is the whole completion: an empty text, unlike None, can be shown as an example.
NO_STEPS = ""


def generate(split: Split, count: int | None, seed: int) -> list[Problem]:
    """Distinct problems of one split.

    Args:
        split: "train" or "eval"; no question of one is ever in the other, whatever the seeds.
        count: how many problems; None is all there are.
        seed: the same seed gives the same problems in the same order.

    Raises:
        ValueError: there are fewer than `count`.

    Example:
        >>> problem = generate("eval", 1, seed=0)[0]
        >>> problem.question, problem.gold
        ('7 + 1 - 5 =', '3')
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
    """Which split a question belongs to, by its hash alone."""
    return "eval" if digest(question) % HELD_OUT_EVERY == 0 else "train"
