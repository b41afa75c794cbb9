"""What the benchmarks print and write: progress, tables, the machine, result files."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from mesotron import __version__

PACKAGES = ("torch", "triton", "transformers", "muon-optimizer", "pytorch-optimizer")
PACKAGES += ("dion", "gram-newton-schulz", "emerging-optimizers")


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that starts the next unit of work and shows its name on stderr."""
    started = 0
    columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"))

    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=total)

        def start(text: str) -> None:
            nonlocal started
            bar.update(
                task,
                completed=started,
                total=max(total, started),
                description=text,
            )

            started += 1
            if not console.is_terminal:
                print(f"[{started}/{max(total, started)}] {text}", file=sys.stderr, flush=True)

        yield start


def show_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is text, the others are numbers."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
    )
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)

    for row in rows:
        table.add_row(*row)

    Console(width=None if sys.stdout.isatty() else 140).print(table)


def describe(device: torch.device, packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Command, versions, device and threads: what a reader of the result needs later."""
    return {
        "command": command_line(),
        "mesotron": __version__,
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in packages},
        "device": device_name(device),
        "threads": torch.get_num_threads(),
    }


def command_line() -> str:
    """The running study as one would type it at the root of a clone."""
    path = Path(sys.argv[0]).resolve().with_suffix("")

    if "benchmarks" in path.parts:
        parts = path.parts[path.parts.index("benchmarks") :]
    else:
        parts = ()

    module = ".".join(part for part in parts if part != "__main__")

    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def device_name(device: torch.device) -> str:
    """Such as "NVIDIA H200, CUDA 12.8" or "aarch64 CPU, 2 cores, 1 thread"."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"

    threads = torch.get_num_threads()
    used = f"{threads} thread{'s' if threads > 1 else ''}"
    return f"{platform.machine()} CPU, {os.cpu_count()} cores, {used}"


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
