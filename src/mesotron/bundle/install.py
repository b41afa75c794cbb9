"""Run on the target machine: `python3 install.py FOLDER`. The standard library only, no network.

Joins the pieces that lie beside this script, unpacks every wheel into FOLDER/site and the files
into FOLDER/files, and writes FOLDER/bin/mesotron. Nothing outside FOLDER is touched: to undo,
remove it.
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
    """The pieces in their order; stops with a sentence if one is missing or damaged."""
    manifest = source / "pieces.json"
    if not manifest.is_file():
        sys.exit("install: pieces.json is not beside this script; copy the whole bundle")
    found = []
    for facts in json.loads(manifest.read_text())["pieces"]:
        path = source / Path(facts["name"]).name
        if not path.is_file():
            sys.exit(f"install: {path.name} has not arrived; copy it here and run again")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        if digest.hexdigest() != facts["sha256"]:
            sys.exit(f"install: {path.name} is damaged; copy it again")
        found.append(path)
    return found


class Joined(io.RawIOBase):
    """Several files read as one."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = list(paths)
        self.file: io.FileIO | None = None

    def readable(self) -> bool:
        """The tar reader asks."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill the buffer from the present file, or from the next when that has ended."""
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
        """A tar stream may end before its last file does."""
        if self.file is not None:
            self.file.close()
        super().close()


def unpack_wheel(wheel: Path, site: Path) -> None:
    """Unzip a wheel into one importable folder, its purelib and platlib too."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            parts = Path(name).parts
            if name.endswith("/") or ".." in parts or Path(name).is_absolute():
                continue
            if parts[0].endswith(".data"):
                if parts[1] not in ("purelib", "platlib"):
                    continue  # scripts and headers: nothing here needs them
                parts = parts[2:]
            path = site.joinpath(*parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as source, path.open("wb") as sink:
                shutil.copyfileobj(source, sink)


def install(source: Path, folder: Path) -> Path:
    """Unpack the bundle beside this script into a folder of its own; returns its launcher."""
    pieces = check_pieces(source)
    site, files, binaries = folder / "site", folder / "files", folder / "bin"
    for path in (site, files, binaries):
        path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as space:
        with (
            io.BufferedReader(Joined(pieces)) as joined,
            tarfile.open(fileobj=joined, mode="r|") as tar,
        ):
            tar.extractall(space, filter="data")  # refuses names that leave the folder
        wheels = sorted(Path(space, "wheels").glob("*.whl"))
        for wheel in wheels:
            unpack_wheel(wheel, site)
        for path in Path(space, "files").glob("*"):
            if path.is_dir():
                shutil.copytree(path, files / path.name, dirs_exist_ok=True)
            else:
                shutil.copy2(path, files / path.name)
    launcher = binaries / "mesotron"
    launcher.write_text(LAUNCHER.format(python=sys.executable, site=str(site)))
    launcher.chmod(0o755)
    print(f"{len(wheels)} packages in {site}")
    return launcher


def main(words: list[str]) -> None:
    """`python3 install.py FOLDER`."""
    if len(words) != 1 or words[0].startswith("-"):
        sys.exit("usage: python3 install.py FOLDER   (everything goes there, and nowhere else)")
    launcher = install(Path(__file__).resolve().parent, Path(words[0]).expanduser().resolve())
    site = launcher.parents[1] / "site"
    print(f"run {launcher} --help, or in Python: sys.path.insert(0, {str(site)!r})")


if __name__ == "__main__":
    main(sys.argv[1:])
