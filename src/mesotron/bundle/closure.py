"""What must be packed: the requirements of mesotron, walked against what the target has.

A package of the target is kept wherever its version serves; the rest comes as wheels, in the
versions that are in use here where those serve. The walk is greedy: each choice meets every
requirement known so far and is made again when a new one rules it out, but no earlier choice is
undone for a later one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from mesotron.bundle.target import Target
from mesotron.bundle.wheels import Wheelhouse, requirements_of


@dataclass
class Need:
    """One package that something asks for.

    Args:
        name: normalised.
        asked_by: the first package that asked.
        specifier: what all who asked allow.
        kept: the version that the target has and that serves, or None.
        wheel: the packed wheel otherwise.
        outdated: the version that the target has and that does not serve.
    """

    name: str
    asked_by: str
    specifier: SpecifierSet = field(default_factory=SpecifierSet)
    kept: str | None = None
    wheel: Path | None = None
    outdated: str | None = None


class Closure:
    """The walk over requirements.

    Args:
        target: what is there already.
        wheelhouse: where the rest comes from.
        brought: packages that come anyway, with what they ask for.
        tell: called with the name of each package that is fetched.

    Attributes:
        needs: every package that was asked for, by name, in the order of asking.
    """

    def __init__(
        self,
        target: Target,
        wheelhouse: Wheelhouse,
        brought: dict[str, list[Requirement]],
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.target, self.wheelhouse, self.brought, self.tell = target, wheelhouse, brought, tell
        self.needs: dict[str, Need] = {}
        self.done: set[tuple[str, str, str]] = set()  # package, version, extra

    def meet(self, wanted: Requirement, asked_by: str) -> None:
        """Have one package there, and all that it asks for."""
        name = canonicalize_name(wanted.name)
        if name in self.brought:
            version, further = "", self.brought[name]
        else:
            need = self.needs.setdefault(name, Need(name, asked_by))
            need.specifier &= wanted.specifier
            version, further = self.choose(need)
        for extra in ["", *sorted(wanted.extras)]:
            if (name, version, extra) not in self.done:
                self.done.add((name, version, extra))
                for one in further:
                    if one.marker is None or one.marker.evaluate(self.target.markers(extra)):
                        self.meet(one, name)

    def choose(self, need: Need) -> tuple[str, list[Requirement]]:
        """Keep the target's package or obtain a wheel; its version, and what it asks for."""
        installed = self.target.packages.get(need.name)
        if installed and need.specifier.contains(installed.version, prereleases=True):
            need.kept = str(installed.version)
            return need.kept, list(installed.requires)
        if need.wheel is None:
            self.tell(need.name)
        need.kept, need.outdated = None, str(installed.version) if installed else None
        need.wheel = self.wheelhouse.obtain(Requirement(f"{need.name}{need.specifier}"))
        return need.wheel.name, requirements_of(need.wheel)
