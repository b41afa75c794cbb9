"""Changes that evaluation makes, by name, in the spirit of LIBERO-Plus (arXiv 2510.13626).

Each is drawn from the scene's seed, so perturbed episodes are repeatable too. `position` and
`wording` act where the scene is drawn; the others act on the picture alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mesotron.config import PerturbationName
from mesotron.vla.worlds.rays import Camera, Light

CAMERA_SHIFT = 0.05  # metres, along each axis at most
LIGHT_STRENGTH = (0.6, 1.3)
NOISE = 18.0  # standard deviation, of 255


@dataclass(frozen=True)
class View:
    """How a scene is seen: the camera, the light, and noise on each pixel."""

    camera: Camera
    light: Light
    noise: float = 0.0


def perturb_view(view: View, name: PerturbationName, seed: int) -> View:
    """The view of one episode under a perturbation.

    Example:
        >>> view = View(Camera((0, -0.5, 0.5), (0, 0, 0), 45), Light())
        >>> perturb_view(view, "wording", seed=1) == view
        True
    """
    rng = np.random.default_rng([seed, 7])
    if name == "camera":
        x, y, z = np.add(view.camera.position, rng.uniform(-CAMERA_SHIFT, CAMERA_SHIFT, 3))
        return replace(view, camera=replace(view.camera, position=(x, y, z)))
    if name == "light":
        angle = rng.uniform(0, 2 * np.pi)
        direction = (0.9 * np.cos(angle), 0.9 * np.sin(angle), 0.6)
        strength = rng.uniform(*LIGHT_STRENGTH)
        return replace(view, light=Light(direction, strength))
    if name == "noise":
        return replace(view, noise=NOISE)
    return view


def add_noise(image: np.ndarray, amount: float, rng: np.random.Generator) -> np.ndarray:
    """Gaussian noise on every pixel and colour of a uint8 image."""
    noisy = image + rng.normal(0, amount, image.shape)
    return np.clip(noisy, 0, 255).astype(np.uint8)
