"""Who may name code: `module:name` comes from the command line or the user's own TOML file.

A run folder, a manifest or a checkpoint may be somebody else's. A name in one of them is imported
only after `--trust`, and the working folder is not searched for it.
"""

import os
import sys
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any


def code_names(config: Any) -> list[str]:
    """Every `module:name` of a config and its sections."""
    names: list[str] = []
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            names += code_names(value)
        elif item.metadata.get("is_code"):
            values = value if isinstance(value, tuple) else (value,)
            names += [one for one in values if isinstance(one, str) and ":" in one]
    return names


def check_trusted(names: Collection[str], source: object, trust: bool) -> None:
    """Refuse names from a file that may be somebody else's, unless the user trusts it."""
    if names and not trust:
        raise ValueError(
            f"{source} names code to run: {', '.join(names)}; read that code, then add --trust"
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
