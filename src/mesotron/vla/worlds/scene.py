"""Scenes of the blocks worlds: which things lie where, what is asked; a pure function of numbers.

A scene is drawn from (seed, task) alone, so training and evaluation are disjoint by their seeds and
every policy is evaluated on the same scenes. Lengths are in metres, z up, the table at z = 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from mesotron.vla.worlds.wording import HELD_OUT, TRAINING, put_into_words

Shape = Literal["cube", "can"]

COLOURS = {
    "red": (0.85, 0.12, 0.12),
    "blue": (0.12, 0.22, 0.90),
    "green": (0.10, 0.65, 0.15),
    "yellow": (0.95, 0.82, 0.10),
    "purple": (0.60, 0.15, 0.70),
}
HALF_HEIGHT: dict[Shape, float] = {"cube": 0.022, "can": 0.034}
HALF_WIDTH: dict[Shape, float] = {"cube": 0.022, "can": 0.020}

# Where things lie (x, then y), and where they lie when positions are perturbed: a ring around it.
REGION = ((-0.13, 0.13), (-0.15, 0.05))
OUTER_REGION = ((-0.165, 0.165), (-0.185, 0.065))
# Open fingers stand 5.2 cm from a thing's middle and must not touch the next one, 3.1 cm at most
# from its own middle to a corner.
SPACING = 0.085
HAND_START = ((-0.12, 0.12), (-0.15, 0.10), (0.13, 0.19))
WORKSPACE = ((-0.18, 0.18), (-0.20, 0.20), (0.025, 0.20))
BIN = (0.0, 0.16)
BIN_HALF = (0.062, 0.055)
BIN_HEIGHT = 0.03
MOST_YAW = 0.2
TRIES = 1000


@dataclass(frozen=True)
class Thing:
    """One object: its colour and shape, where it stands (x, y) and how it is turned (radians)."""

    colour: str
    shape: Shape
    place: tuple[float, float] = (0.0, 0.0)
    yaw: float = 0.0

    @property
    def name(self) -> str:
        """Colour and shape, as tasks are named: red-cube."""
        return f"{self.colour}-{self.shape}"

    @property
    def words(self) -> str:
        """Colour and shape, as instructions say it."""
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Suite:
    """Which things there are, and how many are in view at least and at most."""

    things: tuple[Thing, ...]
    least: int
    most: int


SUITES = {
    "blocks": Suite((Thing("red", "cube"), Thing("blue", "cube")), 2, 2),
    "object10": Suite(
        tuple(Thing(colour, shape) for shape in HALF_WIDTH for colour in COLOURS), 4, 6
    ),
}


@dataclass(frozen=True)
class Scene:
    """What an episode begins with.

    Args:
        things: on the table, in a random order.
        target: index of the thing that is asked for.
        other: index of the thing that a wrong instruction asks for.
        template: the sentence, with a gap for the thing.
        hand: position of the hand.
    """

    things: tuple[Thing, ...]
    target: int
    other: int
    template: str
    hand: tuple[float, float, float]

    @property
    def instruction(self) -> str:
        """What is asked."""
        return put_into_words(self.template, self.things[self.target].words)

    @property
    def wrong_instruction(self) -> str:
        """The same sentence about another thing that is in view."""
        return put_into_words(self.template, self.things[self.other].words)

    def swapped(self) -> Scene:
        """The same table, asked for the other thing."""
        return replace(self, target=self.other, other=self.target)


def draw_scene(
    suite: Suite, seed: int, task: int, outside: bool = False, reworded: bool = False
) -> Scene:
    """Draw the scene of (seed, task).

    Args:
        suite: the things to choose from.
        seed: of the scene.
        task: index of the thing that is asked for.
        outside: put things on the ring around the usual region.
        reworded: take a sentence that training never has.

    Example:
        >>> scene = draw_scene(SUITES["object10"], seed=3, task=7)
        >>> scene.things[scene.target].name
        'green-can'
        >>> 4 <= len(scene.things) <= 6
        True
    """
    rng = np.random.default_rng([seed, task])
    count = int(rng.integers(suite.least, suite.most + 1))
    others = [k for k in rng.permutation(len(suite.things)) if k != task][: count - 1]
    order = rng.permutation([task, *others])
    yaws = rng.uniform(-MOST_YAW, MOST_YAW, count)
    hand = tuple(float(rng.uniform(low, high)) for low, high in HAND_START)
    wording = rng.random()
    # Last, since it takes as many numbers as it needs: a perturbed scene is else the same.
    places = draw_places(rng, count, outside)
    things = tuple(
        replace(suite.things[k], place=place, yaw=float(yaw))
        for k, place, yaw in zip(order, places, yaws, strict=True)
    )
    sentences = HELD_OUT if reworded else TRAINING
    return Scene(
        things,
        target=int(np.flatnonzero(order == task)[0]),
        other=int(np.flatnonzero(order == others[0])[0]),
        template=sentences[int(wording * len(sentences))],
        hand=(hand[0], hand[1], hand[2]),
    )


def draw_places(rng: np.random.Generator, count: int, outside: bool) -> list[tuple[float, float]]:
    """Places at least SPACING apart; a layout that has got stuck is begun again."""
    region = OUTER_REGION if outside else REGION
    while True:
        places: list[tuple[float, float]] = []
        for _ in range(TRIES):
            x, y = (float(rng.uniform(low, high)) for low, high in region)
            if outside and all(low < v < high for v, (low, high) in zip((x, y), REGION)):
                continue
            if all(np.hypot(x - a, y - b) >= SPACING for a, b in places):
                places.append((x, y))
            if len(places) == count:
                return places


def scatter_hand(scene: Scene, rng: np.random.Generator) -> tuple[float, float, float]:
    """A place for the open hand anywhere in the workspace where it touches nothing."""
    while True:
        x, y, z = (float(rng.uniform(low, high)) for low, high in WORKSPACE)
        near = [thing for thing in scene.things if touches(thing, x, y, z)]
        if not near and not over_bin(x, y, z):
            return x, y, z


def touches(thing: Thing, x: float, y: float, z: float) -> bool:
    """Whether an open hand there may touch a thing; right above it is free."""
    above = z > 2 * HALF_HEIGHT[thing.shape] + 0.015
    return not above and np.hypot(x - thing.place[0], y - thing.place[1]) < SPACING


def over_bin(x: float, y: float, z: float) -> bool:
    """Whether an open hand there may touch the bin's walls."""
    beside = abs(x - BIN[0]) > BIN_HALF[0] + 0.06 or abs(y - BIN[1]) > BIN_HALF[1] + 0.03
    return z < BIN_HEIGHT + 0.02 and not beside
