"""NVIDIA's MPS: kernels of several processes run side by side on one GPU instead of in turns.

Useful for small models, whose kernels fill a fraction of a GPU. The daemon is started and stopped
by this process; one that is already running (the environment names its pipes) is used and left
running. Without MPS everything still works.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
PRODUCT = "import torch; x = torch.ones(256, 256, device='cuda'); print((x @ x).sum().item())"
CHECK = (sys.executable, "-c", PRODUCT)
# A server waits for its clients, also for killed ones; it is forced to quit after these seconds.
PATIENCE = 5

Say = Callable[[str], None]


@contextmanager
def mps(
    folder: Path, say: Say, check: Sequence[str] = CHECK, wanted: bool = True
) -> Iterator[bool]:
    """Processes that are started inside share the GPU by MPS, if it is there and works.

    Args:
        folder: of the daemon's pipes and logs.
        say: called with a message.
        check: a command that must succeed under MPS.
        wanted: False does nothing: on a CPU, or for one process.

    Returns:
        Whether it works.

    Example:
        >>> import tempfile
        >>> with mps(Path(tempfile.mkdtemp()), print):  # doctest: +SKIP
        ...     run_processes()
        with MPS
    """
    if not wanted:
        yield False
        return

    if PIPES in os.environ:
        say(f"with the MPS of {os.environ[PIPES]}")
        yield True
        return

    folders = {
        PIPES: str(folder / "mps"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "mps-log"),
    }

    environment = {**os.environ, **folders}
    why = start(folders, environment, check, say)
    say(f"without MPS: {why}" if why else "with MPS")

    if why:
        yield False
        return

    before = {name: os.environ[name] for name in folders if name in os.environ}
    os.environ.update(folders)

    try:
        yield True
    finally:
        for name in folders:
            del os.environ[name]
        os.environ.update(before)
        stop(environment, say)


def start(
    folders: dict[str, str], environment: dict[str, str], check: Sequence[str], say: Say
) -> str:
    """Start the daemon; returns why it cannot be used, or nothing."""
    if shutil.which(CONTROL) is None:
        return f"there is no {CONTROL}"

    for folder in folders.values():
        Path(folder).mkdir(parents=True, exist_ok=True)

    try:
        subprocess.run(
            [CONTROL, "-d"],
            env=environment,
            check=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)

    try:
        subprocess.run(
            check,
            env=environment,
            check=True,
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError) as error:
        stop(environment, say)
        return f"what was tried under it failed ({error})"

    return ""


def stop(environment: dict[str, str], say: Say) -> None:
    """End the daemon."""
    words = f"quit -t {PATIENCE}\n"
    try:
        subprocess.run(
            [CONTROL],
            input=words,
            text=True,
            env=environment,
            timeout=3 * PATIENCE,
        )
    except (OSError, subprocess.SubprocessError) as error:
        say(f"MPS was not stopped: {error}")
