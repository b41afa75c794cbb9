"""Load the task that a config names, or the user's own data."""

from dataclasses import replace

from mesotron.config import TaskConfig
from mesotron.tasks.environment import check_environments, read_environments
from mesotron.tasks.own import read_own
from mesotron.tasks.problem import Problem, Task, assemble, without
from mesotron.tasks.registry import find_source
from mesotron.tasks.table import check_path


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
    if config.env:
        train, held_out = read_environments(config)
    elif config.has_own_data:
        train, held_out, _ = read_own(config)
    else:
        train, held_out = find_source(config).load(config)

    if config.curriculum is not None:  # as many of each level
        config = replace(config, num_train=None)

    return assemble(train, held_out, config)


def load_fresh(config: TaskConfig, task: Task) -> list[Problem]:
    """Held-out problems beyond those of a task, at most as many; none where there are no more."""
    count = len(task.eval)
    seen = [*task.train, *task.eval, *task.examples]
    more = replace(config, num_eval=config.num_eval + count, num_train=1)
    try:
        held_out = load_task(more).eval
    except ValueError:  # fewer different questions than asked for
        return []

    return without(held_out, seen)[:count]


def check_task(config: TaskConfig) -> None:
    """Refuse a path that does not exist, and what the task itself refuses."""
    for path in config.data:
        check_path(path)

    if config.env:
        check_environments(config)
    elif not config.has_own_data:
        find_source(config).check(config)
