"""Sums of three one-digit numbers, such as 3 + 9 - 5: 4,000 in all.

For pretrained models that answer in a few tokens.
"""

from itertools import product

from mesotron.config import TaskConfig
from mesotron.tasks.generated import Split, split_of
from mesotron.tasks.problem import Problem, digest
from mesotron.tasks.registry import Loaded, task

# One set of terms in six is held out: 647 questions; an evaluation has 512.
HELD_OUT_EVERY = 6


def check(config: TaskConfig) -> None:
    list_sums("eval", config.num_eval, config.seed)


@task(
    "sums",
    about="all 4,000 questions like `3 + 9 - 5 =`, digits 0 to 9, one in six held out",
    gold="the result",
    check=check,
)
def sums(config: TaskConfig) -> Loaded:
    # All of them to train on: they are cut to size after the examples are taken out.
    train = list_sums("train", None, config.seed)
    return train, list_sums("eval", config.num_eval, config.seed)


def list_sums(split: Split, count: int | None, seed: int) -> list[Problem]:
    """The first `count` questions of a split (None: all), in an order that the seed decides."""
    digits = range(10)
    results: dict[str, int] = {}  # by question

    for a, first, b, second, c in product(digits, "+-", digits, "+-", digits):
        signed = [("+", a), (first, b), (second, c)]
        if split_of(spell_terms(signed), HELD_OUT_EVERY) == split:
            question = f"{a} {first} {b} {second} {c} ="
            results[question] = sum(-n if sign == "-" else n for sign, n in signed)

    if count is not None and count > len(results):
        raise ValueError(
            f"sums has {len(results)} {split} questions, not {count}: lower --task.num-{split}"
        )

    ordered = sorted(results, key=lambda question: digest(question, f"sums {seed}"))
    problems = []
    for number, question in enumerate(ordered[:count]):
        # The answer is the whole completion. Unlike None, an empty solution can be an example.
        gold = str(results[question])
        problems.append(Problem(question, gold, f"sums-{split}-{number}", solution=""))

    return problems


def spell_terms(signed: list[tuple[str, int]]) -> str:
    """The terms of a sum in one order: 7 + 1 - 5 and 1 - 5 + 7 are in the same split."""
    terms = []
    for sign, n in signed:
        is_zero = n == 0  # -0 is +0
        terms.append(f"+{n}" if is_zero else f"{sign}{n}")

    return " ".join(sorted(terms))
