"""Meta-World (Yu et al. 2019, arXiv 1910.10897; package metaworld 3.1) as a `World`.

Seeds, sentences and ray-cast images are ours. Each task has its own scene, so a wrong instruction
is a weak control here. Tested with metaworld 3.1.1.
"""

import os
import tomllib
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from metaworld.env_dict import ALL_V3_ENVIRONMENTS, MT10_V3
from metaworld.policies import ENV_POLICY_MAP

from mesotron.config import WorldConfig
from mesotron.vla.interface import IMAGES, STATE, TASK, Observation, World, check_tasks
from mesotron.vla.worlds import rendering
from mesotron.vla.worlds.rendering import Ball, Camera, CameraView, Light, mj

# LeRobot's camera "corner2", but as narrow as hand, object and goal of MT10's experts allow.
FRONT = CameraView(Camera((0.75, 0.075, 0.7), (-0.03, 0.64, 0.14), 37.0), Light((0.6, -0.3, 0.75)))
MAX_STEPS = 500  # the package's horizon; about twice the experts' longest of 200 MT10 episodes
# The goals of reach, push and the like are drawn as balls of a color used for nothing else.
GOAL_COLOR = (1.0, 0.2, 0.9)
GOAL_RADIUS = 0.025
MT10 = tuple(name.removesuffix("-v3") for name in MT10_V3)
SENTENCES: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


class MetaWorld(World):
    """Tasks of Meta-World, by their names without the version (drawer-open); MT10 if none."""

    action_dim = 4
    state_dim = 4
    max_steps = MAX_STEPS
    is_paired = False
    cameras = ("front",)

    def __init__(self, config: WorldConfig) -> None:
        check_tasks(config, SENTENCES)
        if config.wrist or config.perturbation == "position":
            raise ValueError("metaworld has neither a wrist camera nor the perturbation position")
        if config.renderer == "gl" and os.environ.get("MUJOCO_GL") in (None, "disable"):
            raise ValueError("--world.renderer gl needs MUJOCO_GL=egl or MUJOCO_GL=osmesa")

        self.config = config
        self.tasks = config.tasks or MT10
        self._name = ""
        self._renderers: dict[int, Any] = {}
        weakref.finalize(self, _close_renderers, self._renderers)  # before OpenGL shuts down
        self.num_steps = 0

    def reset(self, seed: int, task: int, swap: bool = False, scatter: bool = False) -> Observation:
        if swap or scatter:
            raise ValueError("metaworld supports neither swap nor scatter")

        if self.tasks[task] != self._name:
            self._name = self.tasks[task]
            self.env, self._policy = _open_task(self._name)
            self._colors = rendering.geom_colors(self.env.model)
            _close_renderers(self._renderers)

        others = []
        for name in (*self.tasks, *MT10):
            if name != self._name:
                others.append(name)

        self.instruction = self._sentence(self._name)
        self.wrong_instruction = self._sentence(others[task % len(others)])
        self.num_steps = 0
        self.env.seed(seed)
        self.env.reset()

        # `reset` moves bodies after the last forward pass.
        mj.mj_forward(self.env.model, self.env.data)
        self._full = self.env._get_obs()
        self._view = rendering.perturb_view(FRONT, self.config.perturbation, seed)
        self._noise = np.random.default_rng([seed, 13])

        return self.observe()

    def _sentence(self, name: str) -> str:
        is_reworded = self.config.perturbation == "wording"
        if is_reworded:
            return f"I want you to {SENTENCES[name]} now"

        return SENTENCES[name]

    @property
    def where(self) -> np.ndarray:
        return self._full[4:7].astype(np.float32)

    @property
    def qpos(self) -> np.ndarray:
        return self.env.data.qpos.astype(np.float32)

    def show(self, qpos: np.ndarray) -> Observation:
        data = self.env.data
        data.qpos[:] = qpos[: len(data.qpos)]
        mj.mj_forward(self.env.model, data)
        self._full = self.env._get_obs()

        return self.observe()

    def observe(self) -> Observation:
        image = self._view.add_noise(self.picture(self.config.pixels), self._noise)
        state = self._full[:4].astype(np.float32)  # hand and gripper

        return {
            STATE: state,
            TASK: self.instruction,
            IMAGES + "front": image,
        }

    def picture(self, pixels: int) -> np.ndarray:
        if self.config.renderer == "gl":
            return self._render_gl(pixels)

        camera = self._view.camera
        light = self._view.light
        origin = np.array(camera.position)
        rays = camera.rays(pixels)
        goal = Ball(np.asarray(self.env._target_pos), GOAL_RADIUS, GOAL_COLOR)
        model = self.env.model
        data = self.env.data

        return rendering.render_meshes(
            model,
            data,
            origin,
            rays,
            self._colors,
            light,
            goal,
        )

    def _render_gl(self, pixels: int) -> np.ndarray:
        model = self.env.model
        camera = self._view.camera

        if pixels not in self._renderers:
            # Antialiasing, shadows and reflections cost 12 times all else on a CPU.
            model.vis.quality.offsamples = model.vis.quality.shadowsize = 0
            renderer = self._renderers[pixels] = mj.Renderer(model, pixels, pixels)
            for flag in (mj.mjtRndFlag.mjRND_SHADOW, mj.mjtRndFlag.mjRND_REFLECTION):
                renderer.scene.flags[flag] = 0

        forward = np.subtract(camera.target, camera.position)
        free = mj.MjvCamera()
        free.lookat[:] = camera.target
        free.distance = np.linalg.norm(forward)
        free.azimuth = np.degrees(np.arctan2(forward[1], forward[0]))
        free.elevation = np.degrees(np.arcsin(forward[2] / free.distance))
        model.vis.global_.fovy = camera.field_of_view
        self._renderers[pixels].update_scene(self.env.data, camera=free)

        return self._renderers[pixels].render().copy()

    def move(self, action: np.ndarray) -> tuple[bool, bool]:
        self._full, _, _, _, info = self.env.step(np.clip(action, -1, 1))
        self.num_steps += 1
        success = bool(info["success"])

        return success, success or self.num_steps >= self.max_steps

    def expert(self) -> np.ndarray:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Constant")  # its gains exceed its own bounds
            action = self._policy.get_action(self._full)
        return np.clip(action, -1, 1).astype(np.float32)


def _open_task(name: str) -> tuple[Any, Any]:
    """The environment of a task, seeded and with a visible goal, and its expert."""
    env = ALL_V3_ENVIRONMENTS[f"{name}-v3"]()
    env._partially_observable = False
    del env.sawyer_observation_space  # cached: it would clip the goal to zero
    env._freeze_rand_vec = False
    env.seeded_rand_vec = True
    env._set_task_called = True

    return env, ENV_POLICY_MAP[f"{name}-v3"]()


def _close_renderers(renderers: dict[int, Any]) -> None:
    for renderer in renderers.values():
        renderer.close()
    renderers.clear()
