"""The machine that a bundle is for: its Python, its processor, and what it already has."""

import json
import re
from dataclasses import dataclass, field

from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from mesotron.config import BundleConfig

VERSION = re.compile(r"\d+\.\d+")
# The oldest manylinux that wheels of supported Pythons are built for.
OLDEST_GLIBC = 17


@dataclass(frozen=True)
class Installed:
    """A package on the target."""

    version: Version
    requires: tuple[Requirement, ...] = ()


@dataclass(frozen=True)
class Target:
    """What wheels must fit to.

    Args:
        python: as in 3.12.
        machine: as in x86_64 or aarch64.
        glibc: as in 2.28.
        packages: what is installed, by normalised name.
    """

    python: str
    machine: str
    glibc: str
    packages: dict[str, Installed] = field(default_factory=dict)

    def platforms(self) -> list[str]:
        """The platform tags of Linux wheels that run there, newest first.

        Example:
            >>> Target("3.12", "x86_64", "2.18").platforms()
            ['manylinux_2_18_x86_64', 'manylinux_2_17_x86_64', 'manylinux2014_x86_64']
        """
        newest = int(self.glibc.split(".")[1])
        tags = [f"manylinux_2_{minor}" for minor in range(newest, OLDEST_GLIBC - 1, -1)]
        return [f"{tag}_{self.machine}" for tag in [*tags, "manylinux2014"]]

    def tags(self) -> set[Tag]:
        """What the name of a wheel may say for it to run there."""
        major, minor = map(int, self.python.split(".")[:2])
        places = self.platforms()
        own = cpython_tags((major, minor), platforms=places)
        return {*own, *compatible_tags((major, minor), f"cp{major}{minor}", [*places, "any"])}

    def markers(self, extra: str = "") -> dict[str, str]:
        """The values that a requirement's marker (`; python_version < "3.11"`) asks about."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
            "extra": extra,
        }


def read_target(config: BundleConfig) -> Target:
    """The target that the command line describes, by a file or by its flags.

    Raises:
        ValueError: a file that probe.py did not write, or a value that names no machine.
    """
    if config.target is None:
        plain = {"python": config.python, "machine": config.machine, "glibc": config.glibc}
        return from_plain(plain, "the command line")
    try:
        plain = json.loads(config.target.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{config.target} is not what probe.py prints ({error}); on the target run "
            "`python3 probe.py > target.json`"
        ) from error
    return from_plain(plain, str(config.target))


def from_plain(plain: object, source: str) -> Target:
    """A target from plain values, each checked: the file comes from another machine."""
    if not isinstance(plain, dict):
        raise ValueError(f"{source} holds no table; write it with probe.py on the target")
    values = {name: plain.get(name) for name in ("python", "glibc")}
    for name, value in values.items():
        if not isinstance(value, str) or not VERSION.match(value):
            raise ValueError(f"{source} gives {name} as {value!r}, which is no version like 3.12")
    machine = plain.get("machine")
    if not isinstance(machine, str) or not machine.isidentifier():
        raise ValueError(f"{source} gives machine as {machine!r}, which is no name like x86_64")
    packages = plain.get("packages", {})
    if not isinstance(packages, dict):
        raise ValueError(f"{source} gives packages as {packages!r:.60}, which is no table")
    installed = {
        str(canonicalize_name(name)): read_package(name, value, source)
        for name, value in packages.items()
    }
    return Target(str(values["python"]), machine, str(values["glibc"]), installed)


def read_package(name: str, value: object, source: str) -> Installed:
    """One installed package."""
    try:
        if not isinstance(value, dict):
            raise TypeError("no table")
        requires = tuple(Requirement(text) for text in value.get("requires", []))
        return Installed(Version(value["version"]), requires)
    except (InvalidRequirement, InvalidVersion, KeyError, TypeError) as error:
        raise ValueError(
            f"{source} describes {name} in a way that is not pip's: {error}"
        ) from error
