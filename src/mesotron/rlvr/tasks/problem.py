"""A problem, and a task: problems to train on, others to judge by, and one answer format."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from mesotron.config import TaskConfig
from mesotron.rlvr.answers.formats import AnswerFormat

log = logging.getLogger("mesotron")


@dataclass(frozen=True)
class Problem:
    """A question with the answer that is right."""

    question: str
    gold: str | None
    """The right answer; None where the task has none, for objectives that label by vote."""
    id: str
    """Where it comes from: task, split and number."""
    level: int | None = None
    solution: str | None = None
    """Worked steps that lead to the gold, without the final answer in its format; empty where the
    answer alone solves the problem, None where nobody has solved it."""


@dataclass(frozen=True)
class Task:
    """Everything a run needs to know of its problems."""

    train: list[Problem]
    eval: list[Problem]
    """Held out: no question of it is in `train`."""
    format: AnswerFormat
    examples: tuple[Problem, ...] = ()
    """Solved problems that stand before each question; in neither of the two lists."""


def digest(text: str, seed: int | str = 0) -> int:
    """A number in [0, 2^64) that depends on the text and the seed alone, on every machine."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{text}".encode()).digest()[:8], "big")


def hold_out(
    problems: Sequence[Problem], num_eval: int, seed: int
) -> tuple[list[Problem], list[Problem]]:
    """Split one list into training and held-out problems, by the hash of the question.

    Adding or reordering rows moves few others to the other side, and equal questions never end
    up on both.

    Returns:
        The training problems in their old order, and `num_eval` held-out ones by hash.
    """
    ranked = sorted(problems, key=lambda problem: digest(problem.question, seed))
    held_out = ranked[:num_eval]
    return without(problems, held_out), held_out


def without(problems: Sequence[Problem], others: Sequence[Problem]) -> list[Problem]:
    """The problems whose question is not asked among the others."""
    asked = {problem.question for problem in others}
    return [problem for problem in problems if problem.question not in asked]


def assemble(
    train: Sequence[Problem], held_out: Sequence[Problem], config: TaskConfig, format: AnswerFormat
) -> Task:
    """Cut both lists to the sizes asked for, and take the few-shot examples from the first.

    Raises:
        ValueError: if nothing is left to train on or to judge by.
    """
    train, held_out = without(train, held_out), list(held_out)
    solved = [problem for problem in train if problem.solution is not None and problem.gold]
    examples = sorted(solved, key=lambda p: digest(p.question, config.seed))[: config.few_shot]
    if len(examples) < config.few_shot:
        raise ValueError(
            f"few_shot={config.few_shot} needs as many solved training problems, and "
            f"{config.name} has {len(solved)}: lower --task.few-shot"
        )
    train = without(train, examples)
    if len(train) < (config.num_train or 0):
        asked, all_ = config.num_train, len(train)
        log.warning("--task.num-train %d: %s has %d, and takes them all", asked, config.name, all_)
    train = _cut(train, config.num_train, config.seed)
    held_out = _cut(held_out, config.num_eval, config.seed)
    if not train or (not held_out and config.num_eval):
        empty = "evaluate" if train else "train"
        raise ValueError(
            f"the task {config.name} has no problem left to {empty} on: check --task.path, "
            "--task.levels and --task.num-eval"
        )
    return Task(train, held_out, format, tuple(examples))


def _cut(problems: list[Problem], count: int | None, seed: int) -> list[Problem]:
    """That many problems, chosen by hash, in their old order; all if there are fewer."""
    if count is None or count >= len(problems):
        return problems
    ranks = sorted(range(len(problems)), key=lambda i: digest(problems[i].question, seed))
    return [problems[i] for i in sorted(ranks[:count])]
