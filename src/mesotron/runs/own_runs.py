"""The runs that this user started, so that their code need not be named again.

A run folder may come from somebody else, so the code that it names is not believed. A run that was
started here is: each one with code of the user's own is noted in the user's state folder, outside
every run folder, with the files that its names meant.
"""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def notes_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "mesotron" / "own_runs.jsonl"


def remember(run: Path, names: Sequence[str]) -> None:
    """Note a run that is started now with code of the user's own."""
    if not names:
        return

    line = json.dumps({"run": str(run.resolve()), "code": files_of(names)}) + "\n"
    with suppress(OSError, RuntimeError):  # no home that can be written to: names are given again
        path = notes_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line)


def is_own(run: Path, names: Sequence[str]) -> bool:
    """Whether this user started the run, with the files that its names mean now."""
    expected = files_of(names)
    try:
        lines = notes_path().read_text(encoding="utf-8").splitlines()
    except (OSError, RuntimeError, UnicodeDecodeError):
        return False

    for line in lines:
        try:
            note = json.loads(line)
        except ValueError:  # half a line of a killed process
            continue

        if note["run"] == str(run.resolve()) and expected.items() <= note["code"].items():
            return True

    return False


def files_of(names: Sequence[str]) -> dict[str, str | None]:
    return {name: file_of(name) for name in names}


def file_of(name: str) -> str | None:
    """The file of `file.py:name`, or of a module in the working folder; None for another one."""
    file, _, _ = name.partition(":")
    if file.endswith(".py"):
        return str(Path(file).expanduser().resolve())

    here = Path(file.replace(".", "/")).with_suffix(".py")
    return str(here.resolve()) if here.is_file() else None
