"""Success of a policy over seeded episodes of a world's tasks.

Episodes are played in waves: one call of the policy answers all live episodes, simulation runs in
worker processes, whose number does not change the result. An episode that raises has failed.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mesotron.config import WorldConfig
from mesotron.runs.workers import ONE_THREAD, WorkerPool, num_cores
from mesotron.vla.interface import TASK, Act, Episode, EvalResult, Observation, Step, World
from mesotron.vla.worlds import build_world

HERE = "mesotron.vla.rollout"
FRAME_PIXELS = 128  # of a recorded frame


def evaluate(  # noqa: PLR0913  # settings by name
    act: Act,
    world: WorldConfig,
    seeds: Sequence[int],
    *,
    execute: int = 4,
    workers: int | None = None,
    wrong: bool = False,
    frames: int = 0,
    batch: int = 64,
) -> EvalResult:
    """Play every task on every seed with a policy."""
    tasks = build_world(world).tasks
    jobs = _list_jobs(tasks, seeds, wrong, frames, batch)
    if execute < 1:
        raise ValueError(f"execute={execute} must be at least 1")

    ends: list[EpisodeState] = []
    with simulation_pool(workers) as pool:
        for start in range(0, len(jobs), batch):
            wave = jobs[start : start + batch]
            ends += _play_wave(act, world, wave, pool, execute)

    return _summarize(world, tasks, ends, "wrong instruction" if wrong else "")


def evaluate_expert(
    world: WorldConfig, seeds: Sequence[int], *, workers: int | None = None, frames: int = 0
) -> EvalResult:
    """Play the same episodes with the scripted expert: an upper bound."""
    tasks = build_world(world).tasks
    jobs = _list_jobs(tasks, seeds, False, frames, batch=1)
    with simulation_pool(workers) as pool:
        ends = dict(pool.map(f"{HERE}:play_expert", [(world, job) for job in jobs]))

    return _summarize(world, tasks, [ends[k] for k in range(len(jobs))], "expert")


@contextmanager
def simulation_pool(workers: int | None) -> Iterator[WorkerPool]:
    """Processes that simulate, without torch; None for one per core, 1 to use this process."""
    num = num_cores() if workers is None else workers
    pool = WorkerPool(0 if num == 1 else num, env={**os.environ, **ONE_THREAD})
    try:
        with pool:
            yield pool
    finally:  # drop what was simulated in this process
        _worlds.clear()
        _live.clear()


class EpisodeJob(NamedTuple):
    slot: int
    seed: int
    task: int
    wrong: bool = False
    record: bool = False


class EpisodeState(NamedTuple):
    """An episode after some actions; the observation is None once it is done."""

    job: EpisodeJob
    observation: Observation | None
    success: bool
    steps: int
    error: str = ""
    frames: np.ndarray | None = None


def _list_jobs(
    tasks: tuple[str, ...], seeds: Sequence[int], wrong: bool, frames: int, batch: int
) -> list[EpisodeJob]:
    jobs = []
    for task in range(len(tasks)):
        for place, seed in enumerate(seeds):
            slot = len(jobs) % batch
            jobs.append(EpisodeJob(slot, seed, task, wrong, record=place < frames))

    return jobs


def _play_wave(
    act: Act, world: WorldConfig, jobs: list[EpisodeJob], pool: WorkerPool, execute: int
) -> list[EpisodeState]:
    """Play some episodes side by side until all are done."""
    states = _call_workers(pool, "begin", world, {job.slot: job for job in jobs})
    live = _live_observations(states)

    while live:
        actions = np.asarray(act(list(live.values())))
        if actions.ndim != 3 or len(actions) != len(live) or actions.shape[1] < execute:
            needed = f"({len(live)}, chunk of {execute} or more, action)"
            raise ValueError(f"execute={execute} needs actions {needed}, not shape {actions.shape}")

        chunks = {}
        for slot, chunk in zip(live, actions[:, :execute], strict=True):
            chunks[slot] = (slot, chunk)

        advanced = _call_workers(pool, "advance", world, chunks)
        states |= advanced
        live = _live_observations(advanced)

    return [states[job.slot] for job in jobs]


def _call_workers(
    pool: WorkerPool, function: str, world: WorldConfig, items: dict[int, Any]
) -> dict[int, EpisodeState]:
    """Call a function of this file with the items by slot, each in the worker of its slot."""
    num = max(1, pool.num_workers)
    shares: list[list[Any]] = [[] for _ in range(num)]
    for slot, item in items.items():
        shares[slot % num].append(item)

    arguments = [(world, share) if share else None for share in shares]
    states = {}
    for answer in pool.each(f"{HERE}:{function}", arguments):
        for state in answer or ():
            states[state.job.slot] = state

    return states


def _live_observations(states: dict[int, EpisodeState]) -> dict[int, Observation]:
    live = {}
    for slot in sorted(states):
        observation = states[slot].observation
        if observation:
            live[slot] = observation

    return live


def _summarize(
    world: WorldConfig, tasks: tuple[str, ...], ends: list[EpisodeState], control: str
) -> EvalResult:
    result = EvalResult(world, [], control)
    for end in ends:
        task = tasks[end.job.task]
        seed = end.job.seed
        result.episodes.append(Episode(task, seed, end.success, end.steps, end.error))
        if end.frames is not None:
            result.frames[task, seed] = end.frames

    return result


# In the workers: worlds and live episodes of this process, by slot.


@dataclass
class _LiveEpisode:
    job: EpisodeJob
    world: World
    steps: int = 0
    frames: list[np.ndarray] = field(default_factory=list)

    def play(self, actions: np.ndarray) -> Step:
        if not self.job.record:
            return self.world.advance(actions)

        step = self.world.step(actions[0])
        self.frames.append(self.world.picture(FRAME_PIXELS))
        if step.done or len(actions) == 1:
            return step

        return self.play(actions[1:])

    def end(self, success: bool, error: str = "") -> EpisodeState:
        frames = np.stack(self.frames) if self.frames else None
        return EpisodeState(self.job, None, success, self.steps, error, frames)


_worlds: dict[tuple[WorldConfig, int], World] = {}
_live: dict[int, _LiveEpisode] = {}


def begin(config: WorldConfig, jobs: list[EpisodeJob]) -> list[EpisodeState]:
    for job in jobs:
        key = config, job.slot
        if key not in _worlds:
            _worlds[key] = build_world(config)
        _live[job.slot] = _LiveEpisode(job, _worlds[key])

    return advance(config, [(job.slot, None) for job in jobs])


def advance(
    config: WorldConfig, chunks: Sequence[tuple[int, np.ndarray | None]]
) -> list[EpisodeState]:
    """Take the actions (K, A) of each (slot, actions); None starts the episode."""
    return [_advance_one(config, _live[slot], actions) for slot, actions in chunks]


def play_expert(config: WorldConfig, job: EpisodeJob) -> EpisodeState:
    [state] = begin(config, [job])
    while state.observation is not None:
        live = _live[job.slot]
        state = _advance_one(config, live, live.world.expert()[None])

    return state


def _advance_one(
    config: WorldConfig, live: _LiveEpisode, actions: np.ndarray | None
) -> EpisodeState:
    job = live.job
    world = live.world
    try:
        if actions is None:
            step = Step(world.reset(job.seed, job.task), success=False, done=False)
            if job.record:
                live.frames.append(world.picture(FRAME_PIXELS))
        else:
            step = live.play(actions)
            live.steps = world.num_steps

        if step.done:
            return live.end(step.success)

        text = {TASK: world.wrong_instruction} if job.wrong else {}
        return EpisodeState(job, step.observation | text, step.success, live.steps)
    except Exception as error:
        _worlds.pop((config, job.slot), None)  # it may be broken
        return live.end(success=False, error=f"{type(error).__name__}: {error}")
