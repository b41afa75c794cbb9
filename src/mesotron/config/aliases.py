"""Old flags and config keys that still work, in one table: command line, TOML and config.json."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

# Config class -> old field -> (new field, old value to new value).
# Several old fields may map to one switch: it is on if any of them is.
ALIASES: dict[str, dict[str, tuple[str, Callable[[Any], Any]]]] = {
    "RolloutConfig": {
        "engine": ("fast", lambda engine: engine != "generate"),
        "share_prompts": ("fast", bool),
        "record": ("fast", bool),
    },
}


def rename_keys(config_type: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the old keys of one config's plain values."""
    aliases = ALIASES.get(config_type.__name__, {})
    renamed = {key: value for key, value in values.items() if key not in aliases}
    for old, value in values.items():
        if old in aliases:
            new, convert = aliases[old]
            renamed[new] = renamed.get(new, False) or convert(value)
    return renamed


def rename_flags(config_type: type, args: list[str]) -> list[str]:
    """Rename the old flags of a command line."""
    old_flags = _old_flags(config_type)
    switches: dict[str, bool] = {}
    kept: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        name, equals, text = arg.partition("=")
        flag = name.replace("_", "-")
        positive = flag.replace("--no-", "--", 1)
        if positive not in old_flags:
            kept.append(arg)
            continue
        new, convert = old_flags[positive]
        value: Any = positive == flag
        if value and (equals or (rest and not rest[0].startswith("-"))):
            text = text if equals else rest.pop(0)
            value = {"true": True, "false": False}.get(text.lower(), text)
        switches[new] = switches.get(new, False) or bool(convert(value))
    return kept + [new if on else new.replace("--", "--no-", 1) for new, on in switches.items()]


def _old_flags(
    config_type: type, prefix: str = "--"
) -> dict[str, tuple[str, Callable[[Any], Any]]]:
    aliases = ALIASES.get(config_type.__name__, {})
    flags = {
        prefix + old.replace("_", "-"): (prefix + new, convert)
        for old, (new, convert) in aliases.items()
    }
    hints = get_type_hints(config_type)
    for item in fields(config_type):
        if is_dataclass(kind := hints[item.name]) and isinstance(kind, type):
            flags |= _old_flags(kind, f"{prefix}{item.name}.")
    return flags
