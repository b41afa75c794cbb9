"""Images by MuJoCo's ray casting: no OpenGL, the same picture on every machine, about 1 ms.

Each pixel is one ray (`mj_multiRay`), coloured by the geom it meets and shaded by the angle between
its surface and the light, so that shapes can be told apart. No shadows, no antialiasing.

Legend: P pixels (H * W), V of them on something other than the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mesotron.vla.worlds.engine import Data, Model, mj

AMBIENT = 0.45
SKY = (0.55, 0.65, 0.75)
FAR = 5.0  # metres
CYLINDER = int(mj.mjtGeom.mjGEOM_CYLINDER)


@dataclass(frozen=True)
class Camera:
    """A pinhole: where it is, what it looks at, its vertical field of view in degrees."""

    position: tuple[float, float, float]
    target: tuple[float, float, float]
    field_of_view: float

    def rays(self, pixels: int) -> np.ndarray:
        """Unit directions of a square image's pixels, row by row from the top left, (P, 3)."""
        return aim_rays(self, pixels)


@lru_cache(maxsize=8)
def aim_rays(camera: Camera, pixels: int) -> np.ndarray:
    """See `Camera.rays`; kept, since every episode looks through the same few cameras."""
    forward = np.subtract(camera.target, camera.position)
    forward = forward / np.linalg.norm(forward)
    right = np.cross(forward, (0.0, 0.0, 1.0))  # a camera never looks straight down
    right /= np.linalg.norm(right)
    above = np.cross(right, forward)
    half = np.tan(np.radians(camera.field_of_view) / 2)
    across = half * ((np.arange(pixels) + 0.5) * 2 / pixels - 1)
    grid = forward + across[None, :, None] * right - across[:, None, None] * above
    grid = grid.reshape(-1, 3)
    rays = grid / np.linalg.norm(grid, axis=1, keepdims=True)
    rays.flags.writeable = False
    return rays


@dataclass(frozen=True)
class Light:
    """Where light comes from (any length) and how strong it is."""

    direction: tuple[float, float, float] = (0.35, -0.45, 0.82)
    strength: float = 1.0


def cast(
    model: Model, data: Data, origin: np.ndarray, rays: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What each ray meets first.

    Args:
        origin: (3,).
        rays: unit directions (P, 3).

    Returns:
        Geom numbers int32 (P,), -1 for none, and distances float64 (P,).
    """
    geoms = np.empty(len(rays), np.int32)
    distances = np.empty(len(rays))
    mj.mj_multiRay(model, data, origin, rays.ravel(), None, 1, -1, geoms, distances, len(rays), FAR)
    return geoms, distances


def normals(model: Model, data: Data, geoms: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Outward unit normals where boxes and cylinders were met, (V, 3)."""
    frames = data.geom_xmat.reshape(-1, 3, 3)[geoms]
    local = np.einsum("vij,vi->vj", frames, points - data.geom_xpos[geoms])
    inner = np.empty_like(local)
    is_round = model.geom_type[geoms] == CYLINDER
    for rows, normal in ((~is_round, box_normals), (is_round, cylinder_normals)):
        if rows.any():
            inner[rows] = normal(local[rows], model.geom_size[geoms[rows]])
    return np.einsum("vij,vj->vi", frames, inner)


def box_normals(local: np.ndarray, half: np.ndarray) -> np.ndarray:
    """Normals of boxes at surface points in their own frames; `half` sizes, all (V, 3)."""
    face = np.argmax(np.abs(local) / half, axis=1)[:, None]
    inner = np.zeros_like(local)
    np.put_along_axis(inner, face, np.sign(np.take_along_axis(local, face, axis=1)), axis=1)
    return inner


def cylinder_normals(local: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Normals of upright cylinders in their own frames; sizes are radius and half height."""
    across = np.hypot(local[:, 0], local[:, 1])
    is_wall = across / sizes[:, 0] >= np.abs(local[:, 2]) / sizes[:, 1]
    wall = local * [1, 1, 0] / np.maximum(across, 1e-9)[:, None]
    return np.where(is_wall[:, None], wall, np.sign(local) * [0, 0, 1])


class Painter:
    """Turns rays into an image of one episode.

    Args:
        model: what the rays meet.
        colours: of each geom, (number of geoms, 3) in 0..1.
        light: where light comes from.
        table: number of the table's geom, a plane whose normal is up.
    """

    def __init__(self, model: Model, colours: np.ndarray, light: Light, table: int = 0) -> None:
        self.model = model
        # Row -1 is what a ray that meets nothing sees.
        self.colours = (255 * np.vstack([colours, SKY])).astype(np.float32)
        self.table = table
        self.strength = light.strength
        direction = np.asarray(light.direction)
        self.direction = direction / np.linalg.norm(direction)

    def paint(self, data: Data, origin: np.ndarray, rays: np.ndarray) -> np.ndarray:
        """An image, uint8 (H, W, 3)."""
        geoms, distances = cast(self.model, data, origin, rays)
        shade = np.full(len(rays), self.shade(self.direction[2]), np.float32)
        solid = np.flatnonzero((geoms >= 0) & (geoms != self.table))
        points = origin + distances[solid, None] * rays[solid]
        shade[solid] = self.shade(normals(self.model, data, geoms[solid], points) @ self.direction)
        pixels = int(len(rays) ** 0.5)
        image = np.minimum(self.colours[geoms] * shade[:, None], 255)
        return image.astype(np.uint8).reshape(pixels, pixels, 3)

    def shade(self, cosine: np.ndarray | float) -> np.ndarray:
        """Brightness of a surface by the cosine of its angle to the light."""
        return self.strength * (AMBIENT + (1 - AMBIENT) * np.clip(cosine, 0, 1))
