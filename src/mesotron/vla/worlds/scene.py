"""Scenes of the blocks worlds, functions of (seed, task). In meters, z up, the table at z = 0."""

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

Shape = Literal["cube", "can"]

_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
COLORS = _TABLES["objects"]
FURNITURE_COLORS = _TABLES["furniture"]
TRAINING_SENTENCES = _TABLES["training"]
HELD_OUT_SENTENCES = _TABLES["held_out"]
HALF_HEIGHT: dict[Shape, float] = {"cube": 0.022, "can": 0.034}
HALF_WIDTH: dict[Shape, float] = {"cube": 0.022, "can": 0.020}

# Ranges of x and y in which objects lie; the perturbation "position" uses a ring around them.
REGION = ((-0.13, 0.13), (-0.15, 0.05))
OUTER_REGION = ((-0.165, 0.165), (-0.185, 0.065))
# Open fingers reach 5.2 cm from an object's center, a neighbor's corners 3.1 cm from its own.
SPACING = 0.085
HAND_START = ((-0.12, 0.12), (-0.15, 0.10), (0.13, 0.19))
WORKSPACE = ((-0.18, 0.18), (-0.20, 0.20), (0.025, 0.20))
BIN = (0.0, 0.16)  # as in blocks.xml
BIN_HALF = (0.062, 0.055)
BIN_HEIGHT = 0.03
MAX_YAW = 0.2
MAX_TRIES = 1000


@dataclass(frozen=True)
class Object:
    """A cube or can: its color, where it stands (x, y) and its yaw in radians."""

    color: str
    shape: Shape
    place: tuple[float, float] = (0.0, 0.0)
    yaw: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.color}-{self.shape}"


@dataclass(frozen=True)
class Suite:
    """The objects of a world and how many of them a scene shows."""

    objects: tuple[Object, ...]
    min_visible: int
    max_visible: int


SUITES = {
    "blocks": Suite((Object("red", "cube"), Object("blue", "cube")), 2, 2),
    "object10": Suite(
        tuple(Object(color, shape) for shape in HALF_WIDTH for color in COLORS), 4, 6
    ),
}


@dataclass(frozen=True)
class Scene:
    objects: tuple[Object, ...]  # in random order
    target: int  # index of the object that the instruction names
    other: int  # index of the object that the wrong instruction names
    template: str  # the sentence, with a gap for the object
    hand: tuple[float, float, float]

    @property
    def instruction(self) -> str:
        target = self.objects[self.target]
        return self.template.format(f"{target.color} {target.shape}")

    def swapped(self) -> Self:
        return replace(self, target=self.other, other=self.target)


def draw_scene(
    suite: Suite, seed: int, task: int, outside: bool = False, reworded: bool = False
) -> Scene:
    rng = np.random.default_rng([seed, task])
    count = int(rng.integers(suite.min_visible, suite.max_visible + 1))
    others = [k for k in rng.permutation(len(suite.objects)) if k != task][: count - 1]
    order = rng.permutation([task, *others])
    yaws = rng.uniform(-MAX_YAW, MAX_YAW, count)
    x, y, z = (float(rng.uniform(low, high)) for low, high in HAND_START)
    wording = rng.random()

    # Last, since it takes a varying number of draws: all else is equal in a perturbed scene.
    places = _draw_places(rng, count, outside)
    objects = tuple(
        replace(suite.objects[k], place=place, yaw=float(yaw))
        for k, place, yaw in zip(order, places, yaws, strict=True)
    )

    sentences = HELD_OUT_SENTENCES if reworded else TRAINING_SENTENCES
    return Scene(
        objects,
        target=int(np.flatnonzero(order == task)[0]),
        other=int(np.flatnonzero(order == others[0])[0]),
        template=sentences[int(wording * len(sentences))],
        hand=(x, y, z),
    )


def _draw_places(rng: np.random.Generator, count: int, outside: bool) -> list[tuple[float, float]]:
    region = OUTER_REGION if outside else REGION
    while True:  # start over when a layout is stuck
        places: list[tuple[float, float]] = []
        for _ in range(MAX_TRIES):
            x, y = (float(rng.uniform(low, high)) for low, high in region)
            if outside and all(low < v < high for v, (low, high) in zip((x, y), REGION)):
                continue

            if all(np.hypot(x - a, y - b) >= SPACING for a, b in places):
                places.append((x, y))

            if len(places) == count:
                return places


def draw_free_hand(scene: Scene, rng: np.random.Generator) -> tuple[float, float, float]:
    """A position anywhere in the workspace where the open hand touches nothing."""
    while True:
        x, y, z = (float(rng.uniform(low, high)) for low, high in WORKSPACE)
        beside_bin = abs(x - BIN[0]) > BIN_HALF[0] + 0.06 or abs(y - BIN[1]) > BIN_HALF[1] + 0.03
        in_bin = z < BIN_HEIGHT + 0.02 and not beside_bin
        if not in_bin and not any(touches(item, x, y, z) for item in scene.objects):
            return x, y, z


def touches(item: Object, x: float, y: float, z: float) -> bool:
    """Whether an open hand at (x, y, z) may touch an object; right above it is free."""
    above = z > 2 * HALF_HEIGHT[item.shape] + 0.015
    return not above and np.hypot(x - item.place[0], y - item.place[1]) < SPACING
