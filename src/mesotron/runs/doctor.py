"""This machine: GPUs, packages, disk; `mesotron doctor` says what works and what would be slow."""

import shutil
import subprocess
from functools import cache
from typing import NamedTuple


class Gpu(NamedTuple):
    name: str
    memory: float  # GiB
    used: float  # GiB
    driver: str
    capability: tuple[int, int]


@cache
def list_gpus() -> tuple[Gpu, ...]:
    """The NVIDIA GPUs that the driver sees; torch is not imported."""
    if shutil.which("nvidia-smi") is None:
        return ()
    query = "name,memory.total,memory.used,driver_version,compute_cap"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
        return tuple(
            Gpu(name, float(total) / 1024, float(used) / 1024, driver, (int(cap[0]), int(cap[-1])))
            for name, total, used, driver, cap in rows
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()  # a driver that does not answer
