"""`mesotron bundle`: walk the requirements, fetch wheels for the target, cut into pieces."""

import importlib.metadata
import shutil
import sys
from pathlib import Path

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from mesotron.bundle import install, probe
from mesotron.bundle.closure import Closure, Need
from mesotron.bundle.pieces import read_size, write_pieces
from mesotron.bundle.target import Target, read_target
from mesotron.bundle.wheels import OWN, Wheelhouse, pack_own
from mesotron.config import BundleConfig


def run(config: BundleConfig) -> int:
    """Fill the bundle's folder.

    Returns:
        0.
    """
    if config.probe:
        sys.stdout.write(Path(probe.__file__).read_text(encoding="utf-8"))
        return 0
    largest = read_size(config.piece) if config.piece else None
    check(config)
    console = Console(highlight=False)
    target = read_target(config)
    house = Wheelhouse(config.out / "wheels", target)
    own = [Requirement(line) for line in importlib.metadata.requires(OWN) or []]
    closure = Closure(target, house, {OWN: own}, lambda name: console.print(f"fetching {name}"))
    closure.meet(Requirement(f"{OWN}[{','.join(config.extras)}]"), "")
    bare = [house.obtain(Requirement(name)) for name in config.bare]
    wheels = [need.wheel for need in closure.needs.values() if need.wheel and not need.kept]
    wheels += [*bare, pack_own(house.folder)]
    contents = [(path, f"wheels/{path.name}") for path in wheels]
    contents += [(path, f"files/{path.name}") for path in config.files]
    pieces = write_pieces(config.out, contents, largest)
    shutil.copy(install.__file__, config.out / "install.py")
    console.print(table(list(closure.needs.values()), bare, target))
    total = sum(int(piece["bytes"]) for piece in pieces)
    console.print(
        f"{len(wheels)} wheels and {len(config.files)} files in {len(pieces)} pieces, "
        f"{total / 2**20:.1f} MiB. Copy {config.out}/piece-*, pieces.json and install.py to the "
        "target and run there: python3 install.py ~/mesotron",
        soft_wrap=True,
    )
    return 0


def check(config: BundleConfig) -> None:
    """Refuse what cannot be packed before anything is fetched."""
    known = importlib.metadata.metadata(OWN).get_all("Provides-Extra") or []
    for extra in config.extras:
        if extra not in known:
            raise ValueError(f"mesotron has no part {extra!r}; parts: {', '.join(known)}")
    for path in config.files:
        if not path.exists():
            raise ValueError(f"{path} does not exist; --files takes files and folders that do")


def table(needs: list[Need], bare: list[Path], target: Target) -> Table:
    """What the target gets, and who asked for it."""
    kept = sum(need.kept is not None for need in needs)
    machine = f"Python {target.python}, {target.machine}, glibc {target.glibc}"
    shown = Table(title=f"{machine}: keeps {kept} packages that serve")
    for name in ("package", "asked for by", "the target has", "packed"):
        shown.add_column(name)
    shown.add_column("MiB", justify="right")
    for need in sorted(needs, key=lambda need: need.name):
        if need.wheel and not need.kept:
            had = f"{need.outdated} (does not serve)" if need.outdated else ""
            shown.add_row(need.name, need.asked_by, had, *facts_of(need.wheel))
    for path in bare:
        shown.add_row(path.name.split("-")[0], "--bare", "", *facts_of(path))
    return shown


def facts_of(wheel: Path) -> tuple[str, str]:
    """Version and size of a wheel."""
    return wheel.name.split("-")[1], f"{wheel.stat().st_size / 2**20:.1f}"
