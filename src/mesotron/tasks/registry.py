"""What a task is: a name for `--task` and a function that loads its problems.

    @task("squares", about="Squares of numbers up to 999")
    def squares(config: TaskConfig) -> Loaded: ...

In a file of `builtin/` that is called like the task, that is all it takes: the command line, the
docs and the tests find it there. In any other file the name works once the file is imported.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mesotron.config import FormatName, TaskConfig
from mesotron.config.registry import TASKS
from mesotron.tasks.problem import Problem

Loaded = tuple[list[Problem], list[Problem]]  # to train on, and held out
Load = Callable[[TaskConfig], Loaded]


def accept(config: TaskConfig) -> None:
    """The check of a task that takes every config."""


@dataclass(frozen=True, kw_only=True)
class TaskSource:
    name: str
    load: Load
    about: str
    """Where the problems come from; a cell of the docs."""
    gold: str = ""
    """Where the gold answer comes from; a cell of the docs."""
    format: FormatName = "boxed"
    """How answers are written unless --task.format says otherwise."""
    check: Callable[[TaskConfig], None] = accept
    """Refuses unusable settings before anything heavy is loaded."""
    has_levels: bool = False
    """Whether --task.levels chooses among its problems."""
    reads_data: bool = False
    """Whether its problems are read from --data."""
    hub: str | None = None
    """The dataset on the hub that is read without a path."""
    num_train: int | None = None
    """Training problems unless --task.num-train says otherwise (None: all that there are)."""
    question_tokens: int | None = None
    """Tokens of a typical question, for `mesotron plan`."""


def task(name: str, **traits: Any) -> Callable[[Load], Load]:
    """Register a function that loads problems as the task `name`.

    Args:
        name: what `--task` calls it.
        traits: the further fields of `TaskSource`, of which `about` is required.
    """

    def register(load: Load) -> Load:
        source = TaskSource(name=name, load=load, **traits)
        TASKS.add(name, source, load.__module__)
        return load

    return register


def find_source(config: TaskConfig) -> TaskSource:
    return TASKS[config.source]
