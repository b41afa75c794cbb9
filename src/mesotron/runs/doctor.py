"""This machine: GPUs, packages, disk; `mesotron doctor` says what works and what would be slow."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from platform import python_version
from typing import NamedTuple

from packaging.requirements import Requirement

from mesotron.config import DoctorConfig
from mesotron.runs.folder import describe_environment

MIN_DISK = 10  # GiB


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


def run(config: DoctorConfig) -> int:
    """Print one line for each check; the exit code is 0, since nothing here is fatal."""
    for mark, subject, text in check_machine():
        print(f"{mark:<5} {subject:<9} {text}")
    return 0


def check_machine() -> Iterator[tuple[str, str, str]]:
    """Mark (ok, slow, none or fail), subject, and what it means for a run."""
    versions = describe_environment("", 0)["packages"]
    shown = ", ".join(f"{name} {number}" for name, number in versions.items() if name != "mesotron")
    yield "ok", "mesotron", f"{versions.get('mesotron', 'from source')}, Python {python_version()}"
    yield ("ok" if "torch" in versions else "fail"), "packages", shown or "none"
    gpus = list_gpus()
    for gpu in gpus:
        free = f"{gpu.memory - gpu.used:.0f} of {gpu.memory:.0f} GiB free, driver {gpu.driver}"
        yield "ok", "gpu", f"{gpu.name}, {free}"
    if not gpus:
        yield "slow", "gpu", "none: fine for the tiny model, see mesotron plan --gpu for others"
    elif "+cpu" in versions.get("torch", ""):
        yield "fail", "torch", f"{versions['torch']} cannot use the GPU: install a CUDA build"
    yield (
        ("ok", "kernels", "fused Muon and Pion steps; the first takes 12 s to compile")
        if (gpus and gpus[0].capability[0] >= 8 and find_spec("triton"))
        else (
            "slow",
            "kernels",
            "fused Muon and Pion steps need an NVIDIA GPU (Ampere or newer) and Triton",
        )
    )
    if gpus and gpus[0].capability < (8, 0):
        yield "slow", "bfloat16", "not on this GPU: training runs in float32, several times slower"
    fast = "vllm" in versions
    yield "ok" if fast else "slow", "sampling", (
        f"vLLM {versions['vllm']}: --rollout.vllm colocate" if fast else
        "no vLLM: on a GPU use --rollout.fast, else sampling takes most of a step"
    )  # fmt: skip
    for extra, missing in missing_extras().items():
        state = f"pip install 'mesotron[{extra}]' ({', '.join(missing)})" if missing else "complete"
        yield "none" if missing else "ok", "extra", f"{extra}: {state}"
    linux = sys.platform == "linux"  # elsewhere every core may be used
    cores = len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    yield "ok" if cores > 2 else "slow", "cpu", f"{cores} cores, {memory:.0f} GiB of memory"
    hub = os.environ.get("HF_HOME", "~/.cache/huggingface")
    for place in dict.fromkeys((Path.cwd(), Path(hub).expanduser(), Path(tempfile.gettempdir()))):
        there = next(one for one in (place, *place.parents) if one.exists())
        free = shutil.disk_usage(there).free / 2**30
        writable = os.access(there, os.W_OK)
        mark = "fail" if not writable else "slow" if free < MIN_DISK else "ok"
        advice = ": lower --keep, raise --save-every" if free < MIN_DISK else ""
        yield mark, "disk", f"{place}: {free:.0f} GiB free{advice if writable else ', read-only'}"
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        yield "none", "hub", "HF_HUB_OFFLINE=1: only models and data on this machine"


def missing_extras() -> dict[str, list[str]]:
    """The packages that each extra lacks, by the installed metadata."""
    missing: dict[str, list[str]] = {}
    for text in requires("mesotron") or ():
        requirement = Requirement(text)
        extra = re.search(r"extra == ['\"](\w+)['\"]", str(requirement.marker or ""))
        if extra is None or extra[1] in ("dev", "bench") or requirement.name == "mesotron":
            continue
        lacks = missing.setdefault(extra[1], [])
        try:
            installed = version(requirement.name)
            if installed not in requirement.specifier:
                lacks.append(f"{requirement.name} {installed} is not {requirement.specifier}")
        except PackageNotFoundError:
            lacks.append(f"no {requirement.name}")
    return missing
