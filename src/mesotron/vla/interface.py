"""Interfaces between worlds, demonstrations, policies and evaluation; numpy only.

An observation is a dictionary with LeRobot's keys: "observation.images.front" uint8 (H, W, 3),
"observation.state" float32 (S,) and "task", the instruction as text. Actions lie in [-1, 1].

Legend: N actions, M observations, B batch, K actions per chunk, A action size, S state size.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mesotron.config import WorldConfig
from mesotron.config.base import to_plain
from mesotron.evaluate.scores import Score, wilson

Observation = dict[str, Any]
Act = Callable[[list[Observation]], np.ndarray]
"""A policy: B observations to actions (B, K, A)."""

STATE = "observation.state"
TASK = "task"
IMAGES = "observation.images."

# Scenes are seeds. Training, evaluation and model selection never share one.
EVAL_SEED = 1_000_000
MAX_EPISODES = 10**8
VALIDATION_SEED = 2_000_000


class Step(NamedTuple):
    observation: Observation
    success: bool
    done: bool  # after success or when time is up


class World(ABC):
    """A simulator with language: one episode at a time, reproducible from (seed, task)."""

    tasks: tuple[str, ...]  # names; `reset` takes the index
    cameras: tuple[str, ...]  # of the images: "front" is "observation.images.front"
    state_dim: int
    action_dim: int
    max_steps: int  # actions after which an episode has failed: twice the expert's longest episode
    is_paired: bool  # whether `reset` supports `swap` and `scatter`
    num_steps: int  # actions taken in this episode
    instruction: str  # of this episode
    wrong_instruction: str  # another one that the same image would allow

    @property
    @abstractmethod
    def where(self) -> np.ndarray:
        """Position of the object that the instruction names, float32 (3,), meters; not observed."""

    @property
    @abstractmethod
    def qpos(self) -> np.ndarray:
        """The simulator's joint positions, float32: with seed and task enough to render a frame."""

    @abstractmethod
    def reset(self, seed: int, task: int, swap: bool = False, scatter: bool = False) -> Observation:
        """Start an episode."""

    @abstractmethod
    def observe(self) -> Observation:
        """The current observation."""

    @abstractmethod
    def show(self, qpos: np.ndarray) -> Observation:
        """The observation of a recorded state of this episode's scene."""

    @abstractmethod
    def picture(self, pixels: int) -> np.ndarray:
        """An image for people, uint8 (pixels, pixels, 3), whatever the policy observes."""

    @abstractmethod
    def expert(self) -> np.ndarray:
        """The scripted expert's action, float32 (A,), from the true state."""

    @abstractmethod
    def move(self, action: np.ndarray) -> tuple[bool, bool]:
        """Take one action, (A,), without rendering; returns success and done."""

    def step(self, action: np.ndarray) -> Step:
        """Take one action, (A,), and observe."""
        return self.advance(action[None])

    def advance(self, actions: np.ndarray) -> Step:
        """Take several actions, (K, A), until done; observe only at the end."""
        success = False
        done = False
        for action in actions:
            success, done = self.move(action)
            if done:
                break

        return Step(self.observe(), success, done)


def check_tasks(config: WorldConfig, known: Collection[str]) -> None:
    unknown = sorted(set(config.tasks).difference(known))
    if unknown:
        raise ValueError(f"{config.name} has no task {unknown[0]!r}: use {', '.join(known)}")


@dataclass
class Demos:
    """Demonstrations: observations, and the expert's actions from each of them on."""

    images: dict[str, np.ndarray]  # camera to uint8 (M, H, W, 3)
    state: np.ndarray  # float32 (M, S)
    task_index: np.ndarray  # int64 (M,), into `tasks`
    tasks: list[str]  # the instructions
    start: np.ndarray  # int64 (M,), row of `action` taken at each observation
    action: np.ndarray  # float32 (N, A)
    episode_index: np.ndarray  # int64 (N,); rows of an episode are contiguous
    frame_index: np.ndarray  # int64 (N,), from 0 in each episode
    where: np.ndarray | None = None  # float32 (M, 3), the named object; never an input
    world: WorldConfig | None = None  # None for recordings from elsewhere
    fps: float = 20.0

    def __len__(self) -> int:
        return len(self.start)

    def check(self) -> None:
        """Refuse arrays that do not fit each other: they may come from damaged files."""
        where = [] if self.where is None else [self.where]
        of_observations = (self.start, self.state, self.task_index, *self.images.values(), *where)
        of_actions = (self.action, self.episode_index, self.frame_index)

        fits = (
            have_equal_lengths(of_observations)
            and have_equal_lengths(of_actions)
            and is_index(self.start, len(self.action))
            and is_index(self.task_index, len(self.tasks))
            and is_index(self.episode_index, MAX_EPISODES)
            and all(array.ndim == 2 for array in (self.state, self.action, *where))
            and all(map(are_images, self.images.values()))
        )
        if not fits:
            raise ValueError("its arrays do not fit each other")

        for name in ("state", "action"):
            if not np.isfinite(getattr(self, name)).all():
                raise ValueError(f"NaN or infinity in {name}")

    def chunks(self, rows: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """The next K = `size` actions from the observations `rows`, int (B,), on."""
        first = self.start[rows][:, None]
        follow = first + np.arange(size)
        inside = np.minimum(follow, len(self.action) - 1)
        real = (follow == inside) & (self.episode_index[inside] == self.episode_index[first])
        last = first + real.sum(axis=1, keepdims=True) - 1

        return self.action[np.minimum(follow, last)], real


def have_equal_lengths(arrays: Sequence[np.ndarray]) -> bool:
    return len({len(array) for array in arrays}) == 1


def is_index(array: np.ndarray, size: int) -> bool:
    return array.dtype.kind in "iu" and 0 <= array.min() <= array.max() < size


def are_images(array: np.ndarray) -> bool:
    return array.dtype == np.uint8 and array.shape[3:] == (3,)


@dataclass(frozen=True)
class Episode:
    task: str
    seed: int
    success: bool
    steps: int
    error: str = ""  # the exception of an episode that raised, which has failed


@dataclass
class EvalResult:
    """Success over seeded episodes of each task."""

    world: WorldConfig
    episodes: list[Episode]  # in order of tasks, then seeds
    control: str = ""  # or "wrong instruction" or "expert"
    # uint8 (T, H, W, 3) of recorded episodes, by (task, seed).
    frames: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)

    @property
    def success(self) -> float:
        return sum(episode.success for episode in self.episodes) / len(self.episodes)

    @property
    def by_task(self) -> dict[str, tuple[int, int]]:
        totals = Counter(episode.task for episode in self.episodes)
        wins = Counter(episode.task for episode in self.episodes if episode.success)
        return {task: (wins[task], total) for task, total in totals.items()}

    @property
    def score(self) -> Score:
        """Success with its 95% Wilson interval."""
        return wilson(sum(episode.success for episode in self.episodes), len(self.episodes))

    def to_json(self) -> dict[str, Any]:
        """Everything but the frames."""
        tasks = {}
        for task, (wins, total) in self.by_task.items():
            tasks[task] = {"successes": wins, "episodes": total, **to_plain(wilson(wins, total))}

        return {
            "world": to_plain(self.world),
            "control": self.control,
            "success": to_plain(self.score),
            "tasks": tasks,
            "episodes": [to_plain(episode) for episode in self.episodes],
        }
