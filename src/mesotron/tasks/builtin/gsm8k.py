"""GSM8K (arXiv 2110.14168): school mathematics in words. It is not shipped."""

from mesotron.config import TaskConfig
from mesotron.tasks.own import make_problem
from mesotron.tasks.path import check_location, read_problems
from mesotron.tasks.problem import Problem
from mesotron.tasks.registry import Loaded, task
from mesotron.tasks.table import TableRow


@task(
    "gsm8k",
    about="a JSONL file, a folder, or a hub name (default `openai/gsm8k`)",
    gold="after the last `####`, without commas",
    reads_data=True,
    hub="openai/gsm8k",
    check=check_location,
)
def gsm8k(config: TaskConfig) -> Loaded:
    return read_problems(config, make_gsm8k_problem)


def make_gsm8k_problem(row: TableRow, name: str) -> Problem:
    _, mark, gold = row.text("answer").rpartition("####")
    if not mark or not gold.strip():
        raise ValueError(f"{row.place}: the answer has no gold after '####'")

    return make_problem(row, name, "question", "answer")
