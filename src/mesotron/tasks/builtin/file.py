"""A table of questions and answers."""

from mesotron.config import TaskConfig
from mesotron.tasks.own import make_problem
from mesotron.tasks.path import check_location, read_problems
from mesotron.tasks.problem import Problem
from mesotron.tasks.registry import Loaded, task
from mesotron.tasks.table import Row


@task(
    "file",
    about="`.jsonl`, `.json`, `.csv`, `.parquet`, a folder, or a hub name",
    gold="`--task.answer-column`; an empty name means no gold",
    reads_path=True,
    check=check_location,
)
def file(config: TaskConfig) -> Loaded:
    # Without an answer column there is no gold: enough for majority-vote pseudo-labels.
    answer_column = config.answer_column or None

    def make(row: Row, name: str) -> Problem:
        if answer_column:
            row.text(answer_column)  # refuses what is no text

        return make_problem(row, name, config.question_column, answer_column)

    return read_problems(config, make)
