"""What worlds, demonstrations, policies and evaluation know of each other; numpy only.

An observation is a dictionary with LeRobot's key names: "observation.images.front" uint8 (H, W, 3),
"observation.state" float32 (S,) and "task", the instruction as text. Actions lie in [-1, 1].

Legend: N actions on record, M observations on record, B observations at once, K actions of a chunk,
A numbers of an action, S numbers of a state, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from mesotron.config import WorldConfig
from mesotron.rlvr.scores import Score, wilson
from mesotron.runs.folder import plain

Observation = dict[str, Any]
Act = Callable[[list[Observation]], np.ndarray]
"""A policy: B observations to actions (B, K, A)."""

STATE = "observation.state"
TASK = "task"
IMAGES = "observation.images."

# Scenes are numbers. Training, evaluation and the choice of settings never share one.
EVAL_SEED = 1_000_000
VALIDATION_SEED = 2_000_000


class Step(NamedTuple):
    """What an action has led to; `done` after success or when time is up."""

    observation: Observation
    success: bool
    done: bool


class World(Protocol):
    """A simulator with language: one episode at a time, repeatable from (seed, task)."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks, in order; `reset` takes the index."""
        ...

    @property
    def cameras(self) -> tuple[str, ...]:
        """Names of the images in an observation: "front" is "observation.images.front"."""
        ...

    @property
    def state_dim(self) -> int:
        """S."""
        ...

    @property
    def action_dim(self) -> int:
        """A."""
        ...

    @property
    def max_steps(self) -> int:
        """Actions after which an episode has failed: twice what the expert's longest took."""
        ...

    @property
    def is_paired(self) -> bool:
        """Whether a scene can be asked for something else (`swap`) and the hand put anywhere."""
        ...

    @property
    def num_steps(self) -> int:
        """Actions taken in this episode."""
        ...

    @property
    def instruction(self) -> str:
        """What is asked in this episode."""
        ...

    @property
    def wrong_instruction(self) -> str:
        """Another instruction that the same picture would allow."""
        ...

    @property
    def where(self) -> np.ndarray:
        """Position of what the instruction is about, float32 (3,) in metres; never observed."""
        ...

    @property
    def qpos(self) -> np.ndarray:
        """The simulator's joint positions, float32: with seed and task enough to draw the frame."""
        ...

    def reset(self, seed: int, task: int, swap: bool = False, scatter: bool = False) -> Observation:
        """Begin the episode of a scene.

        Args:
            seed: of the scene.
            task: index into `tasks`.
            swap: the same scene, but asked for what `wrong_instruction` says.
            scatter: put the hand anywhere instead of where episodes begin.
        """
        ...

    def show(self, qpos: np.ndarray) -> Observation:
        """What is seen in a recorded state of this episode's scene."""
        ...

    def picture(self, pixels: int) -> np.ndarray:
        """An image for people, uint8 (pixels, pixels, 3), whatever the policy is given."""
        ...

    def observe(self) -> Observation:
        """What is seen now."""
        ...

    def move(self, action: np.ndarray) -> tuple[bool, bool]:
        """Take one action, (A,), without looking; returns whether it succeeded and is done."""
        ...

    def step(self, action: np.ndarray) -> Step:
        """Take one action, (A,), and look."""
        ...

    def advance(self, actions: np.ndarray) -> Step:
        """Take several, (K, A), until done; only the last observation is made."""
        ...

    def expert(self) -> np.ndarray:
        """What the scripted expert does now, float32 (A,), by the world's true state."""
        ...


@dataclass
class Demos:
    """Demonstrations: what was seen, what the expert did then, and what it did after that.

    Args:
        images: camera to uint8 (M, H, W, 3).
        state: float32 (M, S).
        task_index: int64 (M,), into `tasks`.
        tasks: the instructions as texts.
        start: int64 (M,), the row of `action` that answers each observation.
        action: float32 (N, A).
        episode_index: int64 (N,); the rows of an episode follow each other.
        frame_index: int64 (N,), counted from 0 in each episode.
        where: float32 (M, 3), position of what is asked for, or None; privileged, never an input.
        world: which world made them; None for recordings from elsewhere.
        fps: actions a second.
    """

    images: dict[str, np.ndarray]
    state: np.ndarray
    task_index: np.ndarray
    tasks: list[str]
    start: np.ndarray
    action: np.ndarray
    episode_index: np.ndarray
    frame_index: np.ndarray
    where: np.ndarray | None = None
    world: WorldConfig | None = None
    fps: float = 20.0

    def __len__(self) -> int:
        return len(self.start)

    def chunks(self, rows: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """The actions that follow some observations.

        Args:
            rows: int (B,), which observations.
            size: K.

        Returns:
            Actions float32 (B, K, A) and bool (B, K), False where the episode is over; the action
            there repeats its last.

        Example:
            >>> from mesotron.vla.interface import Demos
            >>> two = np.array([0, 1])
            >>> demos = Demos({}, np.zeros((2, 1)), two * 0, ["go"], two, np.array([[1.], [2.]]),
            ...               two * 0, two)
            >>> actions, real = demos.chunks(np.array([1]), size=2)
            >>> actions.tolist(), real.tolist()
            ([[[2.0], [2.0]]], [[True, False]])
        """
        first = self.start[rows][:, None]
        follow = first + np.arange(size)
        inside = np.minimum(follow, len(self.action) - 1)
        real = (follow == inside) & (self.episode_index[inside] == self.episode_index[first])
        last = first + real.sum(axis=1, keepdims=True) - 1
        return self.action[np.minimum(follow, last)], real


@dataclass(frozen=True)
class Episode:
    """How one evaluated episode went; `error` is what it raised, and then it has failed."""

    task: str
    seed: int
    success: bool
    steps: int
    error: str = ""


@dataclass
class EvalResult:
    """Success over seeded episodes of each task.

    Args:
        world: where.
        episodes: in the order of tasks, then seeds.
        control: "" for the policy asked rightly, else what was changed: "wrong instruction",
            "expert".
        frames: uint8 (T, H, W, 3) of the first few successes and failures, by (task, seed).
    """

    world: WorldConfig
    episodes: list[Episode]
    control: str = ""
    frames: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)

    @property
    def success(self) -> float:
        """Share of all episodes that succeeded."""
        return sum(episode.success for episode in self.episodes) / len(self.episodes)

    @property
    def by_task(self) -> dict[str, tuple[int, int]]:
        """Task to (successes, episodes)."""
        counts: dict[str, tuple[int, int]] = {}
        for episode in self.episodes:
            right, total = counts.get(episode.task, (0, 0))
            counts[episode.task] = (right + episode.success, total + 1)
        return counts

    @property
    def score(self) -> Score:
        """Success over all episodes with its 95 % interval (Wilson)."""
        return wilson(sum(episode.success for episode in self.episodes), len(self.episodes))

    def to_json(self) -> dict[str, Any]:
        """Everything but the frames, as JSON holds it."""
        scores = {task: wilson(*counts) for task, counts in self.by_task.items()}
        return {
            "world": plain(self.world),
            "control": self.control,
            "success": plain(self.score),
            "tasks": {
                task: {"successes": right, "episodes": total, **plain(scores[task])}
                for task, (right, total) in self.by_task.items()
            },
            "episodes": [plain(episode) for episode in self.episodes],
        }


def stack_images(observations: Sequence[Observation], camera: str) -> np.ndarray:
    """One camera's images of B observations, uint8 (B, H, W, 3)."""
    return np.stack([seen[IMAGES + camera] for seen in observations])
