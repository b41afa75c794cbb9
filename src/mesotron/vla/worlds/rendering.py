"""Ray-cast images of MuJoCo models: no OpenGL, the same picture on every machine, about 1 ms.

Each pixel is one ray (`mj_multiRay`), colored by the geom it hits and shaded by its angle to the
light: analytic normals for boxes and cylinders, normals from depth for meshes (Meta-World). P rays,
G geoms, V rays that hit a solid.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import mujoco
import numpy as np

from mesotron.config import PerturbationName

Array = np.ndarray
mj: Any = mujoco  # compiled bindings without type information
Model = Any  # mujoco.MjModel
Data = Any  # mujoco.MjData

# MuJoCo 4.0 added an argument to `mj_multiRay`.
if int(mj.__version__.split(".")[0]) > 3:
    raise ValueError(f"MuJoCo {mj.__version__} is not supported: pip install 'mujoco>=3.3,<4'")

AMBIENT = 0.45
SKY = (0.55, 0.65, 0.75)
FAR = 5.0  # meters
CYLINDER = int(mj.mjtGeom.mjGEOM_CYLINDER)
VISIBLE_GROUPS = np.array([1, 1, 1, 0, 0, 0], np.uint8)  # the others hold collision shapes
DEFAULT_RGBA = (0.5, 0.5, 0.5, 1.0)  # MuJoCo's; any other color wins over the material

CAMERA_SHIFT = 0.05  # meters, at most, along each axis
LIGHT_STRENGTH = (0.6, 1.3)
PIXEL_NOISE = 18.0  # standard deviation, of 255


@dataclass(frozen=True)
class Camera:
    """A pinhole camera: position, point it looks at, vertical field of view in degrees."""

    position: tuple[float, float, float]
    target: tuple[float, float, float]
    field_of_view: float

    @lru_cache(maxsize=8)  # noqa: B019  # keeps a few tuples alive
    def rays(self, pixels: int) -> np.ndarray:
        """Unit directions of a square image's pixels, row by row from the top left, (P, 3)."""
        forward = np.subtract(self.target, self.position)
        forward = forward / np.linalg.norm(forward)
        right = np.cross(forward, (0.0, 0.0, 1.0))  # a camera never looks straight down
        right /= np.linalg.norm(right)
        up = np.cross(right, forward)
        half = np.tan(np.radians(self.field_of_view) / 2)
        offsets = half * ((np.arange(pixels) + 0.5) * 2 / pixels - 1)
        grid = forward + offsets[None, :, None] * right - offsets[:, None, None] * up
        grid = grid.reshape(-1, 3)
        rays = grid / np.linalg.norm(grid, axis=1, keepdims=True)
        rays.flags.writeable = False

        return rays


@dataclass(frozen=True)
class Light:
    direction: tuple[float, float, float] = (0.35, -0.45, 0.82)
    strength: float = 1.0

    def unit(self) -> np.ndarray:
        return np.asarray(self.direction) / np.linalg.norm(self.direction)

    def shade(self, cosine: np.ndarray | float) -> np.ndarray:
        return self.strength * (AMBIENT + (1 - AMBIENT) * np.clip(cosine, 0, 1))


