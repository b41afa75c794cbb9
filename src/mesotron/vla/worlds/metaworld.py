"""Meta-World (Yu et al. 2019, arXiv 1910.10897; package metaworld 3.1) as a `World`.

The package's scenes, physics, success and scripted experts; seeds, sentences and ray-cast images
are ours. Language is mostly redundant: each task has a scene of its own, so a wrong instruction is
a weak control here. Checked against metaworld 3.1.1, whose private names are met in `open_task`.
"""

from __future__ import annotations

import os
import warnings
import weakref
from typing import Any

import numpy as np

from mesotron.config import WorldConfig
from mesotron.vla.interface import IMAGES, STATE, TASK, Observation
from mesotron.vla.worlds.engine import Model, mj
from mesotron.vla.worlds.mesh_rays import Mark, geom_colours, paint_meshes
from mesotron.vla.worlds.metaworld_sentences import MT10, SENTENCES
from mesotron.vla.worlds.perturbation import View, add_noise, perturb_view
from mesotron.vla.worlds.rays import Camera, Light
from mesotron.vla.worlds.stepping import Stepping

# Where LeRobot puts the camera "corner2", but as narrow as hand, object and goal of MT10's experts
# allow, which fill 0.92 of it: with its own 60 degrees a puck is two of 64 pixels, here four.
FRONT = View(Camera((0.75, 0.075, 0.7), (-0.03, 0.64, 0.14), 37.0), Light((0.6, -0.3, 0.75)))
# The package's own horizon, and about twice the longest of the experts' 200 episodes of MT10 (251).
MAX_STEPS = 500
GOAL_COLOUR = (1.0, 0.2, 0.9)
GOAL_RADIUS = 0.025


def open_task(name: str) -> tuple[Any, Any]:
    """The environment of a task, drawn from seeds and with its goal known, and its expert."""
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    from metaworld.policies import ENV_POLICY_MAP

    env = ALL_V3_ENVIRONMENTS[f"{name}-v3"]()
    env._partially_observable = False
    del env.sawyer_observation_space  # cached: it would cut the goal to zero
    env._freeze_rand_vec = False
    env.seeded_rand_vec = True
    env._set_task_called = True
    return env, ENV_POLICY_MAP[f"{name}-v3"]()


