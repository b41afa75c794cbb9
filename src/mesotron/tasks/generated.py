"""Problems that are drawn: everything follows from the seed."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from mesotron.config import TaskConfig
from mesotron.tasks.problem import Problem, digest
from mesotron.tasks.registry import Loaded

Split = Literal["train", "eval"]
Draw = Callable[[random.Random, int], Problem]

HELD_OUT_EVERY = 8  # one question in eight is held out
MAX_REJECTED = 3_000  # draws in a row without a new question before the questions are used up


def draw_splits(name: str, config: TaskConfig, draw: Draw, num_train: int) -> Loaded:
    """Training and held-out problems, as many as the config asks for.

    Args:
        name: of the task.
        draw: makes one problem from a random generator and the number of problems before it.
        num_train: training problems if the config leaves it open.
    """
    count = num_train if config.num_train is None else config.num_train
    count += config.few_shot

    train = draw_problems(name, "train", count, draw, config.seed)
    held_out = draw_problems(name, "eval", config.num_eval, draw, config.seed)
    return train, held_out


def draw_problems(name: str, split: Split, count: int, draw: Draw, seed: int) -> list[Problem]:
    """Distinct problems of one split; the hash of a question decides which split it is in."""
    rng = random.Random(f"{name} {split} {seed}")
    problems: dict[str, Problem] = {}
    num_rejected = 0  # in a row

    while len(problems) < count:
        number = len(problems)
        problem = draw(rng, number)
        question = problem.question

        if question in problems or split_of(question) != split:
            num_rejected += 1
        else:
            problems[question] = replace(problem, id=f"{name}-{split}-{number}")
            num_rejected = 0

        if num_rejected > MAX_REJECTED:
            raise ValueError(
                f"{name} has only {number} different {split} questions, not {count}: lower "
                f"--task.num-{split}, or draw from more --task.levels"
            )

    return list(problems.values())


def split_of(text: str, every: int = HELD_OUT_EVERY) -> Split:
    """The split that a hash assigns to a text: one text in `every` is held out."""
    return "eval" if digest(text) % every == 0 else "train"
