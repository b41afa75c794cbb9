"""Ray-cast images of any MuJoCo model, meshes too: colours of materials, shading from depth.

Textures are replaced by their mean colour. Ray casting sees geoms and not sites, so marks such as
goals are drawn here as small balls.

Legend: H x W pixels, P = H * W, G geoms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mesotron.vla.worlds.engine import Data, Model, mj
from mesotron.vla.worlds.rays import AMBIENT, FAR, SKY, Light

# Groups that MuJoCo's own viewer shows; the others hold collision shapes.
SHOWN = np.array([1, 1, 1, 0, 0, 0], np.uint8)
# A geom's own colour unless the model names one, which then wins over its material.
UNSET = (0.5, 0.5, 0.5, 1.0)


class Mark(NamedTuple):
    """A ball that is only seen: where, how large, and its colour."""

    position: np.ndarray
    radius: float
    colour: tuple[float, float, float]


def geom_colours(model: Model) -> np.ndarray:
    """The colour of each geom, by its material and the mean of its texture, (G + 1, 3).

    The last row is the sky's.
    """
    means = [texture_mean(model, number) for number in range(model.ntex)]
    colours = model.geom_rgba[:, :3].copy()
    for geom, material in enumerate(model.geom_matid):
        if material >= 0:
            if np.allclose(model.geom_rgba[geom], UNSET):
                colours[geom] = model.mat_rgba[material, :3]
            textures = [number for number in model.mat_texid[material] if number >= 0]
            for texture in textures:
                colours[geom] *= means[texture]
    return np.vstack([colours, SKY])


def texture_mean(model: Model, number: int) -> np.ndarray:
    """Mean colour of a texture, (3,)."""
    start, channels = model.tex_adr[number], model.tex_nchannel[number]
    size = model.tex_height[number] * model.tex_width[number] * channels
    pixels = model.tex_data[start : start + size].reshape(-1, channels)
    return pixels[:, :3].mean(axis=0) / 255


def paint_meshes(
    model: Model,
    data: Data,
    origin: np.ndarray,
    rays: np.ndarray,
    colours: np.ndarray,
    light: Light,
    marks: Sequence[Mark] = (),
) -> np.ndarray:
    """An image, uint8 (H, W, 3).

    Args:
        origin: of all rays, (3,).
        rays: unit directions, (P, 3), row by row.
        colours: see `geom_colours`.
        light: where light comes from.
        marks: balls that the model does not have.
    """
    geoms, depth = np.empty(len(rays), np.int32), np.empty(len(rays))
    mj.mj_multiRay(model, data, origin, rays.ravel(), SHOWN, 1, -1, geoms, depth, len(rays), FAR)
    depth = np.where(geoms < 0, FAR, depth)
    image = colours[geoms]
    for mark in marks:
        distance = meet_ball(origin, rays, mark)
        seen = distance < depth
        image[seen], depth = mark.colour, np.minimum(depth, distance)
    pixels = int(len(rays) ** 0.5)
    points = (origin + depth[:, None] * rays).reshape(pixels, pixels, 3)
    image = image.reshape(pixels, pixels, 3) * shade(points, origin, light)[..., None]
    return (255 * np.clip(image, 0, 1)).astype(np.uint8)


def meet_ball(origin: np.ndarray, rays: np.ndarray, mark: Mark) -> np.ndarray:
    """Distance at which each unit ray meets a ball, infinite if it does not, (P,)."""
    towards = mark.position - origin
    along = rays @ towards
    inside = along**2 - towards @ towards + mark.radius**2
    return np.where((inside > 0) & (along > 0), along - np.sqrt(np.maximum(inside, 0)), np.inf)


def shade(points: np.ndarray, origin: np.ndarray, light: Light) -> np.ndarray:
    """Brightness by the slope of the surface, from points seen side by side, (H, W)."""
    across = nearest_difference(points, axis=1)
    down = nearest_difference(points, axis=0)
    normal = np.cross(down, across)
    normal /= np.maximum(np.linalg.norm(normal, axis=-1, keepdims=True), 1e-12)
    # A surface that is seen faces the camera.
    facing = np.sum(normal * (origin - points), axis=-1, keepdims=True)
    direction = np.asarray(light.direction) / np.linalg.norm(light.direction)
    cosine = np.where(facing < 0, -normal, normal) @ direction
    return light.strength * (AMBIENT + (1 - AMBIENT) * np.clip(cosine, 0, 1))


def nearest_difference(points: np.ndarray, axis: int) -> np.ndarray:
    """Difference to the next or the last point, whichever is nearer: edges do not mix surfaces."""
    step = np.diff(points, axis=axis)
    before = np.concatenate([np.take(step, [0], axis=axis), step], axis=axis)
    after = np.concatenate([step, np.take(step, [-1], axis=axis)], axis=axis)
    nearer = np.linalg.norm(before, axis=-1) < np.linalg.norm(after, axis=-1)
    return np.where(nearer[..., None], before, after)
