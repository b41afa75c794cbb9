"""A config with some values replaced by NAME=VALUE, as in `--set` and `pion:promote=2`."""

from collections.abc import Iterable
from dataclasses import replace
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from mesotron.config import base
from mesotron.config.flags import read_setting

Config = TypeVar("Config")


def change(config: Config, changes: Iterable[str]) -> Config:
    """A config with some values replaced by NAME=VALUE. Nested names have dots, lists commas; none
    is None unless the setting has a choice of that name.

    >>> from mesotron.config import TrainConfig
    >>> change(TrainConfig(), ["rollout.prompts=8", "task.levels=1,2"]).task.levels
    (1, 2)
    """
    kinds = {one.path: one.kind for one in base.flags_of(type(config)).values()}
    with base.unchecked():  # several changes may only be valid together
        for item in changes:
            name, text = read_setting(type(config), item)
            if name.startswith("trl."):
                option = f"{name.removeprefix('trl.')}={text}"
                config = replace(config, trl=(*config.trl, option))  # pyright: ignore
                continue

            kind = kinds[name]
            config = replace_at(config, name.split("."), read_value(kind, text, item))

    return base.validate(config)


def replace_at(config: Any, path: list[str], value: Any) -> Any:
    """The config with the field at `path`, such as optim and lr, replaced."""
    first, *rest = path
    if rest:
        value = replace_at(getattr(config, first), rest, value)

    return replace(config, **{first: value})


def read_value(kind: Any, text: str, item: str) -> Any:
    """Text as a value of a type; the first alternative of a union that takes it."""

    if get_origin(kind) in (Union, UnionType):
        alternatives = get_args(kind)
    else:
        alternatives = (kind,)

    kinds = [one for one in alternatives if one is not NoneType]

    is_optional = NoneType in alternatives
    is_choice = any(get_origin(one) is Literal and "none" in get_args(one) for one in kinds)
    if is_optional and text == "none" and not is_choice:
        return None

    for one in kinds:
        value = try_value(one, text, item)
        if value is not None:
            return value

    raise ValueError(f"{item!r}: {text!r} is not {base.describe_type(kind)}")


def try_value(kind: Any, text: str, item: str) -> Any:
    """Text as a value of one type, or None."""
    if get_origin(kind) is tuple:
        parts = [part for part in text.split(",") if part]
        return tuple(read_value(get_args(kind)[0], part, item) for part in parts)

    if get_origin(kind) is Literal:
        choices = {str(choice): choice for choice in get_args(kind)}
        return choices.get(text)

    if kind is bool:
        return {"true": True, "false": False}.get(text.lower())

    try:
        return kind(text)
    except ValueError:
        return None
