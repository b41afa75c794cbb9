"""Who may name code: the command line and the user's own TOML file.

A run folder, a manifest or a checkpoint may come from elsewhere. A `module:name` or program in
one of them runs only after `--trust`, and the working folder is not searched for it.
"""

import os
import sys
from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import Any

from mesotron.config.base import flag_of, suggest
from mesotron.runs.own_code import calling, text_of

# Options of TRL that reach elsewhere without a colon: servers, Spaces, files of settings.
REACHING = ("vllm_server", "trackio", "hub_", "deepspeed", "fsdp", "accelerator_config")


def names_code(value: str) -> bool:
    return ":" in value or value.startswith(REACHING)


def code_settings(config: Any, prefix: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Name and values of the settings of a config and its sections that name code."""
    for item in fields(config):
        if is_dataclass(value := getattr(config, item.name)):
            yield from code_settings(value, f"{prefix}{item.name}.")
        elif item.metadata.get("is_code") and value:
            values = value if isinstance(value, tuple) else (value,)
            if any(map(names_code, values)):
                yield flag_of(item, prefix), values


def code_names(config: Any) -> list[str]:
    named: list[str] = []
    for _, values in code_settings(config):
        named += filter(names_code, values)

    return named


def check_trusted(names: Collection[str], source: object, trust: bool) -> None:
    """Refuse names from a file that may come from elsewhere, unless the user trusts it."""
    if names and not trust:
        raise ValueError(
            f"{source} names code or addresses: {', '.join(names)}; look at them, then give their "
            "flags again, such as --reward NAME, or add --trust"
        )


def search_working_folder() -> None:
    """Let imports find the user's files; last, so that they hide no installed module."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def import_named(name: str, what: str) -> Any:
    """The object behind `module:name` or `file.py:name`; any failure is a ValueError."""
    module_name, _, attribute = name.partition(":")
    is_file = module_name.endswith(".py")
    if is_file and not Path(module_name).expanduser().is_file():
        raise ValueError(f"there is no file {module_name} for the {what} {name!r}")

    try:
        with calling(f"the {what} {name}"):
            if is_file:
                module = import_file(module_name)
            else:
                module = import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code may raise anything; a script exits
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == module_name
        hint = " (for a file of yours give FILE.py:NAME)" if is_absent else ""
        reason = f"{type(error).__name__}: {text_of(error)}{hint}"
        raise ValueError(f"cannot import the {what} {name!r}: {reason}") from error

    if not callable(getattr(module, attribute, None)):
        known = []
        for one, value in vars(module).items():
            if callable(value):
                known.append(one)

        raise ValueError(f"{module_name} has no function {attribute!r}{suggest(attribute, known)}")

    return getattr(module, attribute)


def import_file(name: str) -> ModuleType:
    """A Python file as a module, once; files beside it can be imported by it."""
    path = Path(name).expanduser().resolve()
    key = f"own_{path.stem}"
    if getattr(sys.modules.get(key), "__file__", None) == str(path):
        return sys.modules[key]

    spec = util.spec_from_file_location(key, path)
    assert spec is not None
    assert spec.loader is not None

    sys.modules[key] = module = util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))

    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[key]
        raise

    return module
