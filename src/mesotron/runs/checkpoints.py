"""Checkpoints that are intact or absent: written aside, synced, listed, then renamed.

`checkpoint-25/manifest.json` lists every file with its size and SHA-256, so that truncated or
changed files are found before anything is loaded. The folder names are those of Transformers.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from mesotron.runs.links import open_own

MANIFEST = "manifest.json"
NAME = re.compile(r"checkpoint-(\d+)")


class Checkpoint(NamedTuple):
    step: int
    path: Path


def draft_path(root: Path, step: int) -> Path:
    return root / f".checkpoint-{step}.writing"


@contextmanager
def writing(root: Path, step: int) -> Iterator[Path]:
    """Write a checkpoint: yields an empty folder and publishes it if the block succeeds.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with writing(Path(folder), step=25) as draft:
        ...         _ = (draft / "weights").write_text("...")
        ...     [checkpoint.step for checkpoint in list_checkpoints(Path(folder))]
        [25]
    """
    draft = start(root, step)
    try:
        yield draft
        publish(draft)
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)  # a half-written one would fill a full disk
        explained = explain_failed_write(error, root, step)
        if explained is error:
            raise
        raise explained from error


def explain_failed_write(error: BaseException, root: Path, step: int) -> BaseException:
    """A ValueError that names the system's reason, such as a full disk; other errors as is."""
    reason = reason_of_failed_write(error)
    if reason is None:
        return error

    return ValueError(
        f"{reason}: could not write the checkpoint of step {step} to {root}; earlier checkpoints "
        "are complete: free space or fix that, and resume"
    )


def reason_of_failed_write(error: BaseException) -> str | None:
    """The system's reason, such as a full disk; None for an error of another kind."""
    if isinstance(error, OSError):
        code = error.errno
    else:
        match = re.search(r"\(os error (\d+)\)", str(error))  # safetensors has it in its text
        code = int(match[1]) if match else None

    if code is None:
        return None
    if code in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full"

    return os.strerror(code)


def start(root: Path, step: int) -> Path:
    for left in root.glob(".checkpoint-*.writing"):
        remove(left)

    draft = draft_path(root, step)
    draft.mkdir(parents=True)
    return draft


def publish(draft: Path) -> None:
    """Write the manifest, sync everything to disk and rename the draft."""
    files = sorted(path for path in draft.rglob("*") if path.is_file())
    listing = {str(path.relative_to(draft)): fingerprint(path) for path in files}
    with open_own(draft / MANIFEST, "x") as file:
        file.write(json.dumps({"files": listing}, indent=2))

    for path in [*files, draft / MANIFEST, draft]:
        sync(path)

    final = draft.with_name(draft.name.removeprefix(".").removesuffix(".writing"))
    remove(final)  # the same step of an earlier attempt, or a damaged one
    draft.rename(final)
    sync(final.parent)


def remove(path: Path) -> None:
    """Remove a folder or a file if it exists; of a symbolic link only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fingerprint(path: Path) -> dict[str, int | str]:
    with open_own(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]
    return {"bytes": path.stat().st_size, "sha256": digest}


def list_checkpoints(root: Path) -> list[Checkpoint]:
    """Every published checkpoint, oldest first, including damaged ones."""
    matches = [(NAME.fullmatch(path.name), path) for path in root.glob("checkpoint-*")]
    return sorted(Checkpoint(int(match[1]), path) for match, path in matches if match)


def outside(path: Path) -> Path:
    """The run of a checkpoint, which another file would damage; other paths as they are."""
    if path.parent.name == "checkpoints":
        return path.parent.parent

    return path


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file, or None if it is intact."""
    try:
        listing = json.loads((path / MANIFEST).read_text())["files"]
        for name, expected in listing.items():
            file = path / name
            if file.is_symlink():
                return f"{file} is a symbolic link"
            if not file.is_file():
                return f"{file} is missing"

            size = file.stat().st_size
            if size != expected["bytes"]:
                return f"{file} has {size:,} bytes instead of {expected['bytes']:,}"
            if fingerprint(file) != expected:
                return f"{file} has changed since it was written"

        for file in sorted(path.rglob("[!.]*")):
            name = str(file.relative_to(path))
            if file.is_file() and name not in (*listing, MANIFEST):
                return f"{file} was added later"  # a loader might read it
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path / MANIFEST} cannot be read ({type(error).__name__})"

    return None


def newest_whole(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest intact checkpoint, and what is wrong with each newer one."""
    problems = []
    for checkpoint in reversed(list_checkpoints(root)):
        problem = damage(checkpoint.path)
        if problem is None:
            return checkpoint, problems
        problems.append(problem)

    return None, problems


def prune(root: Path, keep: int, newest: int, *protected: str | None) -> None:
    """Remove all but `keep` of the checkpoints up to the step just written, and never a protected
    one, by its path or name."""
    names = {Path(path).name for path in protected if path is not None}

    # Later checkpoints are unusable for a resumed run: counted, a damaged one would displace the
    # only intact one. Step 0 is the start that a guard can roll back to, and stays.
    written = []
    for one in list_checkpoints(root):
        if 0 < one.step <= newest:
            written.append(one)

    for checkpoint in written[:-keep]:
        if checkpoint.path.name not in names:
            remove(checkpoint.path)
