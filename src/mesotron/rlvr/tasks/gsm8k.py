"""GSM8K: grade-school word problems whose gold integer follows the last `####` (arXiv 2110.14168).

Read from a local file or folder, or from the hub; calculator marks are taken out of solutions.
"""

from __future__ import annotations

import re

from mesotron.rlvr.tasks.problem import Problem
from mesotron.rlvr.tasks.table import Row

HUB = ("openai/gsm8k", "main")

_MARK = re.compile(r"<<[^<>\n]{0,200}>>")


def gsm8k_problem(row: Row, name: str) -> Problem:
    """A row with the columns question and answer, as a problem.

    Raises:
        ValueError: if the answer has no `####`, with the row's place.

    Example:
        >>> answer = "48/2 = <<48/2=24>>24 clips in May.\\n48+24 = <<48+24=72>>72.\\n#### 72"
        >>> gsm8k_problem(Row("x:1", {"question": "How many?", "answer": answer}), "gsm8k-0")
        ... # doctest: +NORMALIZE_WHITESPACE
        Problem(question='How many?', gold='72', id='gsm8k-0', level=None,
            solution='48/2 = 24 clips in May.\\n48+24 = 72.')
    """
    answer = row.text("answer")
    steps, mark, gold = answer.rpartition("####")
    gold = gold.strip().replace(",", "")
    if not mark or not gold:
        raise ValueError(f"{row.place}: the answer has no gold after '####'")
    return Problem(row.text("question"), gold, name, solution=_MARK.sub("", steps).strip() or None)
