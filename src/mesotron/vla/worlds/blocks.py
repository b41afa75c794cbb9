"""The blocks worlds: put the named thing into the bin, told by a sentence, seen by a camera.

`blocks` has two things in view and two tasks, `object10` four to six of ten and ten tasks; every
scene could be asked for another of its things, so language is needed. Not LIBERO: ours, small.
"""

from __future__ import annotations

import numpy as np

from mesotron.config import WorldConfig
from mesotron.vla.interface import IMAGES, STATE, TASK, Observation
from mesotron.vla.worlds.engine import mj
from mesotron.vla.worlds.perturbation import View, add_noise, perturb_view
from mesotron.vla.worlds.pick_and_place import pick_and_place
from mesotron.vla.worlds.rays import Camera, Light, Painter
from mesotron.vla.worlds.scene import COLOURS, SUITES, Scene, draw_scene, scatter_hand
from mesotron.vla.worlds.stepping import Stepping
from mesotron.vla.worlds.table import Table

FRONT = View(Camera((0.0, -0.47, 0.52), (0.0, 0.015, 0.0), 37.0), Light())
WRIST = Camera((0.0, -0.06, 0.07), (0.0, 0.0, -0.04), 80.0)  # from the hand
# Twice the longest of the expert's 600 episodes in each world; the mean is 19.
MAX_STEPS = 54
FURNITURE = {"table": (0.62, 0.58, 0.52), "palm": (0.25, 0.25, 0.27)}
FURNITURE |= {"finger": (0.12, 0.12, 0.13), "bin": (0.92, 0.92, 0.92)}


class BlocksWorld(Stepping):
    """A `World` of things on a table; see `mesotron.vla.interface`.

    Args:
        config: one of the blocks worlds.

    Example:
        >>> world = BlocksWorld(WorldConfig(name="blocks"))
        >>> seen = world.reset(seed=0, task=1)
        >>> seen["observation.images.front"].shape, seen["observation.state"].shape
        ((24, 24, 3), (4,))
        >>> while not (step := world.step(world.expert())).done:
        ...     pass
        >>> step.success
        True
    """

    action_dim = 4
    max_steps = MAX_STEPS
    is_paired = True

    def __init__(self, config: WorldConfig) -> None:
        self.config = config
        self.suite = SUITES[config.name.removesuffix("_state")]
        self.gives_position = config.name.endswith("_state")
        self.cameras = () if self.gives_position else ("front", "wrist")[: 1 + config.wrist]
        self.state_dim = 7 if self.gives_position else 4
        names = tuple(thing.name for thing in self.suite.things)
        unknown = [task for task in config.tasks if task not in names]
        if unknown:
            raise ValueError(f"{config.name} has no task {unknown[0]!r}; it has {', '.join(names)}")
        if self.cameras and config.pixels < 8:
            raise ValueError(f"{config.pixels} pixels show nothing; give --world.pixels 8 or more")
        self.tasks = config.tasks or names
        self._thing_of_task = [names.index(task) for task in self.tasks]
        self._wrist_rays = WRIST.rays(config.pixels) if config.wrist else np.empty((0, 3))

    def reset(self, seed: int, task: int, swap: bool = False, scatter: bool = False) -> Observation:
        """Begin an episode.

        Args:
            seed: of the scene.
            task: index into `tasks`.
            swap: the same scene, asked for the other thing.
            scatter: put the hand anywhere instead of where episodes begin.
        """
        name = self.config.perturbation
        scene = draw_scene(
            self.suite,
            seed,
            self._thing_of_task[task],
            outside=name == "position",
            reworded=name == "wording",
        )
        self._begin(scene.swapped() if swap else scene, seed)
        if scatter:
            self.table.place_hand(scatter_hand(scene, np.random.default_rng([seed, task, 11])))
        return self.observe()

    def _begin(self, scene: Scene, seed: int) -> None:
        self.scene, self.table, self.num_steps = scene, Table(scene), 0
        view = perturb_view(FRONT, self.config.perturbation, seed)
        self._view = view
        self._noise = np.random.default_rng([seed, 13])
        self._painter = Painter(self.table.model, self._colours(), view.light)
        self._front_rays = view.camera.rays(self.config.pixels)

    def _colours(self) -> np.ndarray:
        """Of every geom, (number of geoms, 3)."""
        model = self.table.model
        names = [model.geom(k).name for k in range(model.ngeom)]
        things = {f"thing{k}": COLOURS[thing.colour] for k, thing in enumerate(self.scene.things)}
        known = things | FURNITURE
        return np.array([known.get(name) or known[name.split("_")[0]] for name in names])

    @property
    def instruction(self) -> str:
        """What is asked in this episode."""
        return self.scene.instruction

    @property
    def wrong_instruction(self) -> str:
        """The same sentence about another thing in view."""
        return self.scene.wrong_instruction

    @property
    def where(self) -> np.ndarray:
        """Position of the thing that is asked for, float32 (3,)."""
        return self.table.position(self.scene.target).astype(np.float32)

    @property
    def qpos(self) -> np.ndarray:
        """All joint positions, float32: with the scene's seed enough to draw the frame again."""
        return self.table.data.qpos.astype(np.float32)

    def show(self, qpos: np.ndarray) -> Observation:
        """What is seen in a recorded state of this episode's scene."""
        self.table.set_qpos(qpos[: len(self.qpos)])  # tables of scenes are padded to one length
        return self.observe()

    def observe(self) -> Observation:
        """What is seen now."""
        hand = [*self.table.hand, self.table.gap]
        state = [*hand, *self.where] if self.gives_position else hand
        seen: Observation = {STATE: np.array(state, np.float32), TASK: self.instruction}
        for camera in self.cameras:
            seen[IMAGES + camera] = self._see(camera)
        return seen

    def _see(self, camera: str) -> np.ndarray:
        """One camera's image."""
        origin, rays = np.array(self._view.camera.position), self._front_rays
        if camera == "wrist":
            origin, rays = self.table.hand + WRIST.position, self._wrist_rays
        image = self._paint(origin, rays)
        return add_noise(image, self._view.noise, self._noise) if self._view.noise else image

    def _paint(self, origin: np.ndarray, rays: np.ndarray) -> np.ndarray:
        # Geoms follow joints; a physics step leaves them where they were before it.
        mj.mj_kinematics(self.table.model, self.table.data)
        return self._painter.paint(self.table.data, origin, rays)

    def picture(self, pixels: int) -> np.ndarray:
        """An image for people, uint8 (pixels, pixels, 3), in worlds of states too."""
        camera = self._view.camera
        return self._paint(np.array(camera.position), camera.rays(pixels))

    def move(self, action: np.ndarray) -> tuple[bool, bool]:
        """Take one action, (4,), without looking: the hand's move in units of 3 cm, the grip."""
        self.table.move(action)
        self.num_steps += 1
        success = self.table.is_in_bin(self.scene.target)
        return success, success or self.num_steps >= self.max_steps

    def expert(self) -> np.ndarray:
        """What the scripted expert does now, float32 (4,)."""
        return pick_and_place(self.table, self.scene.target)
