"""The physics of the blocks worlds: a table, a bin, things and a two-finger hand, in MuJoCo.

The hand moves on three servos and its fingers on two more; nothing is attached to what it grasps,
friction alone holds it. Only primitive shapes, so that a ray is cast in nanoseconds.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mesotron.vla.worlds.engine import Model, mj
from mesotron.vla.worlds.scene import (
    BIN,
    BIN_HALF,
    BIN_HEIGHT,
    HALF_HEIGHT,
    HALF_WIDTH,
    WORKSPACE,
    Scene,
    Shape,
)

TIMESTEP = 0.005  # seconds
SUBSTEPS = 10  # physics steps of one action
REACH = 0.03  # metres that an action of 1 moves the hand
OPEN = 0.040  # half the gap between open fingers
FINGER = (0.006, 0.012, 0.032)  # half sizes; a finger reaches 1.2 cm below the grasp point
WALL = 0.004  # half the thickness of the bin's walls
HAND_DOFS = 5
LOW, HIGH = (np.array(ends) for ends in zip(*WORKSPACE))


def thing_xml(number: int, shape: Shape) -> str:
    """A loose body; its colour is the renderer's business."""
    w, h = HALF_WIDTH[shape], HALF_HEIGHT[shape]
    geom = f'"box" size="{w} {w} {h}"' if shape == "cube" else f'"cylinder" size="{w} {h}"'
    return (
        f'<body name="thing{number}"><freejoint/><geom name="thing{number}" type={geom}'
        ' mass="0.05" condim="4" friction="1.2 0.02 0.001"/></body>'
    )


def bin_xml() -> str:
    """A floor and four walls."""
    (x, y), (a, b), h = BIN, BIN_HALF, BIN_HEIGHT / 2
    boxes = {
        "bin_floor": (x, y, 0.001, a, b, 0.001),
        "bin_left": (x - a, y, h, WALL, b + WALL, h),
        "bin_right": (x + a, y, h, WALL, b + WALL, h),
        "bin_front": (x, y - b, h, a + WALL, WALL, h),
        "bin_back": (x, y + b, h, a + WALL, WALL, h),
    }
    return "".join(
        f'<geom name="{name}" type="box" pos="{p} {q} {r}" size="{u} {v} {w}"/>'
        for name, (p, q, r, u, v, w) in boxes.items()
    )


def hand_xml() -> str:
    """Palm and fingers on slides; the body's origin is the point between the fingertips."""
    slides = "".join(
        f'<joint name="hand_{axis}" type="slide" axis="{vector}"/>'
        for axis, vector in (("x", "1 0 0"), ("y", "0 1 0"), ("z", "0 0 1"))
    )
    fingers = "".join(
        f'<body name="{side}" gravcomp="1"><joint name="{side}" type="slide" axis="{sign} 0 0"'
        f' range="0 {OPEN}" limited="true"/>'
        f'<geom name="{side}" type="box" pos="{sign * FINGER[0]} 0 0.02" mass="0.05" condim="4"'
        f' size="{" ".join(map(str, FINGER))}" friction="1.8 0.02 0.001"/></body>'
        for side, sign in (("finger_left", -1), ("finger_right", 1))
    )
    return (
        f'<body name="hand" gravcomp="1">{slides}'
        '<geom name="palm" type="box" pos="0 0 0.064" size="0.055 0.018 0.012" mass="1"/>'
        f"{fingers}</body>"
    )


def servos_xml() -> str:
    """Stiff and critically damped, with a limited force: jerks would tear a thing from the hand."""
    hand = "".join(
        f'<position joint="hand_{axis}" kp="8000" kv="190" forcerange="-80 80"/>'
        for axis in ("x", "y", "z")
    )
    fingers = "".join(
        f'<position joint="{side}" kp="400" kv="20" forcerange="-10 10"/>'
        for side in ("finger_left", "finger_right")
    )
    return hand + fingers


@lru_cache(maxsize=128)
def compile_table(shapes: tuple[Shape, ...]) -> Model:
    """The model of a table with these things; compiled once, never changed."""
    things = "".join(thing_xml(k, shape) for k, shape in enumerate(shapes))
    return mj.MjModel.from_xml_string(
        f'<mujoco><option timestep="{TIMESTEP}" integrator="implicitfast" cone="elliptic"'
        ' impratio="5"/><default>'
        '<geom solref="0.01 1" solimp="0.95 0.99 0.001"/></default><worldbody>'
        '<geom name="table" type="plane" size="1 1 0.1" friction="1 0.02 0.001"/>'
        f"{bin_xml()}{hand_xml()}{things}</worldbody><actuator>{servos_xml()}</actuator></mujoco>"
    )


class Table:
    """One episode's physics.

    Args:
        scene: what stands on it.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.model = compile_table(tuple(thing.shape for thing in scene.things))
        self.data = mj.MjData(self.model)
        for k, thing in enumerate(scene.things):
            start = HAND_DOFS + 7 * k
            upright = np.cos(thing.yaw / 2), 0.0, 0.0, np.sin(thing.yaw / 2)
            self.data.qpos[start : start + 7] = (*thing.place, HALF_HEIGHT[thing.shape], *upright)
        self.place_hand(scene.hand)

    def place_hand(self, position: tuple[float, float, float]) -> None:
        """Put the open hand somewhere, at rest."""
        self.data.qpos[:HAND_DOFS] = (*position, OPEN, OPEN)
        self.data.qvel[:HAND_DOFS] = 0
        mj.mj_forward(self.model, self.data)

    def set_qpos(self, qpos: np.ndarray) -> None:
        """Take up a recorded state, for rendering."""
        self.data.qpos[:] = qpos
        mj.mj_kinematics(self.model, self.data)

    @property
    def hand(self) -> np.ndarray:
        """The point between the fingertips, (3,)."""
        return self.data.qpos[:3].copy()

    @property
    def gap(self) -> float:
        """Half the distance between the fingers."""
        return float(self.data.qpos[3] + self.data.qpos[4]) / 2

    def position(self, thing: int) -> np.ndarray:
        """The middle of a thing, (3,)."""
        start = HAND_DOFS + 7 * thing
        return self.data.qpos[start : start + 3].copy()

    def move(self, action: np.ndarray) -> None:
        """Move the hand by 3 cm times the first three numbers; the fourth closes the fingers.

        Args:
            action: (4,), clipped to [-1, 1]; the fourth is -1 for open, 1 for closed.
        """
        x = np.clip(action, -1, 1)
        self.data.ctrl[:3] = np.clip(self.hand + REACH * x[:3], LOW, HIGH)
        self.data.ctrl[3:] = OPEN * (1 - x[3]) / 2
        mj.mj_step(self.model, self.data, SUBSTEPS)

    def is_in_bin(self, thing: int) -> bool:
        """Whether a thing lies in the bin and the fingers have let go of it."""
        x, y, z = self.position(thing)
        inside = abs(x - BIN[0]) < BIN_HALF[0] and abs(y - BIN[1]) < BIN_HALF[1]
        shape = self.scene.things[thing].shape
        low = z < HALF_HEIGHT[shape] + 0.015
        return bool(inside and low and self.gap > HALF_WIDTH[shape] + 0.005)
