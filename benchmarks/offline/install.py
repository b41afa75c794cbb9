"""Run on the target machine: `python3 install.py FOLDER`. Standard library only, no network.

Joins the pieces beside this script, unpacks every wheel into FOLDER/site and the files into
FOLDER/files, and writes FOLDER/bin/mesotron. Nothing outside FOLDER is touched; remove it to undo.
"""

import hashlib
import io
import json
import shutil
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

LAUNCHER = """#!{python}
import sys
sys.path.insert(0, {site!r})
from mesotron.cli import main
sys.exit(main())
"""


def check_pieces(source: Path) -> list[Path]:
    """The pieces in order; exits with a message if one is missing or damaged."""
    manifest = source / "pieces.json"
    if not manifest.is_file():
        sys.exit("install: pieces.json is not beside this script; copy the whole bundle")

    pieces = []
    for facts in json.loads(manifest.read_text())["pieces"]:
        path = source / Path(facts["name"]).name
        if not path.is_file():
            sys.exit(f"install: {path.name} is missing; copy it here and run again")

        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")

        if digest.hexdigest() != facts["sha256"]:
            sys.exit(f"install: {path.name} is damaged; copy it again")

        pieces.append(path)

    return pieces


class Joined(io.RawIOBase):
    """Several files read as one."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = list(paths)
        self.file: io.FileIO | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while True:
            if self.file is None:
                if not self.paths:
                    return 0
                self.file = self.paths.pop(0).open("rb", buffering=0)

            count = self.file.readinto(buffer)
            if count:
                return count

            self.file.close()
            self.file = None

    def close(self) -> None:
        if self.file is not None:  # a tar stream may end before its last file does
            self.file.close()
        super().close()


def unpack_wheel(wheel: Path, site: Path) -> None:
    """Unzip a wheel into one importable folder, including its purelib and platlib."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            parts = Path(name).parts
            if name.endswith("/") or ".." in parts or Path(name).is_absolute():
                continue

            if parts[0].endswith(".data"):
                if parts[1] not in ("purelib", "platlib"):
                    continue  # scripts and headers are not needed
                parts = parts[2:]

            path = site.joinpath(*parts)
            path.parent.mkdir(parents=True, exist_ok=True)

            with archive.open(name) as source, path.open("wb") as sink:
                shutil.copyfileobj(source, sink)


def install(source: Path, folder: Path) -> Path:
    """Unpack the bundle in `source` into `folder`; returns the launcher's path."""
    pieces = check_pieces(source)
    site = folder / "site"
    files = folder / "files"

    binaries = folder / "bin"
    for path in (site, files, binaries):
        path.mkdir(parents=True, exist_ok=True)

    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        with (
            io.BufferedReader(Joined(pieces)) as joined,
            tarfile.open(fileobj=joined, mode="r|") as tar,
        ):
            tar.extractall(scratch, filter="data")  # rejects names that leave the folder

        wheels = sorted(Path(scratch, "wheels").glob("*.whl"))
        for wheel in wheels:
            unpack_wheel(wheel, site)

        for path in Path(scratch, "files").glob("*"):
            if path.is_dir():
                shutil.copytree(path, files / path.name, dirs_exist_ok=True)
            else:
                shutil.copy2(path, files / path.name)

    launcher = binaries / "mesotron"
    launcher.write_text(LAUNCHER.format(python=sys.executable, site=str(site)))
    launcher.chmod(0o755)
    print(f"{len(wheels)} packages in {site}")

    return launcher


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python3 install.py FOLDER   (everything goes there, nothing elsewhere)")

    made = install(Path(__file__).resolve().parent, Path(sys.argv[1]).expanduser().resolve())
    site_folder = str(made.parents[1] / "site")
    print(f"run {made} --help, or in Python: sys.path.insert(0, {site_folder!r})")