@dataclass(frozen=True)
class CameraView:
    camera: Camera
    light: Light
    noise: float = 0.0  # standard deviation

    def add_noise(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if not self.noise:
            return image
        return np.clip(image + rng.normal(0, self.noise, image.shape), 0, 255).astype(np.uint8)


def perturb_view(view: CameraView, name: PerturbationName, seed: int) -> CameraView:
    """The view of an evaluation episode, in the spirit of LIBERO-Plus (arXiv 2510.13626). The
    perturbations "position" and "wording" change the scene, not the view."""
    rng = np.random.default_rng([seed, 7])
    if name == "camera":
        x, y, z = np.add(view.camera.position, rng.uniform(-CAMERA_SHIFT, CAMERA_SHIFT, 3))
        return replace(view, camera=replace(view.camera, position=(x, y, z)))

    if name == "light":
        angle = rng.uniform(0, 2 * np.pi)
        direction = (0.9 * np.cos(angle), 0.9 * np.sin(angle), 0.6)
        return replace(view, light=Light(direction, rng.uniform(*LIGHT_STRENGTH)))

    if name == "noise":
        return replace(view, noise=PIXEL_NOISE)

    return view


def cast_rays(
    model: Model, data: Data, origin: np.ndarray, rays: np.ndarray, groups: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """What each ray hits first: geom ids int32 (P,), -1 for none, and distances float64 (P,)."""
    geoms = np.empty(len(rays), np.int32)
    distances = np.empty(len(rays))
    num = len(rays)

    mj.mj_multiRay(
        model,
        data,
        origin,
        rays.ravel(),
        groups,
        1,
        -1,
        geoms,
        distances,
        num,
        FAR,
    )
    return geoms, distances


def render_primitives(
    model: Model, data: Data, origin: Array, rays: Array, colors: Array, light: Light
) -> Array:
    """Render boxes and cylinders with exact normals, uint8 (H, W, 3); geom 0 is the table."""
    direction = light.unit()
    geoms, distances = cast_rays(model, data, origin, rays)
    shade = np.full(len(rays), light.shade(direction[2]), np.float32)
    solid = np.flatnonzero(geoms > 0)
    points = origin + distances[solid, None] * rays[solid]
    shade[solid] = light.shade(surface_normals(model, data, geoms[solid], points) @ direction)

    # Geom -1, the last row, is the sky.
    palette = (255 * np.vstack([colors, SKY])).astype(np.float32)
    image = np.minimum(palette[geoms] * shade[:, None], 255).astype(np.uint8)
    pixels = int(len(rays) ** 0.5)

    return image.reshape(pixels, pixels, 3)


def surface_normals(model: Model, data: Data, geoms: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Outward unit normals at surface points of boxes and upright cylinders, (V, 3)."""
    frames = data.geom_xmat.reshape(-1, 3, 3)[geoms]
    local = np.einsum("vij,vi->vj", frames, points - data.geom_xpos[geoms])
    normals = np.empty_like(local)

    is_round = model.geom_type[geoms] == CYLINDER
    for rows, normals_of in ((~is_round, _box_normals), (is_round, _cylinder_normals)):
        if rows.any():
            normals[rows] = normals_of(local[rows], model.geom_size[geoms[rows]])

    return np.einsum("vij,vj->vi", frames, normals)


def _box_normals(local: np.ndarray, half_sizes: np.ndarray) -> np.ndarray:
    face = np.argmax(np.abs(local) / half_sizes, axis=1)[:, None]
    normals = np.zeros_like(local)
    np.put_along_axis(normals, face, np.sign(np.take_along_axis(local, face, axis=1)), axis=1)

    return normals


def _cylinder_normals(local: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    radius = np.hypot(local[:, 0], local[:, 1])
    is_side = radius / sizes[:, 0] >= np.abs(local[:, 2]) / sizes[:, 1]
    side = local * [1, 1, 0] / np.maximum(radius, 1e-9)[:, None]

    return np.where(is_side[:, None], side, np.sign(local) * [0, 0, 1])


class Ball(NamedTuple):
    """A ball that is drawn but not simulated, such as a goal: MuJoCo's rays do not hit sites."""

    position: np.ndarray
    radius: float
    color: tuple[float, float, float]


def render_meshes(
    model: Model, data: Data, origin: Array, rays: Array, colors: Array, light: Light, ball: Ball
) -> Array:
    """Render any model with normals from depth, uint8 (H, W, 3); `colors` as in `geom_colors`."""
    geoms, depth = cast_rays(
        model,
        data,
        origin,
        rays,
        VISIBLE_GROUPS,
    )

    depth = np.where(geoms < 0, FAR, depth)
    image = colors[geoms]
    distance = hit_ball(origin, rays, ball)
    image[distance < depth], depth = ball.color, np.minimum(depth, distance)
    pixels = int(len(rays) ** 0.5)
    points = (origin + depth[:, None] * rays).reshape(pixels, pixels, 3)
    image = image.reshape(pixels, pixels, 3) * shade_from_depth(points, origin, light)[..., None]

    return (255 * np.clip(image, 0, 1)).astype(np.uint8)


def geom_colors(model: Model) -> np.ndarray:
    """Colors of all geoms by material and mean texture color, (G + 1, 3); the last is the sky."""
    textures = []
    for k in range(model.ntex):
        start = model.tex_adr[k]
        channels = model.tex_nchannel[k]
        size = model.tex_height[k] * model.tex_width[k] * channels
        texels = model.tex_data[start : start + size].reshape(-1, channels)
        textures.append(texels[:, :3].mean(axis=0) / 255)

    colors = model.geom_rgba[:, :3].copy()
    for geom, material in enumerate(model.geom_matid):
        if material >= 0:
            if np.allclose(model.geom_rgba[geom], DEFAULT_RGBA):
                colors[geom] = model.mat_rgba[material, :3]

            for texture in model.mat_texid[material]:
                if texture >= 0:
                    colors[geom] *= textures[texture]

    return np.vstack([colors, SKY])


def hit_ball(origin: np.ndarray, rays: np.ndarray, ball: Ball) -> np.ndarray:
    """Distance at which each unit ray hits a ball, (P,); infinite for a miss."""
    offset = ball.position - origin
    along = rays @ offset
    inside = along**2 - offset @ offset + ball.radius**2

    return np.where((inside > 0) & (along > 0), along - np.sqrt(np.maximum(inside, 0)), np.inf)


def shade_from_depth(points: np.ndarray, origin: np.ndarray, light: Light) -> np.ndarray:
    """Brightness (H, W) from the slope between neighboring surface points (H, W, 3)."""
    normal = np.cross(_nearest_difference(points, axis=0), _nearest_difference(points, axis=1))
    normal /= np.maximum(np.linalg.norm(normal, axis=-1, keepdims=True), 1e-12)
    # A visible surface faces the camera.
    facing = np.sum(normal * (origin - points), axis=-1, keepdims=True)

    return light.shade(np.where(facing < 0, -normal, normal) @ light.unit())


def _nearest_difference(points: np.ndarray, axis: int) -> np.ndarray:
    """Difference to the nearer of two neighbors, so that edges do not mix surfaces."""
    step = np.diff(points, axis=axis)
    before = np.concatenate([np.take(step, [0], axis=axis), step], axis=axis)
    after = np.concatenate([step, np.take(step, [-1], axis=axis)], axis=axis)
    nearer = np.linalg.norm(before, axis=-1) < np.linalg.norm(after, axis=-1)

    return np.where(nearer[..., None], before, after)
