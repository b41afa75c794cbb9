"""What the benchmarks print: a progress line, tables, and the machine in words.

rich draws where it is installed; without it, as on a borrowed GPU machine, the same content comes
as plain text. Nothing here measures anything.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from mesotron import __version__

PACKAGES = ("torch", "triton", "transformers", "muon-optimizer", "pytorch-optimizer")
PACKAGES += ("dion", "gram-newton-schulz")


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A function that counts one unit as begun and says which; draws on stderr."""
    begun = 0
    if find_spec("rich") and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=total)

            def draw(text: str) -> None:
                nonlocal begun
                bar.update(task, completed=begun, total=max(total, begun), description=text)
                begun += 1

            yield draw
        return

    def say(text: str) -> None:
        nonlocal begun
        begun += 1
        print(f"[{begun}/{max(total, begun)}] {text}", file=sys.stderr, flush=True)

    yield say


def show_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is text, the others are numbers."""
    if find_spec("rich"):
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for i, heading in enumerate(headings):
            table.add_column(heading, justify="right" if i else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        Console(width=None if sys.stdout.isatty() else 140).print(table)
        return
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    print(f"\n{title}")
    for row in (headings, *rows):
        cells = [
            f"{c:<{w}}" if i == 0 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(row, widths))
        ]
        print("  ".join(cells).rstrip())


def describe(device: torch.device) -> dict[str, Any]:
    """What a result needs to be read later: command, versions, device in words, threads."""
    return {
        "command": shlex.join(["mesotron", *sys.argv[1:]]),
        "mesotron": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "device": device_in_words(device),
        "threads": torch.get_num_threads(),
    }


def write_result(result: dict[str, Any], path: Path) -> None:
    """Write a result as JSON, one line for each item of its lists, so that a diff can be read."""
    lines = []
    for key, value in result.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            items = ",\n  ".join(json.dumps(item) for item in value)
            lines.append(f" {json.dumps(key)}: [\n  {items}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def device_in_words(device: torch.device) -> str:
    """Such as "NVIDIA H200, CUDA 12.8" or "aarch64 CPU, 2 cores, 1 thread"."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    threads = torch.get_num_threads()
    used = f"{threads} thread{'s' if threads > 1 else ''}"
    return f"{platform.machine()} CPU, {os.cpu_count()} cores, {used}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
