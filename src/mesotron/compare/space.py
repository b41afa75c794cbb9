"""The search space of a sweep: a W&B sweep file, or ranges on the command line.

The same file works with `wandb sweep`. Used are `command`, `metric` and `parameters`.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml  # which optuna needs

Value = float | int | str | bool
RANGE = re.compile(r"([^,]+?)\.\.([^,]+)")
DISTRIBUTIONS = ("constant", "categorical", "int_uniform", "uniform", "log_uniform_values")
OTHERS = {"snake": ("ppo", "snake"), "vla": ("vla", "train")}  # besides `mesotron train`
# Arguments that send metrics to W&B, which needs an account.
TO_WANDB = (["--wandb"], ["--report-to", "wandb"], ["--report-to=wandb"])


@dataclass(frozen=True)
class Dimension:
    name: str  # of the flag, without dashes
    choices: tuple[Value, ...] = ()
    low: float | int = 0  # without choices: any value from low to high, integers if both are
    high: float | int = 0
    log: bool = False  # sample the logarithm uniformly

    def __post_init__(self) -> None:
        if not -math.inf < self.low <= self.high < math.inf or (self.log and not self.low > 0):
            kind = "a positive range" if self.log else "a range"
            raise ValueError(f"{self.name} {self.low:g}..{self.high:g} is not {kind} LOW..HIGH")

    @property
    def first(self) -> Value:
        return self.choices[0] if self.choices else self.low

    @property
    def varies(self) -> bool:
        if self.choices:
            return len(self.choices) > 1

        return self.low < self.high


@dataclass(frozen=True)
class Space:
    name: str  # of the study
    command: tuple[str, ...]  # shared arguments after `mesotron`: ("ppo", "snake", "--no-gif")
    dimensions: tuple[Dimension, ...]  # what varies
    metric: str | None = None  # to optimize; None for the command's own score
    goal: Literal["maximize", "minimize"] = "maximize"  # direction

    def arguments(self, values: Mapping[str, Value]) -> list[str]:
        return [*self.command, *(f"--{name}={value}" for name, value in values.items())]


def read_space(file: str, ranges: Sequence[str]) -> Space:
    path = Path(file)
    given = [read_range(item) for item in ranges]

    if path.suffix in (".yaml", ".yml", ".json"):
        space = _read_file(path)
    else:
        space = Space(file, OTHERS.get(file, ("train", file)), ())

    named = {one.name for one in given}
    dimensions = [one for one in space.dimensions if one.name not in named] + given
    if not any(one.varies for one in dimensions):
        raise ValueError(f"{file} has nothing to search: give --space optim.lr=1e-5..1e-3")

    return replace(space, dimensions=tuple(dimensions))


def _read_file(path: Path) -> Space:
    values = _read_values(path)
    metric = values.get("metric") or {}
    parameters = values.get("parameters") or {}
    if not isinstance(metric, dict) or not isinstance(parameters, dict):
        raise ValueError(f"{path}: metric and parameters must be mappings")

    named = metric.get("name")
    if not isinstance(named, str | None):
        raise ValueError(f"{path}: metric.name {named!r} must be a name")

    goal = metric.get("goal", "maximize" if named is None else "minimize")  # as W&B has it
    if goal not in ("maximize", "minimize"):
        raise ValueError(f"{path}: metric.goal {goal!r} must be maximize or minimize")

    dimensions = [_read_parameter(str(name), one, path) for name, one in parameters.items()]
    name = str(values.get("name", path.stem))
    command = _command(values.get("command"), path)

    return Space(name, command, tuple(dimensions), named, goal)


def _read_values(path: Path) -> dict[str, Any]:
    """A file's mapping, in YAML or JSON."""
    if not path.is_file():
        raise ValueError(f"there is no sweep file {path}: give one, or a recipe with --space")

    try:
        text = path.read_text(encoding="utf-8")

        if path.suffix == ".json":
            values = json.loads(text)
        else:
            values = yaml.safe_load(text)
    except Exception as error:  # of either library, or of the decoder
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error

    return values if isinstance(values, dict) else {"parameters": values}


def _command(words: Any, path: Path) -> tuple[str, ...]:
    """Arguments between `mesotron` and `${args}`, without those that send metrics to W&B."""
    if not isinstance(words, list) or "mesotron" not in words or "${args}" not in words:
        raise ValueError(f"{path}: command must be like [mesotron, train, arith, ${{args}}]")

    rest = []
    for word in words[words.index("mesotron") + 1 :]:
        if word != "${args}":
            rest.append(str(word))

    for unwanted in TO_WANDB:
        for place in range(len(rest) - len(unwanted), -1, -1):
            if rest[place : place + len(unwanted)] == unwanted:
                del rest[place : place + len(unwanted)]

    return tuple(rest)


def _read_parameter(name: str, about: Any, path: Path) -> Dimension:
    """One entry of `parameters`: a value, a list of values, or a range."""
    about = about if isinstance(about, dict) else {}
    kind = about.get("distribution")
    if kind is not None and kind not in DISTRIBUTIONS:
        known = ", ".join(DISTRIBUTIONS)
        raise ValueError(f"{path}: parameter {name} has distribution {kind!r}; known: {known}")

    if "value" in about:
        return Dimension(name, choices=(about["value"],))

    if "values" in about:
        values = about["values"]
        if not isinstance(values, list) or not values:
            raise ValueError(f"{path}: parameter {name} has values {values!r}: give a list")
        return Dimension(name, choices=tuple(values))

    low, high = _read_ends(name, about, path)
    if kind in ("uniform", "log_uniform_values"):
        low = float(low)
        high = float(high)

    return Dimension(name, low=low, high=high, log=kind == "log_uniform_values")


def _read_ends(name: str, about: dict[str, Any], path: Path) -> tuple[Any, Any]:
    low = about.get("min")
    high = about.get("max")
    if isinstance(low, str) or isinstance(high, str):
        raise ValueError(f"{path}: YAML reads {low!r} or {high!r} as text: write {name} as 1.0e-5")
    if low is None or high is None:
        raise ValueError(f"{path}: parameter {name} must have value, values, or min and max")
    if not all(isinstance(end, int | float) and math.isfinite(end) for end in (low, high)):
        raise ValueError(f"{path}: parameter {name} has min {low!r} and max {high!r}: give numbers")

    return low, high


def read_range(item: str) -> Dimension:
    """A range on the command line: NAME=LOW..HIGH or NAME=ONE,TWO. Positive floats a decade or more
    apart are sampled in the logarithm."""
    name, equals, words = item.partition("=")
    if not equals or not words:
        raise ValueError(f"--space {item!r} must look like optim.lr=1e-5..1e-3 or name=one,two")

    match = RANGE.fullmatch(words)
    if match is None:
        return Dimension(name, choices=tuple(words.split(",")))

    if all(re.fullmatch(r"[-+]?\d+", end) for end in match.groups()):
        number = int
    else:
        number = float

    try:
        low, high = map(number, match.groups())
    except ValueError as error:
        raise ValueError(f"--space {item!r} is not a range of numbers") from error

    log = number is float and low > 0 and high / low >= 10
    return Dimension(name, low=low, high=high, log=log)
