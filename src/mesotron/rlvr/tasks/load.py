"""Load a task by its config: the one door to every kind of problem."""

from __future__ import annotations

from mesotron.config.training import TaskConfig
from mesotron.rlvr.formats import FORMATS
from mesotron.rlvr.tasks import arith
from mesotron.rlvr.tasks.problem import Problem, Task, assemble

__all__ = ["Problem", "Task", "load_task"]

GENERATED = 20_000  # training problems of a generated task if the config does not say


def load_task(config: TaskConfig) -> Task:
    """Problems to train on and to judge by, as the config asks.

    Example:
        >>> task = load_task(TaskConfig(num_train=3, num_eval=2, levels=(1,)))
        >>> len(task.train), len(task.eval), task.format.name
        (3, 2, 'boxed')
    """
    train, held_out = _arith(config)
    return assemble(train, held_out, config, FORMATS[config.format])


def _arith(config: TaskConfig) -> tuple[list[Problem], list[Problem]]:
    count = GENERATED if config.num_train is None else config.num_train
    train = arith.generate("train", count + config.few_shot, config.levels, config.seed)
    return train, arith.generate("eval", config.num_eval, config.levels, config.seed)
