"""Load a task by its config: the one door to every kind of problem."""

from __future__ import annotations

from collections.abc import Callable

from mesotron.config import TaskConfig
from mesotron.rlvr.answers.formats import FORMATS
from mesotron.rlvr.tasks import arith, sums
from mesotron.rlvr.tasks.gsm8k import HUB, gsm8k_problem
from mesotron.rlvr.tasks.math import math_problem
from mesotron.rlvr.tasks.problem import Problem, Task, assemble, hold_out
from mesotron.rlvr.tasks.table import Row, check_path, read_splits

__all__ = ["Problem", "Task", "check_task", "load_task"]

GENERATED = 20_000  # training problems of arith if the config does not say
GENERATORS = ("arith", "sums")


def load_task(config: TaskConfig) -> Task:
    """Problems to train on and to judge by, as the config asks.

    Held-out problems come from the data's own test split if there is one, else from the hash of
    the question and `config.seed`; no question is ever in both lists.

    Raises:
        ValueError: for a missing file or hub, a broken row (with its file and line), levels that
            the task does not have, or nothing left to train or evaluate on.

    Example:
        >>> task = load_task(TaskConfig(num_train=3, num_eval=2, levels=(1,)))
        >>> len(task.train), len(task.eval), task.format.name
        (3, 2, 'boxed')
    """
    check_task(config)
    train, held_out = _generated(config) if config.name in GENERATORS else _read(config)
    return assemble(train, held_out, config, FORMATS[config.format])


def check_task(config: TaskConfig) -> None:
    """Refuse a path that does not exist, and more held-out sums than there are."""
    if config.name == "sums":
        sums.generate("eval", config.num_eval, config.seed)
    elif config.name not in GENERATORS:
        check_path(_place(config)[0])


def _generated(config: TaskConfig) -> tuple[list[Problem], list[Problem]]:
    if config.name == "sums":
        # All of them: `assemble` cuts to what was asked for, after the examples are taken out.
        held_out = sums.generate("eval", config.num_eval, config.seed)
        return sums.generate("train", None, config.seed), held_out
    count = GENERATED if config.num_train is None else config.num_train
    train = arith.generate("train", count + config.few_shot, config.levels, config.seed)
    return train, arith.generate("eval", config.num_eval, config.levels, config.seed)


def _read(config: TaskConfig) -> tuple[list[Problem], list[Problem]]:
    path, subset = _place(config)
    make = _row_reader(config)
    train_rows, test_rows = read_splits(path, subset)
    train = _select(config, make, train_rows, "train")
    if test_rows is None:
        return hold_out(train, config.num_eval, config.seed)
    return train, _select(config, make, test_rows, "test")


def _place(config: TaskConfig) -> tuple[str, str | None]:
    """Where the rows are, and which part of a hub's dataset that has several."""
    if config.name == "gsm8k" and config.path in (None, HUB[0]):
        return HUB
    if config.path is None:
        raise ValueError(
            f"the task {config.name} has no file: give one, or a hub name, by --task.path"
        )
    return config.path, None


def _row_reader(config: TaskConfig) -> Callable[[Row, str], Problem]:
    if config.name == "gsm8k":
        return gsm8k_problem
    if config.name == "math":
        return math_problem

    def table_problem(row: Row, name: str) -> Problem:
        # Without an answer column there is no gold: enough for objectives that label by vote.
        gold = row.text(config.answer_column) if config.answer_column else None
        return Problem(row.text(config.question_column), gold, name)

    return table_problem


def _select(
    config: TaskConfig, make: Callable[[Row, str], Problem], rows: list[Row], split: str
) -> list[Problem]:
    problems = [make(row, f"{config.name}-{split}-{i}") for i, row in enumerate(rows)]
    if config.levels:
        problems = [problem for problem in problems if problem.level in config.levels]
    return problems
