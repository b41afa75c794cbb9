"""What env.json holds: enough to say, a year later, with what a run was made."""

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "mesotron", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "math-verify",
    "vllm", "jax", "optax", "flax", "numpy",
)  # fmt: skip


def describe_environment(device: str, seed: int, **more: Any) -> dict[str, Any]:
    """Versions, source commit, machine, device and seed.

    Args:
        device: the device in words, such as "cpu" or "NVIDIA H200"; this room knows no framework.
        seed: of the run.
        more: anything else that JSON holds.

    Example:
        >>> describe_environment("cpu", 0, threads=1)["threads"]
        1
    """
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": installed_versions(),
        "commit": source_commit(),
        "command": sys.argv[1:],
        "device": device,
        "seed": seed,
        **more,
    }


def installed_versions() -> dict[str, str]:
    """Versions of the packages that can change a run's numbers, of those that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # an extra that this environment does not have
    return found


def source_commit() -> str | None:
    """The commit of a source checkout, "-dirty" if it was changed; None for an installed wheel."""
    source = Path(__file__).parents[3]
    if not (source / ".git").exists():
        return None
    git = ["git", "-C", str(source), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
