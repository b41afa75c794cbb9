"""Load a task by its config: generated arithmetic, a user's table, or GSM8K (arXiv 2110.14168) and
MATH (arXiv 2103.03874), which are not shipped but read from a file or from the hub.
"""

import re
from dataclasses import replace

from mesotron.answers.formats import FORMATS
from mesotron.config import TaskConfig
from mesotron.tasks import arith, gym
from mesotron.tasks.own import make_problem, read_own
from mesotron.tasks.problem import Problem, Task, assemble, hold_out
from mesotron.tasks.table import Row, check_path, read_splits

GENERATED = 20_000  # default number of training problems of arith
GENERATORS = ("arith", "sums")
GSM8K_HUB = ("openai/gsm8k", "main")

_MATH_LEVEL = re.compile(r"(?:Level )?([1-5])", re.ASCII)


def load_task(config: TaskConfig) -> Task:
    """Training and held-out problems.

    Held-out problems come from the data's own test split if there is one, else from the hash of
    the question and `config.seed`; no question is in both lists.

    Raises:
        ValueError: for a missing file or hub dataset, a broken row (with its file and line), or
            nothing left to train or evaluate on.

    Example:
        >>> task = load_task(TaskConfig(num_train=3, num_eval=2, levels=(1,)))
        >>> len(task.train), len(task.eval), task.format.name
        (3, 2, 'boxed')
    """
    check_task(config)
    if config.data:
        train, held_out, _ = read_own(config)
    elif config.is_gym:
        usual = gym.GENERATED if config.curriculum is None else gym.PER_LEVEL
        count = usual if config.num_train is None else config.num_train
        held_out = gym.generate(config, "eval", config.num_eval)
        train = gym.generate(config, "train", count)
    else:
        train, held_out = _generate(config) if config.name in GENERATORS else _read(config)

    if config.curriculum is not None:  # as many of each level
        config = replace(config, num_train=None)

    return assemble(train, held_out, config)


def check_task(config: TaskConfig) -> None:
    """Refuse a path that does not exist, and more held-out sums than there are."""
    for path in config.data:
        check_path(path)

    if config.data:
        return

    if config.is_gym:
        gym.generate(replace(config, seed=-1), "eval", 1)  # refuses names and settings
    elif config.name == "sums":
        arith.generate_sums("eval", config.num_eval, config.seed)
    elif config.name not in GENERATORS:
        check_path(_location(config)[0])


def _generate(config: TaskConfig) -> tuple[list[Problem], list[Problem]]:
    if config.name == "sums":
        # All of them: `assemble` cuts to the requested size after the examples are taken out.
        held_out = arith.generate_sums("eval", config.num_eval, config.seed)
        return arith.generate_sums("train", None, config.seed), held_out

    count = GENERATED if config.num_train is None else config.num_train
    train = arith.generate("train", count + config.few_shot, config.levels, config.seed)

    return train, arith.generate("eval", config.num_eval, config.levels, config.seed)


def _read(config: TaskConfig) -> tuple[list[Problem], list[Problem]]:
    def table_problem(row: Row, name: str) -> Problem:
        # Without an answer column there is no gold: enough for majority-vote pseudo-labels.
        if config.answer_column:
            row.text(config.answer_column)  # refuses what is no text
        return make_problem(row, name, config.question_column, config.answer_column or None)

    make = {"gsm8k": gsm8k_problem, "math": math_problem}.get(config.name, table_problem)

    def select(rows: list[Row], split: str) -> list[Problem]:
        problems = [make(row, f"{config.name}-{split}-{i}") for i, row in enumerate(rows)]
        return [one for one in problems if not config.levels or one.level in config.levels]

    train_rows, test_rows = read_splits(*_location(config))
    train = select(train_rows, "train")
    if test_rows is None:
        return hold_out(train, config.num_eval, config.seed)

    return train, select(test_rows, "test")


def _location(config: TaskConfig) -> tuple[str, str | None]:
    if config.name == "gsm8k" and config.path in (None, GSM8K_HUB[0]):
        return GSM8K_HUB
    if config.path is None:
        raise ValueError(f"the task {config.name} needs a file or hub name: give --task.path")

    return config.path, None


def gsm8k_problem(row: Row, name: str) -> Problem:
    if not row.text("answer").rpartition("####")[2].strip() or "####" not in row.text("answer"):
        raise ValueError(f"{row.place}: the answer has no gold after '####'")
    return make_problem(row, name, "question", "answer")


def math_problem(row: Row, name: str) -> Problem:
    r"""A row with the columns problem, solution (gold in its last \boxed{}) or answer, level."""
    solution = row.text("solution") if row.values.get("solution") else None
    gold = FORMATS["boxed"].extract(solution) if solution else None
    if gold is None and row.values.get("answer") is not None:
        gold = row.text("answer")

    if gold is None:
        raise ValueError(f"{row.place}: no \\boxed{{}} in the solution, and no column 'answer'")

    level = None
    if row.values.get("level") is not None:
        text = row.text("level")
        match = _MATH_LEVEL.fullmatch(text)
        if match is None and text != "Level ?":  # three rows of the data have this
            raise ValueError(f"{row.place}: level {text[:40]!r} is not Level 1 to Level 5")

        level = int(match[1]) if match else None

    return Problem(
        row.text("problem"),
        gold,
        name,
        level,
        solution,
        columns=dict(row.values),
    )
