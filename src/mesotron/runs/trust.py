"""Who may name code: the command line and the user's own TOML file.

A run folder, a manifest or a checkpoint may be somebody else's. A `module:name` or program in
one of them runs only after `--trust`, and the working folder is not searched for it.
"""

import os
import sys
from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any


def code_settings(config: Any, prefix: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Name and values of the settings of a config and its sections that name code."""
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            yield from code_settings(value, f"{prefix}{item.name}.")
        elif item.metadata.get("is_code") and ":" in " ".join(values := as_tuple(value)):
            yield prefix + item.name, values


def code_names(config: Any) -> list[str]:
    return [one for _, values in code_settings(config) for one in values if ":" in one]


def as_tuple(value: Any) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else () if value is None else (value,)


def check_trusted(names: Collection[str], source: object, trust: bool) -> None:
    """Refuse names from a file that may be somebody else's, unless the user trusts it."""
    if names and not trust:
        raise ValueError(
            f"{source} names code or addresses: {', '.join(names)}; look at them, then add --trust"
        )


def search_working_folder() -> None:
    """Let imports find the user's files; last, so that they hide no installed module."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def import_named(name: str, what: str) -> Any:
    """The object behind `module:name`; any failure of its module is a ValueError."""
    module_name, _, attribute = name.partition(":")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # user code may raise anything; a script exits
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == module_name
        hint = " (for a file of yours here set PYTHONPATH=.)" if is_absent else ""
        reason = f"{type(error).__name__}: {error}{hint}"
        raise ValueError(f"cannot import the {what} {name!r}: {reason}") from error
    if not callable(getattr(module, attribute, None)):
        raise ValueError(f"the module {module_name} has no {what} {attribute!r}")
    return getattr(module, attribute)
