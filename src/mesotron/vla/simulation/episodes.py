"""Episodes of one process: worlds kept in slots, begun, advanced by chunks of actions, recorded.

Called by `rollout` in worker processes, by `module:function`. An episode that raises has failed;
the error is kept, and the world is built anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mesotron.config import WorldConfig
from mesotron.vla.interface import TASK, Observation, Step, World
from mesotron.vla.worlds import build_world

PICTURE = 128  # pixels of a frame that people look at


@dataclass(frozen=True)
class Job:
    """An episode to play: where in a wave it sits, what it is, whether a wrong thing is asked."""

    slot: int
    seed: int
    task: int
    wrong: bool = False
    record: bool = False


class Played(NamedTuple):
    """An episode after some actions; without an observation once it is over."""

    slot: int
    observation: Observation | None
    success: bool
    done: bool
    steps: int
    error: str = ""
    frames: np.ndarray | None = None


@dataclass
class Live:
    """An episode that is being played."""

    job: Job
    world: World
    steps: int = 0
    frames: list[np.ndarray] = field(default_factory=list)

    def seen(self, observation: Observation) -> Observation:
        """What the policy is given: the observation, perhaps with a wrong instruction."""
        return observation | {TASK: self.world.wrong_instruction} if self.job.wrong else observation

    def play(self, actions: np.ndarray) -> Step:
        """Take actions (K, A) until done; one by one where each is to be recorded."""
        if not self.job.record:
            return self.world.advance(actions)
        step = self.world.step(actions[0])
        self.picture()
        return step if step.done or len(actions) == 1 else self.play(actions[1:])

    def picture(self) -> None:
        """Keep a frame for people, if they asked for it."""
        if self.job.record:
            self.frames.append(self.world.picture(PICTURE))


_worlds: dict[tuple[WorldConfig, int], World] = {}
_live: dict[int, Live] = {}


def begin(config: WorldConfig, jobs: list[Job]) -> list[Played]:
    """Begin episodes, each in the world of its slot."""
    return [begin_one(config, job) for job in jobs]


def begin_one(config: WorldConfig, job: Job) -> Played:
    """Begin one episode; a world that cannot be built is an error, one that cannot begin is not."""
    key = config, job.slot
    if key not in _worlds:
        _worlds[key] = build_world(config)
    live = _live[job.slot] = Live(job, _worlds[key])
    try:
        seen = live.seen(live.world.reset(job.seed, job.task))
        live.picture()
    except Exception as error:
        return fail(config, live, error)
    return Played(job.slot, seen, success=False, done=False, steps=0)


def advance(config: WorldConfig, chunks: list[tuple[int, np.ndarray]]) -> list[Played]:
    """Play (slot, actions (K, A)) on; only the last observation of each is made."""
    return [advance_one(config, _live[slot], actions) for slot, actions in chunks]


def advance_one(config: WorldConfig, live: Live, actions: np.ndarray) -> Played:
    """Play one episode on."""
    try:
        step = live.play(actions)
    except Exception as error:
        return fail(config, live, error)
    live.steps = live.world.num_steps
    if step.done:
        return finish(live, step.success)
    return Played(live.job.slot, live.seen(step.observation), step.success, False, live.steps)


def fail(config: WorldConfig, live: Live, error: Exception) -> Played:
    """An episode that raised; its world may be broken and is not used again."""
    _worlds.pop((config, live.job.slot), None)
    return finish(live, success=False, error=f"{type(error).__name__}: {error}")


def finish(live: Live, success: bool, error: str = "") -> Played:
    """The end of an episode."""
    frames = np.stack(live.frames) if live.frames else None
    return Played(live.job.slot, None, success, True, live.steps, error, frames)


def play_expert(config: WorldConfig, job: Job) -> Played:
    """Let the scripted expert play a whole episode."""
    begun = begin_one(config, job)
    if begun.done:
        return begun
    live = _live[job.slot]
    while True:
        played = advance_one(config, live, live.world.expert()[None])
        if played.done:
            return played


@contextmanager
def forgetting() -> Iterator[None]:
    """Let go of this process's worlds at the end, however it comes."""
    try:
        yield
    finally:
        _worlds.clear()
        _live.clear()
