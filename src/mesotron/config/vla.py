"""Configs of vision-language-action runs: the world, its demonstrations, evaluation in it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Perturbation = Literal["camera", "light", "noise", "position", "wording"]
PerturbationName = Literal["none", Perturbation]


@dataclass(frozen=True, kw_only=True)
class WorldConfig:
    """A simulated world, what is seen of it, and which of its tasks are done."""

    name: str = "blocks"
    """blocks (two objects in view) and object10 (four to six of ten): put the named one into a bin.
    blocks_state and object10_state give the object's position instead of images.
    metaworld is the package of that name. MODULE:CLASS is a world of your own."""

    pixels: int = 24
    """Width and height of an image."""

    wrist: bool = False
    """Add a camera that looks down from the hand (our own worlds)."""

    tasks: tuple[str, ...] = ()
    """Tasks by name, such as red-cube or drawer-open; all of the world, or MT10, if none."""

    perturbation: PerturbationName = "none"
    """What evaluation changes against training: the camera's pose, the light, noise on the image,
    objects further out, or instructions in words that training has not seen."""

    renderer: Literal["rays", "gl"] = "rays"
    """Cast rays, the same picture on every machine, or use OpenGL if you have it (metaworld)."""


@dataclass(frozen=True, kw_only=True)
class DemosConfig:
    """Make demonstrations with a world's scripted expert."""

    world: WorldConfig = WorldConfig()
    """The world, at the size at which the policy will see it."""

    out: Path = Path("demos")
    """Folder of the demonstrations; what it has already is kept and the rest made."""

    episodes: int = 300
    """Whole demonstrations, shared evenly by the tasks."""

    starts: int | None = None
    """Single frames with the hand anywhere, and what the expert would do there; in our worlds ten
    for each episode if not given, in others none."""

    every: int = 1
    """Look at the expert every so many actions of an episode. Frames between look like their
    neighbours: where pictures are slow, three times as many scenes teach more."""

    horizon: int = 8
    """Actions that follow each single frame; at least the policy's chunk."""

    noise: float = 0.15
    """Standard deviation of what is added to the expert's moves; the clean ones are recorded."""

    seed: int = 0
    """First scene; scenes from 1,000,000 on are kept for evaluation."""

    workers: int | None = None
    """Processes that simulate; as many as there are processors if not given."""

    compact: bool = False
    """Keep the simulator's state instead of images: small enough to carry to another machine, where
    --render makes the images."""

    render: Path | None = None
    """Make --out from these compact demonstrations instead of simulating."""

    lerobot: Path | None = None
    """Write the demonstrations to this folder too, as a LeRobotDataset v3.0."""
