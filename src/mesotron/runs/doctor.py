"""This machine: GPUs, packages, disk; `mesotron doctor` says what works and what would be slow."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from platform import python_version
from typing import NamedTuple

from packaging.requirements import Requirement

from mesotron.config import DoctorConfig
from mesotron.runs.extras import is_installed
from mesotron.runs.folder import describe_environment, nearest_existing
from mesotron.runs.workers import num_cores

MIN_DISK = 10  # GiB


class Gpu(NamedTuple):
    name: str
    memory: float  # GiB
    used: float  # GiB
    driver: str
    capability: tuple[int, ...]


@cache
def list_gpus() -> tuple[Gpu, ...]:
    """The NVIDIA GPUs that the driver sees; torch is not imported."""
    if shutil.which("nvidia-smi") is None:
        return ()

    query = "name,memory.total,memory.used,driver_version,compute_cap"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return tuple(read_gpu(line) for line in done.stdout.splitlines())
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()  # a driver that does not answer


def read_gpu(line: str) -> Gpu:
    """One line of `nvidia-smi`, such as `NVIDIA L4, 23034, 1, 580.65, 8.9`."""
    name, total, used, driver, capability = map(str.strip, line.split(","))

    return Gpu(
        name=name,
        memory=float(total) / 1024,
        used=float(used) / 1024,
        driver=driver,
        capability=tuple(map(int, capability.split("."))),
    )


def run(config: DoctorConfig) -> int:
    """Print one line for each check; the exit code is 0, since nothing here is fatal."""
    for mark, subject, text in check_machine():
        print(f"{mark:<5} {subject:<9} {text}")

    return 0


Check = tuple[str, str, str]
"""Mark (ok, slow, none or fail), subject, and what it means for a run."""


def check_machine() -> Iterator[Check]:
    versions = describe_environment("", 0)["packages"]
    gpus = list_gpus()

    yield from check_packages(versions)
    yield from check_gpus(gpus, versions)
    yield check_sampling(versions)
    yield from check_extras()
    yield check_processor()
    yield from check_disks()

    if os.environ.get("HF_HUB_OFFLINE") == "1":
        yield "none", "hub", "HF_HUB_OFFLINE=1: only models and data on this machine"


def check_packages(versions: dict[str, str]) -> Iterator[Check]:
    own = versions.get("mesotron", "from source")
    yield "ok", "mesotron", f"{own}, Python {python_version()}"

    shown = []
    for name, number in versions.items():
        if name != "mesotron":
            shown.append(f"{name} {number}")

    mark = "ok" if "torch" in versions else "fail"
    yield mark, "packages", ", ".join(shown) or "none"


def check_gpus(gpus: Sequence[Gpu], versions: dict[str, str]) -> Iterator[Check]:
    for gpu in gpus:
        free = f"{gpu.memory - gpu.used:.0f} of {gpu.memory:.0f} GiB free"
        yield "ok", "gpu", f"{gpu.name}, {free}, driver {gpu.driver}"

    if not gpus:
        yield "slow", "gpu", "none: fine for the tiny model, see mesotron plan --gpu for others"
    elif "+cpu" in versions.get("torch", ""):
        yield "fail", "torch", f"{versions['torch']} cannot use the GPU: install a CUDA build"

    is_ampere = bool(gpus) and gpus[0].capability >= (8, 0)
    if is_ampere and is_installed("triton"):
        yield "ok", "kernels", "fused Muon and Pion steps; the first takes 12 s to compile"
    else:
        yield "slow", "kernels", "fused Muon and Pion steps need Triton and a GPU from Ampere on"

    if gpus and not is_ampere:
        yield "slow", "bfloat16", "not on this GPU: training runs in float32, several times slower"


def check_sampling(versions: dict[str, str]) -> Check:
    if "vllm" in versions:
        return "ok", "sampling", f"vLLM {versions['vllm']}: --vllm colocate"

    how = "on a GPU use --rollout.fast, else sampling takes most of a step"
    return "slow", "sampling", f"no vLLM: {how}"


def check_extras() -> Iterator[Check]:
    for extra, missing in missing_extras().items():
        if missing:
            yield (
                "none",
                "extra",
                f"{extra}: pip install 'mesotron[{extra}]' ({', '.join(missing)})",
            )
        else:
            yield "ok", "extra", f"{extra}: complete"


def check_processor() -> Check:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    cores = num_cores()
    mark = "ok" if cores > 2 else "slow"

    return mark, "cpu", f"{cores} cores, {memory:.0f} GiB of memory"


def check_disks() -> Iterator[Check]:
    hub = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    for place in dict.fromkeys((Path.cwd(), hub, Path(tempfile.gettempdir()))):
        there = nearest_existing(place)
        free = shutil.disk_usage(there).free / 2**30
        text = f"{place}: {free:.0f} GiB free"

        if not os.access(there, os.W_OK):
            yield "fail", "disk", f"{text}, read-only"
        elif free < MIN_DISK:
            yield "slow", "disk", f"{text}: lower --keep, raise --save-every"
        else:
            yield "ok", "disk", text


def missing_extras() -> dict[str, list[str]]:
    """The packages that each extra lacks, by the installed metadata."""
    missing: dict[str, list[str]] = {}
    for wanted in map(Requirement, requires("mesotron") or ()):
        extra = str(wanted.marker).partition("extra == ")[2].strip("\"'")
        if extra in ("", "dev", "bench") or wanted.name == "mesotron":
            continue

        lacks = missing.setdefault(extra, [])
        try:
            if (installed := version(wanted.name)) not in wanted.specifier:
                lacks.append(f"{wanted.name} {installed} is not {wanted.specifier}")
        except PackageNotFoundError:
            lacks.append(f"no {wanted.name}")

    return missing
