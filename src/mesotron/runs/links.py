"""A run's own files and folders, opened without following links.

A run folder may come from somebody else, and behind a link in it a write would land in any file of
the user's. So a folder with links among its files is refused as a whole (`refuse_links`), which
covers what the libraries open, and our own code opens each file with `open_own`.

The folder itself may be reached through links, such as a `runs` that lies on another disk.
"""

import errno
import os
import stat
from pathlib import Path
from typing import IO, Any

# W&B keeps links to its newest run in there, and none of our own files are.
OTHER_PROGRAMS = {"wandb"}


def open_own(path: Path, mode: str = "r", **options: Any) -> IO[Any]:
    """`open` for a file of a run: ValueError where it is a link; `x` makes a new file."""
    if "b" not in mode:
        options = {"encoding": "utf-8", **options}

    return open(path, mode, opener=_open_without_following, **options)


def _open_without_following(path: str, flags: int) -> int:
    # It is emptied only once it is known to be the run's own.
    try:
        file = os.open(path, flags & ~os.O_TRUNC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            refuse_link(Path(path))
        raise

    try:
        if flags & (os.O_WRONLY | os.O_RDWR):
            _refuse_other_names(file, path)
        if flags & os.O_TRUNC:
            os.ftruncate(file, 0)
    except BaseException:
        os.close(file)
        raise

    return file


def _refuse_other_names(file: int, path: str) -> None:
    """What is written to a hard link is written to the file's other names, too."""
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        raise ValueError(
            f"{path} is a hard link, which a run does not write to: put a copy of the file in its "
            "place"
        )


def open_draft(path: Path, mode: str = "x", **options: Any) -> IO[Any]:
    """A new file to write, in place of one that a killed process left."""
    try:
        return open_own(path, mode, **options)
    except FileExistsError:
        path.unlink()
        return open_own(path, mode, **options)


def make_own_folder(path: Path) -> None:
    """Make a folder of a run, and those above it, unless it is there; refuses a link."""
    refuse_link(path)
    path.mkdir(parents=True, exist_ok=True)


def refuse_links_to_write(path: Path) -> None:
    """For a file that a library opens to write."""
    if os.path.lexists(path):
        open_own(path, "ab").close()


def refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise ValueError(
            f"{path} is a symbolic link, which a run's own files and folders must not be: remove "
            "it, or put what it points at in its place"
        )


def refuse_links(folder: Path) -> None:
    """Raise ValueError if anything in a folder, at any depth, is neither a file nor a folder."""
    for above, folders, files in os.walk(folder):
        for name in (*folders, *files):
            _refuse_special(Path(above, name))

        folders[:] = [name for name in folders if name not in OTHER_PROGRAMS]


def _refuse_special(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:  # a running process has just replaced it
        return

    if stat.S_ISLNK(mode):
        refuse_link(path)
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ValueError(f"{path} is neither a file nor a folder: remove it from the run")
