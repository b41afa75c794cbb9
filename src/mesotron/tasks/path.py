"""Tasks whose problems are read from `--data`: a file, a folder or a name on the hub."""

from collections.abc import Callable, Sequence

from mesotron.config import TaskConfig
from mesotron.tasks.problem import Problem, hold_out
from mesotron.tasks.registry import Loaded, find_source
from mesotron.tasks.table import TableRow, check_path, read_splits

MakeProblem = Callable[[TableRow, str], Problem]  # from a row and the problem's id


def check_location(config: TaskConfig) -> None:
    check_path(location_of(config))


def location_of(config: TaskConfig) -> str:
    location = config.data[0] if config.data else find_source(config).hub
    if location is None:
        raise ValueError(f"the task {config.name} needs a file or hub name: give --data")

    return location


def read_problems(config: TaskConfig, make: MakeProblem) -> Loaded:
    """The problems of a table. Without a test split, some rows are held out."""
    train_rows, test_rows = read_splits(location_of(config))
    train = _make_all(train_rows, "train", config, make)
    if test_rows is None:
        return hold_out(train, config.num_eval, config.seed)

    return train, _make_all(test_rows, "test", config, make)


def _make_all(
    rows: Sequence[TableRow], split: str, config: TaskConfig, make: MakeProblem
) -> list[Problem]:
    problems = [make(row, f"{config.name}-{split}-{i}") for i, row in enumerate(rows)]
    if not config.levels:
        return problems

    return [problem for problem in problems if problem.level in config.levels]
