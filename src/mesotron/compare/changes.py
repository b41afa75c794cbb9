"""Settings by name: `rollout.prompts=8` and `optim.promote=none` on any config."""

import dataclasses
import difflib
from collections.abc import Iterable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mesotron.config.base import unchecked, validate

Config = TypeVar("Config")
SWITCHES = {"true": True, "false": False}


def change(config: Config, changes: Iterable[str]) -> Config:
    """A config with some values replaced.

    Args:
        config: a config dataclass; parts of it are reached by dots.
        changes: NAME=VALUE; several values of a list are parted by commas, and none is None unless
            the setting has a choice of that name.

    Raises:
        ValueError: a name that the config does not have, or a value that does not fit it.

    Example:
        >>> from mesotron.config import TrainConfig
        >>> made = change(TrainConfig(), ["rollout.prompts=8", "task.levels=1,2"])
        >>> made.rollout.prompts, made.task.levels
        (8, (1, 2))
    """
    with unchecked():  # several changes may only be valid together
        for item in changes:
            name, equals, word = item.partition("=")
            if not equals:
                raise ValueError(f"{item!r} must look like NAME=VALUE, such as steps=20")
            config = replace_at(config, name.strip().replace("-", "_").split("."), word, item)
    return validate(config)


def replace_at(config: Any, path: list[str], word: str, item: str) -> Any:
    """One value of a config, or of a part of it, replaced."""
    kinds = get_type_hints(type(config))
    known = [each.name for each in dataclasses.fields(config)]
    if path[0] not in known:
        close = difflib.get_close_matches(path[0], known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"{item!r}: there is no setting {path[0]!r}{hint}")
    kind, old = kinds[path[0]], getattr(config, path[0])
    if dataclasses.is_dataclass(old) != (len(path) > 1):
        raise ValueError(f"{item!r}: {path[0]} {'has' if len(path) == 1 else 'has no'} parts")
    new = replace_at(old, path[1:], word, item) if len(path) > 1 else read(kind, word, item)
    return dataclasses.replace(config, **{path[0]: new})


def read(kind: Any, word: str, item: str) -> Any:
    """A word as a value of a type; the first alternative of a union that takes it."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    named = [name for one in kinds if get_origin(one) is Literal for name in get_args(one)]
    if NoneType in kinds and word == "none" and "none" not in named:
        return None
    for one in kinds:
        if one is not NoneType and (found := read_one(one, word, item)) is not None:
            return found
    raise ValueError(f"{item!r}: {word!r} is not {' or '.join(map(describe, kinds))}")


def read_one(kind: Any, word: str, item: str) -> Any:
    """A word as a value of one plain type, None if it is not one."""
    if get_origin(kind) is tuple:
        return tuple(read(get_args(kind)[0], part, item) for part in word.split(",") if part)
    if get_origin(kind) is Literal:
        return {str(one): one for one in get_args(kind)}.get(word)
    if kind is bool:
        return SWITCHES.get(word.lower())
    try:
        return kind(word)
    except ValueError:
        return None


def describe(kind: Any) -> str:
    """A type in the words of a user."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        return f"values parted by commas, each {describe(get_args(kind)[0])}"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a word",
            Path: "a file name", NoneType: "none"}[kind]  # fmt: skip
