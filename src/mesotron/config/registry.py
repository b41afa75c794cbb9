"""Registries: tasks, environments, rewards, objectives, log formats and addresses by name, in one
file each.

The built-in names are the file names of one folder, so that the command line knows its choices
without importing anything. A file is imported when its entry is first asked for, and a decorator in
it adds the entry. In any other file the decorator adds a name as soon as that file is imported.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from mesotron.config.base import suggest


class Registry:
    """Entries by name.

    Args:
        kind: what an entry is called in messages.
        package: the package whose files are the built-in entries.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self.package = package
        self._entries: dict[str, Any] = {}

    @cached_property
    def _built_in(self) -> frozenset[str]:
        root = Path(__file__).parents[2]
        folder = root.joinpath(*self.package.split("."))
        return frozenset(file.stem for file in folder.glob("[a-z]*.py"))

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._built_in | self._entries.keys()))

    def add(self, name: str, entry: Any, module: str) -> None:
        """Add an entry that was defined in `module`."""
        is_its_file = module == f"{self.package}.{name}"
        if name in self._entries or (name in self._built_in and not is_its_file):
            raise ValueError(f"there is a {self.kind} {name!r} already: choose another name")

        self._entries[name] = entry

    def __contains__(self, name: str) -> bool:
        return name in self._built_in or name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise ValueError(f"the {self.kind} {name!r} {self.hint(name)}")

        if name not in self._entries:
            import_module(f"{self.package}.{name}")

        return self._entries[name]

    def hint(self, name: str) -> str:
        """The rest of a message on an unknown name."""
        return unknown(name, self.names())


def unknown(name: str, names: Sequence[str]) -> str:
    """The rest of a message on a name that is none of these."""
    return f"is unknown{suggest(name, names) or ': one of ' + ', '.join(names)}"


TASKS = Registry("task", "mesotron.tasks.builtin")
ENVIRONMENTS = Registry("environment", "mesotron.tasks.environments")
REWARDS = Registry("reward", "mesotron.rewards.builtin")
ADDRESSES = Registry("address", "mesotron.watch.addresses")
FORMATS = Registry("log format", "mesotron.watch.formats")
OBJECTIVES = Registry("objective", "mesotron.rlvr.objectives")
