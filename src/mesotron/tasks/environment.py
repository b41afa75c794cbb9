"""What an environment is: a name for `--env`, its problems, and how an episode of one is played.

    @environment("counter", about="Counts to a number", needs=("counter_package",))
    class Counter:
        def __init__(self, name: str) -> None: ...
        def problems(self, count: int | None) -> list[Problem]: ...
        async def play(self, start: Start, writer: Writer) -> Played: ...

In a file of `environments/` that is called like the environment, that is all it takes. `play` asks
`writer.reply(*messages)` for each of the model's messages: `sampling.turns` runs many episodes at
once, and lets the model write for all that wait.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from mesotron.config import TaskConfig
from mesotron.config.registry import ENVIRONMENTS
from mesotron.runs.extras import require
from mesotron.tasks.problem import Problem, hold_out

KEY = "environment"  # the column that holds a problem's environment and start
NUM_DRAWN = 500  # problems of an environment that has no end of them
HELD_OUT_SHARE = 5  # at most one problem in five is held out

Start = Any  # what begins an episode, as plain data: a seed, or the number of a problem
ChatMessage = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Played:
    """What an episode earned."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """The rewards that add up to it, by name."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What is only logged."""


class Writer(Protocol):
    """The model, as an episode sees it."""

    async def reply(
        self, *messages: ChatMessage, tools: Sequence[Mapping[str, Any]] = ()
    ) -> ChatMessage | None:
        """What the model writes after these messages, which follow all before; None if no tokens
        are left for it."""
        ...


class Environment(Protocol):
    def problems(self, count: int | None) -> list[Problem]:
        """At most so many problems (None: all), with `make_columns` as their columns. They are only
        listed and shown: the messages of an episode come from `play`."""
        ...

    def serving(self) -> AbstractAsyncContextManager[Any]:
        """Holds what episodes share, such as servers and connections."""
        ...

    async def play(self, start: Start, writer: Writer) -> Played:
        """Play one episode; what it raises costs this sample."""
        ...


@dataclass(frozen=True, kw_only=True)
class EnvironmentKind:
    name: str
    make: Callable[[str], Environment]
    about: str
    """Where the environment comes from; a cell of the docs."""
    needs: tuple[str, ...] = ()
    """Packages that must be installed."""
    extra: str | None = None
    """The extra of Mesotron that has them."""


Made = TypeVar("Made", bound=Callable[[str], Any])


def environment(name: str, **traits: Any) -> Callable[[Made], Made]:
    """Register a class, which is made with what follows `name:`, as the environments `name:...`.

    Args:
        name: what `--env` calls it.
        traits: the further fields of `EnvironmentKind`, of which `about` is required.
    """

    def register(make: Made) -> Made:
        kind = EnvironmentKind(name=name, make=make, **traits)
        ENVIRONMENTS.add(name, kind, make.__module__)
        return make

    return register


def make_columns(name: str, start: Start) -> dict[str, Any]:
    """The columns of a problem that is played by an environment."""
    return {KEY: [name, start]}


def check_environments(config: TaskConfig) -> None:
    """Refuse environments whose packages are not installed, before anything is loaded."""
    for name in config.env:
        kind = ENVIRONMENTS[name.partition(":")[0]]
        if kind.needs:
            require(kind.extra, kind.needs, f"--env {name}")


@lru_cache(maxsize=16)
def open_environment(name: str) -> Environment:
    kind, _, rest = name.partition(":")
    try:
        return ENVIRONMENTS[kind].make(rest)
    except Exception as error:
        raise ValueError(f"--env {name} cannot be used: {error}") from error


def read_environments(config: TaskConfig) -> tuple[list[Problem], list[Problem]]:
    """Training and held-out problems of all environments, by their weights."""
    listed = []
    for name in config.env:
        listed.append(list_problems(name, config))

    sizes = [len(problems) for problems in listed]
    weights = config.weights or sizes

    train: list[Problem] = []
    held_out: list[Problem] = []
    for problems, weight in zip(listed, weights, strict=True):
        share = weight / sum(weights)
        count = min(round(config.num_eval * share), max(1, len(problems) // HELD_OUT_SHARE))
        rest, test = hold_out(problems, count if config.num_eval else 0, config.seed)

        if config.weights and rest:  # as many problems as before in all
            number = round(sum(sizes) * share)
            rest = [rest[i % len(rest)] for i in range(number)]

        train += rest
        held_out += test

    return train, held_out


def list_problems(name: str, config: TaskConfig) -> list[Problem]:
    """The problems of one environment. Problems that begin alike may differ in what is hidden, so
    each is told apart by its number."""
    count = None if config.num_train is None else config.num_train + config.num_eval
    try:
        problems = open_environment(name).problems(count)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"--env {name} gave no problems: {error!r}") from error

    if not problems:
        raise ValueError(f"--env {name} has no problems")

    numbered = []
    for number, problem in enumerate(problems):
        messages = problem.messages or [{"role": "user", "content": problem.question}]
        question = f"{problem.question} [{name} {number}]"
        numbered.append(replace(problem, question=question, messages=messages))

    return numbered
