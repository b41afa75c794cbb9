"""Success of a policy over seeded episodes of a world's tasks, with its controls.

Episodes are played in waves: one call of the policy answers all that are still going, simulation
runs in worker processes. A wave's members do not depend on the number of workers, so neither does
the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from mesotron.config import WorldConfig
from mesotron.vla.interface import Act, Episode, EvalResult, Observation
from mesotron.vla.simulation.episodes import Job, Played, forgetting
from mesotron.vla.simulation.processes import Workers
from mesotron.vla.worlds import build_world

EPISODES = "mesotron.vla.simulation.episodes"


def evaluate(
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
    """Play every task on every seed with a policy.

    Args:
        act: B observations -> actions (B, K, A).
        world: where, with its perturbation.
        seeds: scenes; those from `EVAL_SEED` on are never trained on.
        execute: actions of a chunk that are taken before the policy looks again.
        workers: processes; None for as many as there are processors, 1 for none beside this one.
        wrong: tell the policy another instruction that the picture allows, and judge by the right
            one: what remains is success without language.
        frames: record the first so many episodes of each task.
        batch: episodes of a wave.

    Example:
        >>> still = lambda seen: np.zeros((len(seen), 4, 4))
        >>> evaluate(still, WorldConfig(name="blocks_state"), [1_000_000], workers=1).success
        0.0
    """
    tasks = build_world(world).tasks
    jobs = list_jobs(tasks, seeds, wrong, frames, batch)
    if execute < 1:
        raise ValueError(f"{execute} actions cannot be taken before looking again; give 1 or more")
    with Workers(workers) as crew, forgetting():
        played = [
            episode
            for start in range(0, len(jobs), batch)
            for episode in play_wave(act, world, jobs[start : start + batch], crew, execute)
        ]
    return summarise(world, tasks, jobs, played, "wrong instruction" if wrong else "")


def evaluate_expert(
    world: WorldConfig, seeds: Sequence[int], *, workers: int | None = None, frames: int = 0
) -> EvalResult:
    """The scripted expert on the same episodes: the most that can be expected.

    Example:
        >>> evaluate_expert(WorldConfig(name="blocks_state"), [1_000_000], workers=1).success
        1.0
    """
    tasks = build_world(world).tasks
    jobs = list_jobs(tasks, seeds, False, frames, batch=1)
    with Workers(workers) as crew, forgetting():
        done = dict(crew.map(f"{EPISODES}:play_expert", [(world, job) for job in jobs]))
    return summarise(world, tasks, jobs, [done[k] for k in range(len(jobs))], "expert")


def list_jobs(
    tasks: tuple[str, ...], seeds: Sequence[int], wrong: bool, frames: int, batch: int
) -> list[Job]:
    """Every episode in order of tasks, then seeds, with its slot in its wave."""
    if not seeds:
        raise ValueError("there is no seed to evaluate on; give one or more")
    pairs = product(range(len(tasks)), enumerate(seeds))
    return [
        Job(number % batch, seed, task, wrong, record=place < frames)
        for number, (task, (place, seed)) in enumerate(pairs)
    ]


def play_wave(
    act: Act, world: WorldConfig, jobs: list[Job], crew: Workers, execute: int
) -> list[Played]:
    """Play up to a wave of episodes to their ends; results in the order of the jobs."""
    num = len(crew.members)
    mine = [[job for job in jobs if job.slot % num == k] for k in range(num)]
    questions = [(world, part) if part else None for part in mine]
    now = collect(crew.each(f"{EPISODES}:begin", questions))
    ended = {slot: played for slot, played in now.items() if played.done}
    going = {slot: played.observation for slot, played in now.items() if not played.done}
    while going:
        slots = sorted(going)
        actions = ask_policy(act, [going[slot] for slot in slots], execute)
        chunks = dict(zip(slots, actions, strict=True))
        shares = [[(slot, chunks[slot]) for slot in slots if slot % num == k] for k in range(num)]
        questions = [(world, share) if share else None for share in shares]
        now = collect(crew.each(f"{EPISODES}:advance", questions))
        ended |= {slot: played for slot, played in now.items() if played.done}
        going = {slot: played.observation for slot, played in now.items() if not played.done}
    return [ended[job.slot] for job in jobs]


def collect(answers: list[list[Played] | None]) -> dict[int, Played]:
    """The workers' answers by slot."""
    return {played.slot: played for answer in answers if answer for played in answer}


def ask_policy(act: Act, seen: list[Observation | None], execute: int) -> np.ndarray:
    """The first `execute` actions for each observation, (B, execute, A)."""
    actions = np.asarray(act([observation for observation in seen if observation is not None]))
    if actions.ndim != 3 or len(actions) != len(seen):
        raise ValueError(
            f"a policy answers {len(seen)} observations with actions ({len(seen)}, chunk, action), "
            f"not with shape {actions.shape}"
        )
    if actions.shape[1] < execute:
        raise ValueError(
            f"the policy's chunks have {actions.shape[1]} actions, fewer than the {execute} to be "
            "taken before it looks again"
        )
    return actions[:, :execute]


def summarise(
    world: WorldConfig, tasks: tuple[str, ...], jobs: list[Job], played: list[Played], control: str
) -> EvalResult:
    """Episodes by name, and the frames that were recorded."""
    pairs = list(zip(jobs, played, strict=True))
    episodes = [
        Episode(tasks[job.task], job.seed, end.success, end.steps, end.error) for job, end in pairs
    ]
    frames = {
        (tasks[job.task], job.seed): end.frames for job, end in pairs if end.frames is not None
    }
    return EvalResult(world, episodes, control, frames)
