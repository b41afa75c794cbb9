"""Old names of commands and settings, which keep working.

A command of an old name runs with a note for one release. A setting is named by its place in a
config, such as rollout.engine; its old flag is that name with dashes. Old flags, TOML files and
the config.json of old runs are all read through `upgrade`. The standard library only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

COMMANDS = {
    "reward check": "check",
    "sweep": "compare sweep",
    "route": "optim route",
    "spectrum": "optim spectrum",
}


@dataclass(frozen=True)
class Alias:
    """What became of a setting."""

    new: str
    convert: Callable[[Any], Any] = lambda value: value  # the old value to the new one


def is_fast_engine(engine: Any) -> bool:
    engines = {
        "generate": False,
        "graph": True,
        "fused": True,
    }
    if engine not in list(engines):
        raise ValueError(f"--rollout.engine {engine} must be one of {', '.join(engines)}")

    return engines[engine]


SETTINGS = {
    "data.files": Alias("task.data"),
    "guard.precision": Alias("watch.precision"),
    "rollout.engine": Alias("rollout.fast", is_fast_engine),
    "rollout.share_prompts": Alias("rollout.fast", bool),
    "rollout.record": Alias("rollout.fast", bool),
}


def upgrade_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted names, old ones replaced. A switch is on if any of its old names is."""
    upgraded = {name: value for name, value in values.items() if name not in SETTINGS}

    for name, value in values.items():
        alias = SETTINGS.get(name)
        if alias is None:
            continue

        converted = alias.convert(value)
        if converted is True or alias.new not in upgraded:
            upgraded[alias.new] = converted

    return upgraded


def upgrade(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config as plain values, with sections, in today's names."""
    flat = {}
    for section, table in values.items():
        if isinstance(table, Mapping):
            flat |= {f"{section}.{key.replace('-', '_')}": value for key, value in table.items()}

    if not flat.keys() & SETTINGS.keys():
        return dict(values)

    whole = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    return whole | nest(upgrade_names(flat))


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names as sections: {"optim.lr": 1} becomes {"optim": {"lr": 1}}."""
    sections: dict[str, Any] = {}
    for path, value in values.items():
        section, dot, name = path.partition(".")
        if dot:
            sections.setdefault(section, {})[name] = value
        else:
            sections[path] = value

    return sections
