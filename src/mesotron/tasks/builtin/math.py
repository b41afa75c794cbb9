r"""MATH (arXiv 2103.03874): competition problems in five levels. It is not shipped.

Its rows have the columns problem, solution (with the gold in its last \boxed{}) or answer, and
level.
"""

import re

from mesotron.answers.formats import FORMATS
from mesotron.config import TaskConfig
from mesotron.tasks.path import check_location, read_problems
from mesotron.tasks.problem import Problem
from mesotron.tasks.registry import Loaded, task
from mesotron.tasks.table import TableRow

LEVEL = re.compile(r"(?:Level )?([1-5])", re.ASCII)
NO_LEVEL = "Level ?"  # three rows of the data have this


@task(
    "math",
    about="a file, a folder, or a hub name you give",
    gold="the last `\\boxed{}` of `solution`, else the column `answer`; levels 1 to 5",
    has_levels=True,
    reads_data=True,
    check=check_location,
)
def math(config: TaskConfig) -> Loaded:
    return read_problems(config, make_math_problem)


def make_math_problem(row: TableRow, name: str) -> Problem:
    solution = row.text("solution") if row.values.get("solution") else None
    gold = FORMATS["boxed"].extract(solution) if solution else None
    if gold is None and row.values.get("answer") is not None:
        gold = row.text("answer")

    if gold is None:
        raise ValueError(f"{row.place}: no \\boxed{{}} in the solution, and no column 'answer'")

    return Problem(
        question=row.text("problem"),
        gold=gold,
        id=name,
        level=read_level(row),
        solution=solution,
        columns=dict(row.values),
    )


def read_level(row: TableRow) -> int | None:
    if row.values.get("level") is None:
        return None

    text = row.text("level")
    if text == NO_LEVEL:
        return None

    match = LEVEL.fullmatch(text)
    if match is None:
        raise ValueError(f"{row.place}: level {text[:40]!r} is not Level 1 to Level 5")

    return int(match[1])
