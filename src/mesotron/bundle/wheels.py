"""Wheels: fetched by pip for another machine, and this package's own, packed from its files."""

import base64
import hashlib
import importlib.metadata
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

import mesotron
from mesotron.bundle.target import Target

OWN = "mesotron"


class Wheelhouse:
    """A folder of wheels for one target; what is already in it is not fetched again.

    Args:
        folder: where the wheels lie.
        target: whose Python and processor they must fit.
    """

    def __init__(self, folder: Path, target: Target) -> None:
        self.folder, self.target = folder, target
        self.complaint = ""  # pip's last
        folder.mkdir(parents=True, exist_ok=True)

    def obtain(self, wanted: Requirement) -> Path:
        """A wheel that meets a requirement: one that lies here, the version in use here, or any.

        Raises:
            ValueError: no wheel for the target meets it.
        """
        lying = [path for path in self.of(wanted.name) if meets(path, wanted, self.target)]
        if lying:
            return lying[0]
        for path in self.of(wanted.name):  # of another version or machine, of no use any more
            path.unlink()
        here = version_here(wanted.name)
        if here is not None and wanted.specifier.contains(here, prereleases=True):
            found = self.fetch(f"{wanted.name}=={here}")
            if found is not None:
                return found
        found = self.fetch(f"{wanted.name}{wanted.specifier}")
        if found is None:
            raise ValueError(
                f"no wheel of {wanted.name}{wanted.specifier} for Python {self.target.python} on "
                f"{self.target.machine} (glibc {self.target.glibc}) could be had: "
                f"{self.complaint}"
            )
        return found

    def of(self, name: str) -> list[Path]:
        """The wheels of one package that lie here."""
        canonical = canonicalize_name(name)
        wheels = self.folder.glob("*.whl")
        return sorted(path for path in wheels if parse_wheel_filename(path.name)[0] == canonical)

    def fetch(self, requirement: str) -> Path | None:
        """Ask pip for one wheel, without what it asks for; None if pip finds none."""
        before = set(self.folder.glob("*.whl"))
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        words += ["--disable-pip-version-check", "--only-binary", ":all:"]
        words += ["--python-version", self.target.python, "--dest", str(self.folder)]
        for platform in self.target.platforms():
            words += ["--platform", platform]
        done = subprocess.run([*words, requirement], capture_output=True, text=True)
        new = set(self.folder.glob("*.whl")) - before
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        self.complaint = errors[-1].removeprefix("ERROR: ") if errors else "pip did not say why"
        return new.pop() if done.returncode == 0 and new else None


def meets(path: Path, wanted: Requirement, target: Target) -> bool:
    """Whether a wheel is of a version that a requirement allows, and runs on the target."""
    _, version, _, tags = parse_wheel_filename(path.name)
    return bool(tags & target.tags()) and wanted.specifier.contains(version, prereleases=True)


def version_here(name: str) -> str | None:
    """The version of a package in this environment, which is the one that was tried."""
    try:
        return importlib.metadata.version(name).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements_of(path: Path) -> list[Requirement]:
    """What a wheel asks for, from its METADATA."""
    with zipfile.ZipFile(path) as wheel:
        name = next(one for one in wheel.namelist() if one.endswith(".dist-info/METADATA"))
        text = wheel.read(name).decode("utf-8", "replace")
    lines = HeaderParser().parsestr(text).get_all("Requires-Dist", [])
    return [Requirement(line) for line in lines]


def pack_own(folder: Path) -> Path:
    """This package as a wheel, from the files that are imported here; needs no build tool.

    Returns:
        The wheel's path.
    """
    about = importlib.metadata.distribution(OWN)
    stem = f"{OWN}-{about.version}"
    source = Path(mesotron.__file__).parent
    files = {
        f"{OWN}/{path.relative_to(source).as_posix()}": path.read_bytes()
        for path in sorted(source.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    for name in ("METADATA", "entry_points.txt"):
        files[f"{stem}.dist-info/{name}"] = (about.read_text(name) or "").encode()
    files[f"{stem}.dist-info/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: mesotron\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    record = [f"{name},sha256={digest(data)},{len(data)}" for name, data in files.items()]
    own = f"{stem}.dist-info/RECORD"
    files[own] = "\n".join([*record, f"{own},,", ""]).encode()
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            # A fixed date: the same files give the same bytes.
            wheel.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), data)
    return path


def digest(data: bytes) -> str:
    """A hash in the form that a wheel's RECORD has."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
