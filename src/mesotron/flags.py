"""The flags of a config dataclass: their names, and what their types admit in a user's words."""

from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

PLAIN_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a word",
    Path: "a file name",
}


@dataclass(frozen=True)
class Flag:
    """One field of a config: its name without dashes, its type, whether it may go unnamed."""

    name: str
    type: Any
    positional: bool = False

    @property
    def num_values(self) -> int | None:
        """How many words it takes; None is any number."""
        if self._kinds == [bool]:
            return 0
        if get_origin(self._kinds[0]) is not tuple:
            return 1
        items = get_args(self._kinds[0])
        return None if Ellipsis in items else len(items)

    @property
    def item_type(self) -> Any:
        """The type of a single word."""
        several = get_origin(self._kinds[0]) is tuple
        return get_args(self._kinds[0])[0] if several else self.type

    @property
    def _kinds(self) -> list[Any]:
        return [kind for kind in alternatives(self.type) if kind is not NoneType]


def flags_of(config_type: Any, prefix: str = "") -> dict[str, Flag]:
    """Every flag of a config by name; a config inside it gives dotted ones: `--optim.name`."""
    hints = get_type_hints(config_type)
    found: dict[str, Flag] = {}
    for item in fields(config_type):
        name = prefix + item.name.replace("_", "-")
        if is_dataclass(hints[item.name]):
            found |= flags_of(hints[item.name], prefix=f"{name}.")
        else:
            positional = bool(item.metadata.get("positional"))
            found[name] = Flag(name, hints[item.name], positional)
    return found


def required(config_type: Any) -> list[str]:
    """Names of the fields without a default."""
    return [
        item.name.replace("_", "-")
        for item in fields(config_type)
        if item.default is MISSING and item.default_factory is MISSING
    ]


def describe_type(kind: Any) -> str:
    """A type in the words of a user: `int` is a whole number."""
    if get_origin(kind) is tuple:
        items = get_args(kind)
        one = describe_type(items[0])
        count = "one or more" if Ellipsis in items else len(items)
        return f"{count} values, each {one}"
    if get_origin(kind) is Literal:
        names = [str(name) for name in get_args(kind)]
        return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    if kind in PLAIN_WORDS:
        return PLAIN_WORDS[kind]
    return " or ".join(describe_type(one) for one in alternatives(kind) if one is not NoneType)


def choices(kind: Any) -> list[str]:
    """Every literal word a type admits, at any depth."""
    if get_origin(kind) is Literal:
        return [str(name) for name in get_args(kind)]
    return [name for part in get_args(kind) if part is not Ellipsis for name in choices(part)]


def alternatives(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
