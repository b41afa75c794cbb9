"""The scripted expert of the blocks worlds: a smooth function of what a policy can see.

It keeps no phase: a policy that imitates a hidden phase stalls between two of them (5 % success
against 100 % in our prototype). Hand, gap and the thing's place alone decide.
"""

from __future__ import annotations

import numpy as np

from mesotron.vla.worlds.scene import BIN, HALF_WIDTH
from mesotron.vla.worlds.table import REACH, Table

ABOVE = 0.09  # metres over the thing at which the hand arrives from far
FUNNEL = 2.0  # metres down for each metre nearer
ALIGNED = 0.012  # metres beside the thing at which closing may begin
CARRY = 0.108  # height at which a thing is carried
DROP = 0.085  # height over the bin at which it is let go


def ramp(x: float, start: float, stop: float) -> float:
    """0 up to `start`, 1 from `stop` on, straight between; `stop` may be the smaller one."""
    return float(np.clip((x - start) / (stop - start), 0.0, 1.0))


def pick_and_place(table: Table, thing: int) -> np.ndarray:
    """The expert's action now, float32 (4,) in [-1, 1]."""
    hand, goal = table.hand, table.position(thing)
    half = HALF_WIDTH[table.scene.things[thing].shape]
    beside = float(np.hypot(*(goal - hand)[:2]))
    in_hand = beside < 0.02 and abs(goal[2] - hand[2]) < 0.02
    if in_hand and table.gap < half + 0.003:
        return carry(hand)
    return reach(hand, goal, beside)


def reach(hand: np.ndarray, goal: np.ndarray, beside: float) -> np.ndarray:
    """Come from above through a funnel, then close."""
    height = goal[2] + np.clip(FUNNEL * (beside - ALIGNED), 0, ABOVE)
    aligned = ramp(beside, 0.015, 0.006) * ramp(abs(hand[2] - goal[2]), 0.015, 0.006)
    return towards(hand, goal, height, grip=2 * aligned - 1)


def carry(hand: np.ndarray) -> np.ndarray:
    """Lift, go over the bin, let go."""
    goal = np.array([*BIN, 0.0])
    beside = float(np.hypot(*(goal - hand)[:2]))
    height = DROP + (CARRY - DROP) * ramp(beside, 0.02, 0.05)
    return towards(hand, goal, height, grip=1 - 2 * ramp(beside, 0.025, 0.015))


def towards(hand: np.ndarray, goal: np.ndarray, height: float, grip: float) -> np.ndarray:
    """Move to a place at a height; a hand that is too low rises before it goes sideways."""
    sideways = ramp(height - hand[2], 0.05, 0.01)
    x, y = sideways * (goal - hand)[:2] / REACH
    # Along the straight line, also where the longer axis is cut to 1.
    cut = max(1.0, abs(x), abs(y))
    z = np.clip((height - hand[2]) / REACH, -1, 1)
    return np.array([x / cut, y / cut, z, grip], np.float32)