class MetaWorld(Stepping):
    """A `World` of Meta-World's tasks; see `mesotron.vla.interface`.

    Args:
        config: its tasks are names without the version, such as drawer-open; MT10 if none.
    """

    action_dim = 4
    state_dim = 4
    max_steps = MAX_STEPS
    is_paired = False
    cameras = ("front",)

    def __init__(self, config: WorldConfig) -> None:
        self.config = config
        self.tasks = config.tasks or MT10
        check(config)
        self._name = ""
        self._renderers: dict[int, Any] = {}
        weakref.finalize(self, close_renderers, self._renderers)  # before the window system ends
        self.num_steps = 0

    def reset(self, seed: int, task: int, swap: bool = False, scatter: bool = False) -> Observation:
        """Begin an episode; a scene has one instruction and one place of the hand."""
        if swap or scatter:
            raise ValueError("a scene of metaworld can neither be swapped nor its hand scattered")
        if self.tasks[task] != self._name:
            self._name = self.tasks[task]
            self.env, self._policy = open_task(self._name)
            self._colours = geom_colours(self.env.model)
            close_renderers(self._renderers)
        self._task, self.num_steps = task, 0
        self.env.seed(seed)
        self.env.reset()
        # A reset moves bodies after the last computation of where everything is.
        mj.mj_forward(self.env.model, self.env.data)
        self._full = self.env._get_obs()
        self._view = perturb_view(FRONT, self.config.perturbation, seed)
        self._noise = np.random.default_rng([seed, 13])
        return self.observe()

    @property
    def instruction(self) -> str:
        """What is asked in this episode."""
        return self._say(self.tasks[self._task])

    @property
    def wrong_instruction(self) -> str:
        """The sentence of the next task."""
        others = [name for name in (*self.tasks, *MT10) if name != self.tasks[self._task]]
        return self._say(others[self._task % len(others)])

    def _say(self, name: str) -> str:
        reworded = self.config.perturbation == "wording"
        return f"I want you to {SENTENCES[name]} now" if reworded else SENTENCES[name]

    @property
    def where(self) -> np.ndarray:
        """Position of the object that the expert looks at, float32 (3,)."""
        return self._full[4:7].astype(np.float32)

    @property
    def qpos(self) -> np.ndarray:
        """All joint positions, float32."""
        return self.env.data.qpos.astype(np.float32)

    def show(self, qpos: np.ndarray) -> Observation:
        """What is seen in a recorded state of this episode's scene."""
        data = self.env.data
        data.qpos[:] = qpos[: len(data.qpos)]
        mj.mj_forward(self.env.model, data)
        self._full = self.env._get_obs()
        return self.observe()

    def observe(self) -> Observation:
        """What is seen now: hand and gripper (4 numbers), one image."""
        image = self._see(self.config.pixels)
        if self._view.noise:
            image = add_noise(image, self._view.noise, self._noise)
        state = self._full[:4].astype(np.float32)
        return {STATE: state, TASK: self.instruction, IMAGES + "front": image}

    def picture(self, pixels: int) -> np.ndarray:
        """An image for people, uint8 (pixels, pixels, 3)."""
        return self._see(pixels)

    def _see(self, pixels: int) -> np.ndarray:
        if self.config.renderer == "gl":
            return self._see_by_gl(pixels)
        camera = self._view.camera
        origin, rays = np.array(camera.position), camera.rays(pixels)
        goal = Mark(np.asarray(self.env._target_pos), GOAL_RADIUS, GOAL_COLOUR)
        model, data = self.env.model, self.env.data
        return paint_meshes(model, data, origin, rays, self._colours, self._view.light, [goal])

    def _see_by_gl(self, pixels: int) -> np.ndarray:
        if pixels not in self._renderers:
            self._renderers[pixels] = open_renderer(self.env.model, pixels)
        renderer = self._renderers[pixels]
        self.env.model.vis.global_.fovy = self._view.camera.field_of_view
        renderer.update_scene(self.env.data, camera=free_camera(self._view.camera))
        return renderer.render().copy()

    def move(self, action: np.ndarray) -> tuple[bool, bool]:
        """Take one action, (4,), without looking."""
        self._full, _, _, _, info = self.env.step(np.clip(action, -1, 1))
        self.num_steps += 1
        success = bool(info["success"])
        return success, success or self.num_steps >= self.max_steps

    def expert(self) -> np.ndarray:
        """What the package's scripted policy does now, float32 (4,)."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Constant")  # its own gains exceed its own bounds
            action = self._policy.get_action(self._full)
        return np.clip(action, -1, 1).astype(np.float32)


def check(config: WorldConfig) -> None:
    """Refuse tasks and pictures that are not there, in a sentence."""
    unknown = [task for task in config.tasks if task not in SENTENCES]
    if unknown:
        raise ValueError(f"metaworld has no task {unknown[0]!r}; it has {', '.join(SENTENCES)}")
    if config.wrist:
        raise ValueError("metaworld has no wrist camera here; leave --world.wrist out")
    if config.perturbation == "position":
        raise ValueError("metaworld draws its own positions; perturb camera, light, noise, wording")
    if config.renderer == "gl" and os.environ.get("MUJOCO_GL") in (None, "disable"):
        raise ValueError("--world.renderer gl needs MUJOCO_GL=egl or MUJOCO_GL=osmesa to be set")


def open_renderer(model: Model, pixels: int) -> Any:
    """MuJoCo's OpenGL renderer without what costs 12 times all else on a CPU."""
    model.vis.quality.offsamples = model.vis.quality.shadowsize = 0
    renderer = mj.Renderer(model, pixels, pixels)
    for flag in (mj.mjtRndFlag.mjRND_SHADOW, mj.mjtRndFlag.mjRND_REFLECTION):
        renderer.scene.flags[flag] = 0
    return renderer


def close_renderers(renderers: dict[int, Any]) -> None:
    """Give back their windows."""
    for renderer in renderers.values():
        renderer.close()
    renderers.clear()


def free_camera(camera: Camera) -> Any:
    """A camera of ours as MuJoCo's renderer takes it: angles in degrees around a point."""
    forward = np.subtract(camera.target, camera.position)
    free = mj.MjvCamera()
    free.lookat[:] = camera.target
    free.distance = np.linalg.norm(forward)
    free.azimuth = np.degrees(np.arctan2(forward[1], forward[0]))
    free.elevation = np.degrees(np.arcsin(forward[2] / free.distance))
    return free
