r"""MATH: competition problems in five levels, with the gold in the solution's last \boxed{}.

Hendrycks et al., Measuring Mathematical Problem Solving (arXiv 2103.03874). The data are never
shipped: they are read from a local file, or from the hub by the name that you give.
"""

from __future__ import annotations

import re

from mesotron.rlvr.answers.formats import FORMATS
from mesotron.rlvr.tasks.problem import Problem
from mesotron.rlvr.tasks.table import Row

_LEVEL = re.compile(r"(?:Level )?([1-5])", re.ASCII)


def math_problem(row: Row, name: str) -> Problem:
    r"""A row with the columns problem, solution (or answer) and level, as a problem.

    Raises:
        ValueError: if there is no gold, or a level that is none, with the row's place.

    Example:
        >>> row = {"problem": "What is 1+1?", "solution": r"It is \boxed{2}.", "level": "Level 1"}
        >>> math_problem(Row("x:1", row), "math-0").gold
        '2'
    """
    solution = row.text("solution") if row.values.get("solution") else None
    gold = FORMATS["boxed"].extract(solution) if solution else None
    if gold is None and row.values.get("answer") is not None:
        gold = row.text("answer")
    if gold is None:
        raise ValueError(f"{row.place}: no \\boxed{{}} in the solution, and no column 'answer'")
    return Problem(row.text("problem"), gold, name, _level(row), solution)


def _level(row: Row) -> int | None:
    if row.values.get("level") is None:
        return None
    level = row.text("level")
    match = _LEVEL.fullmatch(level)
    if match is None and level != "Level ?":  # the data have three such rows
        raise ValueError(f"{row.place}: level {level[:40]!r} is not Level 1 to Level 5")
    return int(match[1]) if match else None
