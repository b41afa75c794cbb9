"""The blocks worlds: put the named object into the bin. Physics, scripted expert and `World`.

`blocks` shows two objects and has two tasks; `object10` shows four to six of ten and has ten tasks.
Every scene allows another instruction, so language is needed. Only friction holds what is grasped.
"""

from functools import lru_cache
from pathlib import Path

import numpy as np

from mesotron.config import WorldConfig
from mesotron.vla.interface import IMAGES, STATE, TASK, Observation, World, check_tasks
from mesotron.vla.worlds import rendering
from mesotron.vla.worlds import scene as scenes
from mesotron.vla.worlds.rendering import Camera, CameraView, Light, Model, mj
from mesotron.vla.worlds.scene import BIN, BIN_HALF, HALF_HEIGHT, HALF_WIDTH, Scene

FRONT = CameraView(Camera((0.0, -0.47, 0.52), (0.0, 0.015, 0.0), 37.0), Light())
WRIST = Camera((0.0, -0.06, 0.07), (0.0, 0.0, -0.04), 80.0)  # relative to the hand
MAX_STEPS = 54  # twice the expert's longest of 600 episodes in each world; the mean is 19

SUBSTEPS = 10  # physics steps per action
REACH = 0.03  # meters the hand moves for an action of 1
OPEN = 0.040  # half the gap between open fingers
HAND_DOFS = 5
LOW, HIGH = (np.array(ends) for ends in zip(*scenes.WORKSPACE))

# The expert.
ABOVE = 0.09  # meters above the object at which the hand approaches
FUNNEL = 2.0  # meters down for each meter nearer
ALIGNED = 0.012  # horizontal distance at which the fingers may begin to close
CARRY = 0.108  # height at which an object is carried
DROP = 0.085  # height above the bin at which it is released


@lru_cache(maxsize=128)
def compile_model(shapes: tuple[scenes.Shape, ...]) -> Model:
    """The MuJoCo model of a table with these objects; never modified."""
    objects = ""
    for k, shape in enumerate(shapes):
        w = HALF_WIDTH[shape]
        h = HALF_HEIGHT[shape]

        if shape == "cube":
            geom = f'"box" size="{w} {w} {h}"'
        else:
            geom = f'"cylinder" size="{w} {h}"'

        objects += (
            f'<body name="object{k}"><freejoint/><geom name="object{k}" type={geom}'
            ' mass="0.05" condim="4" friction="1.2 0.02 0.001"/></body>'
        )

    xml = Path(__file__).with_suffix(".xml").read_text(encoding="utf-8")
    return mj.MjModel.from_xml_string(xml.replace("</worldbody>", f"{objects}</worldbody>"))


class BlockTable:
    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.model = compile_model(tuple(item.shape for item in scene.objects))
        self.data = mj.MjData(self.model)

        for k, item in enumerate(scene.objects):
            start = HAND_DOFS + 7 * k
            rotation = np.cos(item.yaw / 2), 0.0, 0.0, np.sin(item.yaw / 2)
            self.data.qpos[start : start + 7] = (*item.place, HALF_HEIGHT[item.shape], *rotation)

        self.place_hand(scene.hand)

    def place_hand(self, position: tuple[float, float, float]) -> None:
        self.data.qpos[:HAND_DOFS] = (*position, OPEN, OPEN)
        self.data.qvel[:HAND_DOFS] = 0
        mj.mj_forward(self.model, self.data)

    @property
    def hand(self) -> np.ndarray:  # the point between the fingertips
        return self.data.qpos[:3].copy()

    @property
    def gap(self) -> float:  # half the distance between the fingers
        return float(self.data.qpos[3] + self.data.qpos[4]) / 2

    def position(self, index: int) -> np.ndarray:  # of an object's center
        start = HAND_DOFS + 7 * index
        return self.data.qpos[start : start + 3].copy()

    def move(self, action: np.ndarray) -> None:
        """Move the hand by 3 cm times the first three numbers; the fourth closes the fingers."""
        x = np.clip(action, -1, 1)
        self.data.ctrl[:3] = np.clip(self.hand + REACH * x[:3], LOW, HIGH)
        self.data.ctrl[3:] = OPEN * (1 - x[3]) / 2
        mj.mj_step(self.model, self.data, SUBSTEPS)

    def is_in_bin(self, index: int) -> bool:
        """Whether an object lies in the bin and the fingers have released it."""
        x, y, z = self.position(index)
        inside = abs(x - BIN[0]) < BIN_HALF[0] and abs(y - BIN[1]) < BIN_HALF[1]
        shape = self.scene.objects[index].shape
        is_low = z < HALF_HEIGHT[shape] + 0.015

        return bool(inside and is_low and self.gap > HALF_WIDTH[shape] + 0.005)


