"""What an address such as wandb://entity/project/run is: a function that finds its logs.

A new scheme is one file in `addresses/` with one function:

    @address("wandb", form="ENTITY/PROJECT/RUN", about="runs of W&B", extra="wandb")
    def wandb(place, folder): ...       puts the logs into a new folder; returns where they are

It uses the vendor's own client. What comes from there is data: file names are made plain, counts
and sizes are bounded, and an error is one sentence.
"""

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesotron.config.registry import ADDRESSES
from mesotron.runs.extras import require

MAX_ROWS = 500_000
MAX_CHARACTERS = 2**30  # of a run's rows
MAX_RUNS = 50
FETCHED = "mesotron-fetched-"  # begins the name of a folder that is removed after use
ADDRESS = re.compile(r"([a-z]+):/+(.+)")  # a path has lost one of the slashes

Fetch = Callable[[str, Path], Path]


@dataclass(frozen=True)
class Scheme:
    """A kind of address.

    Args:
        fetch: puts the logs of a place into a folder, and returns where they are.
        form: what follows ://.
        about: its cell in the table of docs/watch_logs.md.
        extra: of the package, which has the vendor's client.
    """

    name: str
    fetch: Fetch
    form: str
    about: str
    extra: str


def address(name: str, *, form: str, about: str, extra: str) -> Callable[[Fetch], Fetch]:
    """Register a function as the scheme `name`, in a file of `addresses/` that is called so."""

    def register(fetch: Fetch) -> Fetch:
        ADDRESSES.add(name, Scheme(name, fetch, form, about, extra), fetch.__module__)
        return fetch

    return register


def split(path: Path) -> tuple[str, str] | None:
    """Scheme and place of an address; None for a path on this machine."""
    match = ADDRESS.fullmatch(str(path))
    if match is None or match[1] not in ADDRESSES or path.exists():
        return None

    return match[1], match[2]


@contextmanager
def fetched(path: Path) -> Iterator[Path]:
    """Where the logs of an address are while the block runs; a path of this machine as it is."""
    parts = split(path)
    if parts is None:
        yield path
        return

    name, place = parts
    scheme: Scheme = ADDRESSES[name]
    require(scheme.extra, what=f"{name}://")
    with tempfile.TemporaryDirectory(prefix=FETCHED) as folder:
        yield scheme.fetch(place, Path(folder).resolve())


def spell(path: Path) -> str:
    """An address as it is typed."""
    parts = split(path)
    assert parts is not None
    return "://".join(parts)


def is_fetched(path: Path) -> bool:
    """Whether a path is removed after use."""
    return any(part.startswith(FETCHED) for part in path.parts)


def rename(record: dict[str, Any], place: Path, path: Path) -> dict[str, Any]:
    """The record of the watch with an address in place of where its logs lay."""
    address_there = json.dumps(spell(path))[1:-1]  # as it is spelled inside a JSON string
    return json.loads(json.dumps(record).replace(str(place), address_there))


def write_history(folder: Path, name: str, rows: Iterable[dict[str, Any]]) -> Path:
    """Write the rows of a run as JSON lines into a folder of its own; returns the file."""
    plain = re.sub(r"[^\w.-]+", "-", name)[:80].strip(".-") or "run"
    place = folder / plain
    number = 1
    while place.exists():
        number += 1
        place = folder / f"{plain}-{number}"

    place.mkdir()
    log = place / "history.jsonl"
    characters = 0
    with log.open("w", encoding="utf-8") as file:
        for count, row in enumerate(rows):
            line = json.dumps(row, default=str) + "\n"
            characters += len(line)
            if count >= MAX_ROWS or characters > MAX_CHARACTERS:
                raise ValueError(
                    f"{name:.80} has more than {MAX_ROWS:,} rows or {MAX_CHARACTERS:,} characters: "
                    "export a part of it"
                )
            file.write(line)

    return log
