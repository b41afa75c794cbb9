"""Optional packages: checked by name before anything is loaded, with the extra that has them."""

import ctypes
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

EXTRAS: dict[str, tuple[str, ...]] = {
    "rlvr": ("torch", "transformers", "trl", "accelerate", "datasets", "safetensors"),
    "vla": ("torch", "transformers", "safetensors"),
    "ppo": ("jax", "optax", "flax", "jumanji", "orbax.checkpoint", "matplotlib"),
    "sweep": ("optuna",),
    "gym": ("reasoning_gym",),
    "plot": ("matplotlib",),
    "lerobot": ("pyarrow",),
    "ray": ("ray",),
    "mcp": ("mcp",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "hub": ("huggingface_hub",),
    "verifiers": ("verifiers",),
    "openenv": ("openenv",),
}


def require(extra: str | None, packages: Sequence[str] = (), what: str = "") -> None:
    """Refuse to go on without the packages of an extra, or without these, of none for None."""
    needed = packages or EXTRAS[extra or ""]
    missing = [name for name in needed if not is_installed(name)]
    if missing:
        source = f"'mesotron[{extra}]'" if extra else " ".join(missing)
        raise ValueError(f"{what} needs {', '.join(missing)}: pip install {source}")


def has_gpu_driver() -> bool:
    """Whether torch might find a GPU, NVIDIA's or AMD's; torch takes seconds to import."""
    try:
        return bool(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return Path("/dev/kfd").exists()


def is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the parent of a dotted name
        return False