def pick_and_place(table: BlockTable, index: int) -> np.ndarray:
    """The scripted expert's action, float32 (4,) in [-1, 1], a smooth function of hand, gap and
    object position: a policy that imitates a hidden phase stalls between two of them."""
    hand = table.hand
    goal = table.position(index)
    half = HALF_WIDTH[table.scene.objects[index].shape]
    distance = float(np.hypot(*(goal - hand)[:2]))

    is_held = distance < 0.02 and abs(goal[2] - hand[2]) < 0.02 and table.gap < half + 0.003
    if is_held:  # lift, move above the bin, release
        goal = np.array([*BIN, 0.0])
        distance = float(np.hypot(*(goal - hand)[:2]))
        height = DROP + (CARRY - DROP) * _ramp(distance, 0.02, 0.05)
        return _move_to(hand, goal, height, grip=1 - 2 * _ramp(distance, 0.025, 0.015))

    # Approach from above through a funnel, then close.
    height = goal[2] + np.clip(FUNNEL * (distance - ALIGNED), 0, ABOVE)
    aligned = _ramp(distance, 0.015, 0.006) * _ramp(abs(hand[2] - goal[2]), 0.015, 0.006)

    return _move_to(hand, goal, height, grip=2 * aligned - 1)


def _ramp(x: float, start: float, stop: float) -> float:
    """Linear from 0 at `start` to 1 at `stop`, clipped; `stop` may be the smaller one."""
    return float(np.clip((x - start) / (stop - start), 0.0, 1.0))


def _move_to(hand: np.ndarray, goal: np.ndarray, height: float, grip: float) -> np.ndarray:
    # A hand that is too low rises before it moves sideways.
    sideways = _ramp(height - hand[2], 0.05, 0.01)
    x, y = sideways * (goal - hand)[:2] / REACH

    # Along a straight line, also where the longer axis is clipped to 1.
    scale = max(1.0, abs(x), abs(y))
    z = np.clip((height - hand[2]) / REACH, -1, 1)
    return np.array([x / scale, y / scale, z, grip], np.float32)


class BlocksWorld(World):
    action_dim = 4
    max_steps = MAX_STEPS
    is_paired = True

    def __init__(self, config: WorldConfig) -> None:
        self.config = config
        self.suite = scenes.SUITES[config.name.removesuffix("_state")]
        self.gives_position = config.name.endswith("_state")

        if self.gives_position:
            self.cameras = ()
        else:
            self.cameras = ("front", "wrist")[: 1 + config.wrist]

        self.state_dim = 7 if self.gives_position else 4
        names = tuple(item.name for item in self.suite.objects)
        check_tasks(config, names)
        if self.cameras and config.pixels < 8:
            raise ValueError(f"--world.pixels {config.pixels} must be at least 8")

        self.tasks = config.tasks or names
        self._target_of_task = [names.index(task) for task in self.tasks]

    def reset(self, seed: int, task: int, swap: bool = False, scatter: bool = False) -> Observation:
        name = self.config.perturbation
        target = self._target_of_task[task]
        scene = scenes.draw_scene(
            self.suite,
            seed,
            target,
            name == "position",
            name == "wording",
        )

        self.scene = scene.swapped() if swap else scene
        self.instruction = self.scene.instruction
        self.wrong_instruction = self.scene.swapped().instruction
        self.table = BlockTable(self.scene)
        self.num_steps = 0
        self._view = rendering.perturb_view(FRONT, name, seed)
        self._noise = np.random.default_rng([seed, 13])
        names = [self.table.model.geom(k).name for k in range(self.table.model.ngeom)]
        objects = enumerate(self.scene.objects)
        colors = {f"object{k}": scenes.COLORS[item.color] for k, item in objects}
        colors |= scenes.FURNITURE_COLORS
        self._colors = np.array([colors.get(one) or colors[one.split("_")[0]] for one in names])

        if scatter:
            rng = np.random.default_rng([seed, task, 11])
            self.table.place_hand(scenes.draw_free_hand(scene, rng))

        return self.observe()

    @property
    def where(self) -> np.ndarray:
        return self.table.position(self.scene.target).astype(np.float32)

    @property
    def qpos(self) -> np.ndarray:
        return self.table.data.qpos.astype(np.float32)

    def show(self, qpos: np.ndarray) -> Observation:
        self.table.data.qpos[:] = qpos[: len(self.qpos)]  # shards pad scenes to one length
        return self.observe()

    def observe(self) -> Observation:
        hand = [*self.table.hand, self.table.gap]
        state = [*hand, *self.where] if self.gives_position else hand

        observation: Observation = {STATE: np.array(state, np.float32), TASK: self.instruction}
        for name in self.cameras:
            camera, offset = (WRIST, self.table.hand) if name == "wrist" else (self._view.camera, 0)
            image = self._render(camera, self.config.pixels, offset)
            observation[IMAGES + name] = self._view.add_noise(image, self._noise)

        return observation

    def _render(self, camera: Camera, pixels: int, offset: np.ndarray | float = 0) -> np.ndarray:
        model = self.table.model
        data = self.table.data

        # A physics step leaves geoms where they were before it.
        mj.mj_kinematics(model, data)
        origin = offset + np.array(camera.position)
        rays = camera.rays(pixels)
        light = self._view.light

        return rendering.render_primitives(
            model,
            data,
            origin,
            rays,
            self._colors,
            light,
        )

    def picture(self, pixels: int) -> np.ndarray:
        return self._render(self._view.camera, pixels)

    def move(self, action: np.ndarray) -> tuple[bool, bool]:
        self.table.move(action)
        self.num_steps += 1
        success = self.table.is_in_bin(self.scene.target)

        return success, success or self.num_steps >= self.max_steps

    def expert(self) -> np.ndarray:
        return pick_and_place(self.table, self.scene.target)
