"""A config back from the plain values of a JSON file; the standard library only."""

from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from mesotron.config.aliases import rename_keys

Config = TypeVar("Config")


def from_plain(config_type: type[Config], values: dict[str, Any], source: str = "config") -> Config:
    """Build a config from what `config.json` holds.

    Args:
        config_type: a config dataclass.
        values: field names to plain values; a field that is left out has its default.
        source: where the values are from, for the error.

    Raises:
        ValueError: a name that the config does not have.

    Example:
        >>> from mesotron.config import TaskConfig
        >>> from_plain(TaskConfig, {"levels": [1, 2]}).levels
        (1, 2)
    """
    values = rename_keys(config_type, values)
    hints = get_type_hints(config_type)
    known = {item.name for item in fields(config_type)}  # type: ignore[arg-type]
    unknown = [name for name in values if name not in known]
    if unknown:
        raise ValueError(
            f"{source} has {unknown[0]!r}, which this version of mesotron does not know here; use "
            "the command and the version that wrote it"
        )
    return config_type(**{name: value_of(hints[name], x, source) for name, x in values.items()})


def value_of(kind: Any, plain: Any, source: str) -> Any:
    """One plain value as the type of its field."""
    if get_origin(kind) in (Union, UnionType):
        kinds = [one for one in get_args(kind) if one is not NoneType]
        return None if plain is None else value_of(kinds[0], plain, source)
    if is_dataclass(kind) and isinstance(kind, type):
        return from_plain(kind, plain, source)
    if get_origin(kind) is tuple:
        return tuple(plain)
    return Path(plain) if kind is Path else plain
